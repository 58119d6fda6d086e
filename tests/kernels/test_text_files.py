"""Texts of CUDA kernels lie in files, and what MLX is given includes them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from turboquant_mlx.kernels import text_files
from turboquant_mlx.kernels.text_files import shortened

HEADER = "typedef unsigned int uint;\n"
SOURCE = "y[threadIdx.x] = x[threadIdx.x] * uint(x_shape[0]);\n" * 100


@pytest.fixture(autouse=True)
def folder_of_each_test(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "_folder", lambda: tmp_path)


def included(text: str) -> str:
    (path,) = re.findall(r'^#include "(.*)"$', text, re.MULTILINE)
    return Path(path).read_text()


def test_the_files_hold_the_texts():
    header, source = shortened(HEADER, SOURCE, ["x"])
    assert included(header) == HEADER
    assert included(source) == SOURCE
    assert len(header) + len(source) < 1000


def test_the_short_body_names_the_shapes_that_mlx_shall_pass():
    _, source = shortened(HEADER, SOURCE + "z_strides[1]", ["x", "y", "z"])
    assert "x_shape" in source
    assert "z_strides" in source
    assert "y_shape" not in source
    assert "z_shape" not in source


def test_other_texts_have_other_names():
    assert shortened(HEADER, SOURCE, ["x"]) == shortened(HEADER, SOURCE, ["x"])
    assert shortened(HEADER, SOURCE, ["x"]) != shortened(HEADER, SOURCE + " ", ["x"])


def test_where_no_file_can_be_written_texts_stay_as_they_are(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "_folder", lambda: None)
    assert shortened(HEADER, SOURCE, ["x"]) == (HEADER, SOURCE)
    monkeypatch.setattr(text_files, "_folder", lambda: tmp_path / "gone")
    assert shortened(HEADER, SOURCE, ["x"]) == (HEADER, SOURCE)


def test_a_folder_whose_name_cannot_be_included_is_not_used(tmp_path, monkeypatch):
    odd = tmp_path / 'a "quoted" name'
    odd.mkdir()
    monkeypatch.setattr(text_files, "_folder", lambda: odd)
    assert shortened(HEADER, SOURCE, ["x"]) == (HEADER, SOURCE)


def test_the_folder_is_gone_when_the_process_is():
    program = (
        "from turboquant_mlx.kernels import text_files\n"
        "text_files.shortened('a', 'b', [])\n"
        "print(text_files._folder())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    folder = Path(done.stdout.strip())
    assert folder.name.startswith("turboquant-kernels-")
    assert not folder.exists()

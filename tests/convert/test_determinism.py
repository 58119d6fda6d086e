"""The same source, options and versions give the same bytes, in any process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from converting import Workshop, contents, manifest_of

FLAGS = [
    [],
    [
        *("--use-qjl", "--ternary-experts", "--expert-down-bits", "4"),
        *("--quantize-extras", "--no-balance"),
    ],
]
# Balancing runs the model, and matrix products may depend on how many cores share them. All other
# arithmetic may not: in the second process one core makes the second model.
PROGRAM = """
import os, sys
from turboquant_mlx.convert.command import main

for number, flags in enumerate({flags!r}):
    if number and {alone} and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {{min(os.sched_getaffinity(0))}})
    code = main(["--hf-path", "../source", "--mlx-path", f"model-{{number}}", *flags])
    assert code == 0, code
"""


@pytest.fixture(scope="module")
def both(workshop: Workshop, moe: Path) -> list[Path]:
    """Two folders in each of which a process of its own has made the same conversions."""
    place = workshop.root / "twice"
    place.mkdir()
    (place / "source").symlink_to(moe)
    folders = [place / "first", place / "second"]
    for number, folder in enumerate(folders):
        folder.mkdir()
        environment = os.environ | {"PYTHONHASHSEED": str(number)}
        command = [sys.executable, "-c", PROGRAM.format(flags=FLAGS, alone=number == 1)]
        subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    return folders


@pytest.mark.parametrize("number", range(len(FLAGS)))
def test_two_processes_write_identical_files(both: list[Path], number: int) -> None:
    first, second = (contents(folder / f"model-{number}") for folder in both)
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == []
    assert len(manifest_of(both[0] / "model-0").modules) > 20


def test_this_process_writes_the_same_weights(
    both: list[Path], workshop: Workshop, moe: Path
) -> None:
    for number, flags in enumerate(FLAGS):
        balanced = "--no-balance" not in flags
        here = contents(workshop.converted(moe, *flags, balanced=balanced).folder)
        there = contents(both[0] / f"model-{number}")
        names = ("model.safetensors", "model.safetensors.index.json", "config.json")
        assert [name for name in names if here[name] != there[name]] == []

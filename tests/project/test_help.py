"""Every command explains itself at once, without loading MLX."""

from __future__ import annotations

import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LIMIT_SECONDS = 0.5
TRIES = 3


def ask_for_help(entry: str) -> tuple[float, subprocess.CompletedProcess[str]]:
    """What the console script of this entry point does with --help, and the seconds it takes."""
    module, _, function = entry.partition(":")
    program = f"import sys; from {module} import {function} as f; sys.exit(f(['--help']))"
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    return time.perf_counter() - start, done


@pytest.mark.parametrize(("command", "entry"), PROJECT["scripts"].items())
def test_help_answers_in_half_a_second(command, entry):
    fastest = float("inf")
    for _ in range(TRIES):  # the first run may have to read and compile everything
        seconds, done = ask_for_help(entry)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"usage: {command} ")
        assert done.stderr == ""
        fastest = min(fastest, seconds)
    assert fastest < LIMIT_SECONDS

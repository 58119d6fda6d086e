"""Every command explains itself at once, without loading MLX."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src"
COMMANDS = sorted(
    ".".join(path.parent.relative_to(SOURCE).parts) for path in SOURCE.rglob("__main__.py")
)
LIMIT_SECONDS = 0.5
TRIES = 3


@pytest.mark.parametrize("module", COMMANDS)
def test_help_answers_in_half_a_second(module):
    fastest = float("inf")
    for _ in range(TRIES):  # the first run may have to read and compile everything
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", module, "--help"], capture_output=True, text=True
        )
        fastest = min(fastest, time.perf_counter() - start)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("usage: ")
        assert done.stderr == ""
    assert fastest < LIMIT_SECONDS

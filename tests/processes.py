"""Commands as processes of their own, which tests interrupt."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest


def listen_to_ctrl_c() -> None:
    """For ``preexec_fn``: a parent in the background of a shell hands down that it is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def end_of(process: subprocess.Popen[bytes]) -> tuple[int, bytes]:
    """Exit code and the rest of stderr of a process that should end within 30 seconds."""
    try:
        _, err = process.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        signals = _signals(process.pid)
        process.kill()
        _, err = process.communicate()
        pytest.fail(f"still running after 30 seconds; {signals}; stderr: {err[-1000:]!r}")
    return process.returncode, err


def _signals(pid: int) -> str:
    """Which signals a process holds back, ignores and handles, as Linux tells it."""
    status = Path(f"/proc/{pid}/status")
    if not status.exists():
        return "no /proc here"
    lines = status.read_text().splitlines()
    return ", ".join(line for line in lines if line.startswith(("Sig", "Shd", "State")))

"""Processes that search trellis codes beside this one.

The search makes very many short NumPy calls. Among threads, the interpreter's lock changes hands at
each of them, which takes as long as the call itself: two threads are slower than one. So threads
hand whole searches to a process of their own and wait. What is sent are small whole numbers and the
result is exact, so it does not matter where it is computed; a process that cannot be started, or
dies, is replaced by doing the work here.

A process starts with its first search (a fraction of a second), ends when its standard input does
or after a minute without work, and takes some 50 MB. It loads NumPy, not MLX.
"""

from __future__ import annotations

import atexit
import os
import struct
import subprocess
import sys
from contextlib import suppress
from typing import IO, Any

import numpy as np

# n, lanes, bits, window, has start, has end, stop; then levels, grid, start, end
HEADER = struct.Struct("<7q")
GRID_TYPE, STATE_TYPE = np.dtype("<i2"), np.dtype("<i4")
_PROGRAM = "from turboquant_mlx.quant.helper_process import serve; serve()"

# BLAS libraries: the products of a search are too small to share.
_SINGLE = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"), "1")

# A process starts in the time that so many weights take; before, a model may be too small for it.
WORTH_STARTING = 1_000_000
SMALL = 1 << 16  # weights of a tensor whose pieces take less time than handing them over
_searched = 0

_idle: list[Helper] = []  # list operations are atomic
_failures = 0
_MOST_FAILURES = 3  # then no more are started


class Helper:
    """One process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **_SINGLE},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to: IO[bytes] = self._process.stdin
        self._from: IO[bytes] = self._process.stdout

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def search(self, levels: np.ndarray, header: tuple[int, ...], arrays: list[Any]) -> np.ndarray:
        """Send one search and wait for its result."""
        n, lanes, *_, stop = header
        self._to.write(HEADER.pack(*header))
        for array in (levels, *arrays):
            self._to.write(array.tobytes())
        self._to.flush()
        if stop:
            return read_array(self._from, STATE_TYPE, (lanes,)).astype(np.intp)
        return read_array(self._from, np.dtype(np.uint8), (n, lanes))

    def close(self) -> None:
        """End the process."""
        with suppress(OSError):
            self._to.close()
        self._from.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def are_worth_starting(weights: int) -> bool:
    """Whether a tensor of so many weights is worth helpers: it, and what was coded before it."""
    global _searched
    if weights <= SMALL:
        return False
    _searched += weights
    return _searched >= WORTH_STARTING


def search_elsewhere(
    levels: np.ndarray,
    bits: int,
    window: int,
    grid: np.ndarray,
    start: np.ndarray | None,
    end: np.ndarray | None,
    stop: int,
) -> np.ndarray | None:
    """A search in another process; None where that is not possible.

    Args:
        levels: int16 [2**window], table in grid units.
        bits, window: of the code.
        grid, start, end, stop: as for the search itself.
    """
    global _failures
    if _failures >= _MOST_FAILURES or not sys.executable or getattr(sys, "frozen", False):
        return None
    header = (*grid.shape, bits, window, start is not None, end is not None, stop)
    states = [s.astype(STATE_TYPE) for s in (start, end) if s is not None]
    helper = None
    try:
        helper = _take()
        result = helper.search(levels.astype(GRID_TYPE), header, [grid.astype(GRID_TYPE), *states])
    except (OSError, EOFError):
        _failures += 1
        if helper is not None:
            helper.close()
        return None
    except BaseException:  # interrupted, with half an answer in the pipe
        if helper is not None:
            helper.close()
        raise
    _idle.append(helper)
    return result


def _take() -> Helper:
    """An idle process, or a new one."""
    while True:
        try:
            helper = _idle.pop()
        except IndexError:
            return Helper()
        if helper.is_alive():
            return helper
        helper.close()


@atexit.register
def close_all() -> None:
    """End all idle processes."""
    while _idle:
        _idle.pop().close()


def read_array(stream: IO[bytes], dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """An array from a pipe; EOFError where it ends too early."""
    array: Any = np.empty(shape, dtype)
    view = memoryview(array.reshape(-1).view(np.uint8))
    while view:
        count = stream.readinto(view)  # type: ignore[attr-defined]
        if not count:
            raise EOFError
        view = view[count:]
    return array

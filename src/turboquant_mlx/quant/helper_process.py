"""What a process of ``helpers`` does: answer searches until its standard input ends."""

from __future__ import annotations

import os
import select
import signal
from typing import IO

import numpy as np

from .helpers import GRID_TYPE, HEADER, STATE_TYPE, read_array
from .viterbi import grid_trellis, search_here

IDLE_SECONDS = 60.0


def serve() -> None:
    """Run until there is no more work, nobody to do it for, or none for IDLE_SECONDS."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for the parent, which then ends us
    with os.fdopen(os.dup(0), "rb") as source, os.fdopen(os.dup(1), "wb") as target:
        while select.select([source], [], [], IDLE_SECONDS)[0]:
            header = source.read(HEADER.size)
            if len(header) < HEADER.size:
                return
            _answer(HEADER.unpack(header), source, target)


def _answer(header: tuple[int, ...], source: IO[bytes], target: IO[bytes]) -> None:
    n, lanes, bits, window, has_start, has_end, stop = header
    levels = read_array(source, GRID_TYPE, (1 << window,)).astype(np.int32)
    grid = read_array(source, GRID_TYPE, (n, lanes)).astype(np.float32)
    start = read_array(source, STATE_TYPE, (lanes,)).astype(np.intp) if has_start else None
    end = read_array(source, STATE_TYPE, (lanes,)).astype(np.intp) if has_end else None
    trellis = grid_trellis(levels.tobytes(), bits, window)
    result = search_here(trellis, grid, start, end, stop)
    target.write(result.astype(STATE_TYPE if stop else np.uint8).tobytes())
    target.flush()

"""Sharing NumPy's matrix products between cores without a BLAS's own threads.

OpenBLAS, which NumPy's wheels bring, lets its threads wait for each other in a busy loop. When
anything else wants a core, they burn their time slices: with two cores and a load of ten a product
took seven times as long with its threads as without. Here the BLAS keeps to one thread and the
rows of the result are spread over a pool of Python threads, which sleep when they wait. Where
nothing else runs that is as fast; but for products of less than about a millisecond, those of
single tokens, waking a thread costs what it saves, see ``small_product``.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
from threadpoolctl import ThreadpoolController

from ..quant.threads import usable_cpus

_lock = threading.Lock()
_inside = 0  # threads that are in one_thread now
_counts: list[int] = []  # what the libraries had before the first of them
_nesting = threading.local()


@cache
def _libraries() -> list:
    """Handles of the BLAS libraries in this process (none where Apple's Accelerate is used)."""
    return list(ThreadpoolController().select(user_api="blas").lib_controllers)


class limit:
    """Context that keeps the BLAS to so many threads; may be nested, and entered by many threads.

    Inside another one it changes nothing. Some builds count for the whole process, others for each
    calling thread, so every thread sets the number when it enters and puts the first one back when
    it leaves. (Where the count is the process's, another thread that is still inside is then
    slower, not wrong.)

    A class, not a generator: this is entered for every product of every generated token.
    """

    def __init__(self, threads: int):
        self._threads = threads

    def __enter__(self) -> None:
        global _inside, _counts
        depth = getattr(_nesting, "depth", 0)
        _nesting.depth = depth + 1
        if depth == 0:
            libraries = _libraries()
            with _lock:
                if _inside == 0:
                    _counts = [library.get_num_threads() for library in libraries]
                for library in libraries:
                    library.set_num_threads(self._threads)
                _inside += 1

    def __exit__(self, *_: object) -> None:
        global _inside
        _nesting.depth -= 1
        if _nesting.depth == 0:
            with _lock:
                _inside -= 1
                for library, count in zip(_libraries(), _counts, strict=True):
                    library.set_num_threads(count)


def one_thread() -> limit:
    """Keep the BLAS to one thread."""
    return limit(1)


class _Contention:
    """Notices that other programs want the cores, from the time that products were kept waiting.

    A thread of the BLAS that waits for another yields its core again and again; where nobody else
    wants it, it gets it back at once and its own clock runs on.
    """

    TRIAL = 32  # products between two looks
    WAITED = 0.3  # share of the time without a core from which on the cores count as wanted
    PAUSE_S = 5.0  # until the next trial

    def __init__(self) -> None:
        self._wall = self._own = 0.0
        self._seen = 0
        self._until = 0.0

    def now(self, clock_s: float) -> bool:
        return clock_s < self._until

    def note(self, wall_s: float, own_s: float, clock_s: float) -> None:
        """Count one product that took ``wall_s``, ``own_s`` of it on a core."""
        self._wall += wall_s
        self._own += own_s
        self._seen += 1
        if self._seen == self.TRIAL:
            if self._own < (1 - self.WAITED) * self._wall:
                self._until = clock_s + self.PAUSE_S
            self._wall = self._own = 0.0
            self._seen = 0


_contention = _Contention()


def small_product(x: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """``x matrix^T`` for one row, where waking a thread of ours takes as long as the product.

    The BLAS uses threads of its own while nobody else wants the cores; a power of two of them, and
    in equal parts, for then the result is the same to the last bit as with one.

    Args:
        x: float32 [1, columns]. matrix: float32 [rows, columns].
    """
    started = time.perf_counter()
    threads = 1
    if not _contention.now(started):
        # one core is MLX's, whose thread takes turns with this one
        while threads * 2 < usable_cpus() and len(matrix) % (16 * threads) == 0:
            threads *= 2
    with limit(threads):
        if threads == 1:
            return x @ matrix.T
        began = time.thread_time()
        y = x @ matrix.T
    now = time.perf_counter()
    _contention.note(now - started, time.thread_time() - began, now)
    return y


def _begin_helper() -> None:
    """Where the BLAS counts threads per thread, a helper's own count is one for good."""
    for library in _libraries():
        library.set_num_threads(1)


@cache
def _pool() -> ThreadPoolExecutor | None:
    """Helpers beside the calling thread; None where there is but one CPU."""
    helpers = usable_cpus() - 1
    if not helpers:
        return None
    return ThreadPoolExecutor(helpers, "turboquant", initializer=_begin_helper)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # a child has none of its threads


def share(work: Callable[[int, int], None], pieces: Iterable[tuple[int, int]]) -> None:
    """Call ``work(start, stop)`` for all pieces, from this thread and from the pool's.

    The BLAS keeps to one thread meanwhile. Every piece must write to a place of its own. The first
    exception is raised in the end.
    """
    waiting = iter(list(pieces))

    def take() -> None:
        while True:
            with _lock:
                piece = next(waiting, None)
            if piece is None:
                return
            work(*piece)

    pool = _pool()
    # the limit is set and lifted here alone, while no helper is at work: a product whose number of
    # threads changed under way would be another in its last bits
    with one_thread():
        helpers = [] if pool is None else [pool.submit(take) for _ in range(usable_cpus() - 1)]
        try:
            take()
        finally:
            for helper in helpers:
                # one that has not begun has nothing left to do
                if not helper.cancel():
                    helper.result()


def pieces_of(length: int, step: int) -> list[tuple[int, int]]:
    """[0, length) cut into stretches of at most ``step``."""
    return [(start, min(start + step, length)) for start in range(0, length, step)]

"""Sharing NumPy's matrix products between cores without a BLAS's own threads.

OpenBLAS, which NumPy's wheels bring, lets its threads wait for each other in a busy loop. When
anything else wants a core, they burn their time slices: with two cores and a load of ten a product
took seven times as long with its threads as without. Here the BLAS keeps to one thread and the
rows of the result are spread over a pool of Python threads, which sleep when they wait. Where
nothing else runs that is as fast.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache

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


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep the BLAS to one thread; may be nested, and entered by many threads.

    Some builds count for the whole process, others for each calling thread, so every thread sets
    the number when it enters and puts the first one back when it leaves. (Where the count is the
    process's, another thread that is still inside is then slower, not wrong.)
    """
    global _inside, _counts
    depth = getattr(_nesting, "depth", 0)
    _nesting.depth = depth + 1
    libraries = _libraries()
    if depth == 0:
        with _lock:
            if _inside == 0:
                _counts = [library.get_num_threads() for library in libraries]
            for library in libraries:
                library.set_num_threads(1)
            _inside += 1
    try:
        yield
    finally:
        _nesting.depth = depth
        if depth == 0:
            with _lock:
                _inside -= 1
                for library, count in zip(libraries, _counts, strict=True):
                    library.set_num_threads(count)


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

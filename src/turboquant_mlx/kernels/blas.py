"""Sharing NumPy's matrix products between cores without a BLAS's own threads.

OpenBLAS, which NumPy's wheels bring, lets its threads wait for each other in a busy loop. When
anything else wants a core, they burn their time slices: with two cores and a load of ten a product
took seven times as long with its threads as without. Here the BLAS keeps to one thread and the
rows of the result are spread over a pool of Python threads, which sleep when they wait. Where
nothing else runs that is as fast, except for products of less than about a millisecond, those of
single tokens: waking a thread costs what it saves, and one core alone reads memory nearly as fast.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple

import numpy as np  # noqa: F401  (loads the library that is looked for here)
from threadpoolctl import ThreadpoolController

from ..quant.threads import usable_cpus


class _Library(NamedTuple):
    """One BLAS library of this process."""

    get: Callable[[], int]
    set: Callable[[int], Any]
    shared: bool
    """Whether there is one number of threads for the process, not one for each calling thread."""


_lock = threading.Lock()
_inside = 0  # threads that are in one_thread now
_counts: list[int] = []  # what the libraries had before the first of them
_nesting = threading.local()


@cache
def _libraries() -> list[_Library]:
    """The BLAS libraries in this process (none where Apple's Accelerate is used)."""
    found = ThreadpoolController().select(user_api="blas").lib_controllers
    return [_own_functions(one) or _by_controller(one) for one in found]


def _by_controller(controller: Any) -> _Library:
    return _Library(controller.get_num_threads, controller.set_num_threads, shared=False)


def _own_functions(controller: Any) -> _Library | None:
    """The functions of an OpenBLAS with threads of its own, None for anything else.

    threadpoolctl takes a number from the first thread alone that ever gave one and does nothing,
    silently, for the others; and looking up its functions takes longer than a small product.
    """
    if controller.internal_api != "openblas" or controller.threading_layer == "openmp":
        return None
    library = ctypes.CDLL(controller.filepath)
    for affixes in ("{}", "scipy_{}", "{}64_", "{}_64", "scipy_{}64_", "scipy_{}_64"):
        get, set_ = (
            getattr(library, affixes.format(f"openblas_{verb}_num_threads"), None)
            for verb in ("get", "set")
        )
        if get is not None and set_ is not None:
            return _Library(get, set_, shared=True)
    return None


class one_thread:
    """Context that keeps the BLAS to one thread; may be nested, and entered by many threads.

    Where the count is the process's, the first thread that enters sets it and the last one that
    leaves puts it back; where every thread has its own, each does so for itself.

    A class, not a generator: this is entered for every product of every generated token.
    """

    def __enter__(self) -> None:
        global _inside, _counts
        depth = getattr(_nesting, "depth", 0)
        _nesting.depth = depth + 1
        if depth == 0:
            libraries = _libraries()
            with _lock:
                if not _inside:
                    _counts = [library.get() for library in libraries]
                for library in libraries:
                    if not (_inside and library.shared):
                        library.set(1)
                _inside += 1

    def __exit__(self, *_: object) -> None:
        global _inside
        _nesting.depth -= 1
        if _nesting.depth == 0:
            with _lock:
                _inside -= 1
                for library, count in zip(_libraries(), _counts, strict=True):
                    if not (_inside and library.shared):
                        library.set(count)


def _begin_helper() -> None:
    """Where the BLAS counts threads per thread, a helper's own count is one for good."""
    for library in _libraries():
        if not library.shared:
            library.set(1)


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

"""Spread independent pieces of NumPy work over threads.

NumPy releases the interpreter lock inside its loops, so threads do share the work. A piece writes
to its own part of the output and depends on nothing else: the result is the same whatever the
number of threads.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


def usable_cpus() -> int:
    """CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


_own = threading.local()


def in_parallel() -> bool:
    """Whether this is one of several threads of ``for_each``."""
    return getattr(_own, "in_parallel", False)


def _begin() -> None:
    _own.in_parallel = True


def for_each(work: Callable[[int], None], starts: range, threads: int | None = None) -> None:
    """Call ``work(start)`` for all starts; the first exception ends it and is raised.

    Args:
        work: called from several threads at once.
        starts: arguments.
        threads: how many, default ``usable_cpus()``.
    """
    workers = min(threads or usable_cpus(), len(starts))
    if workers <= 1:
        for start in starts:
            work(start)
        return
    with ThreadPoolExecutor(workers, initializer=_begin) as pool:
        waiting: deque[Future[None]] = deque()
        try:
            for start in starts:
                if len(waiting) >= 2 * workers:
                    waiting.popleft().result()
                waiting.append(pool.submit(work, start))
            while waiting:
                waiting.popleft().result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise

"""Which back-end runs our array programs, decided in one place.

A layer asks :func:`backend` and calls the program of that name; nothing else in the package
looks at devices. Tests force a choice with :func:`force_backend`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import mlx.core as mx

Backend = Literal["cpu", "portable"]
"""``cpu``: numpy and the system BLAS. ``portable``: plain MLX operations on any device."""

_forced = threading.local()


def backend() -> Backend:
    """The back-end for the current default device.

    On a CPU that is ``cpu`` (MLX's own CPU build multiplies matrices slowly); on a GPU, Metal or
    CUDA, it is ``portable``.
    """
    choice = getattr(_forced, "choice", None)
    if choice is not None:
        return choice
    return "cpu" if mx.default_device().type == mx.DeviceType.cpu else "portable"


@contextmanager
def force_backend(choice: Backend) -> Iterator[None]:
    """Use one back-end in this thread, whatever the device."""
    previous = getattr(_forced, "choice", None)
    _forced.choice = choice
    try:
        yield
    finally:
        _forced.choice = previous


def is_traced(*arrays: mx.array) -> bool:
    """Whether some have no value yet because a transformation (compile, vmap) is tracing.

    Code that leaves MLX, as the ``cpu`` back-end does, must not run then. Otherwise all are
    evaluated, together: each evaluation costs a tenth of a millisecond, so ask once, for the
    arrays that will be read and in the dtype that they will be read in.
    """
    try:
        mx.eval(*arrays)
    except (ValueError, RuntimeError) as error:
        if "function transformations" in str(error):
            return True
        raise
    return False

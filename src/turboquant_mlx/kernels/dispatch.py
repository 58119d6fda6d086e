"""Which back-end runs our array programs, decided in one place.

A layer asks :func:`backend` and calls the program of that name; nothing else in the package
looks at devices. Tests force a choice with :func:`force_backend`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Literal

import mlx.core as mx

from .dialect import Dialect

Backend = Literal["cpu", "portable", "metal", "cuda"]
"""``cpu``: numpy and the system BLAS. ``metal``, ``cuda``: kernels that read packed words, and
plain MLX where there is none. ``portable``: plain MLX operations on any device."""

KERNEL_DTYPES = (mx.float16, mx.bfloat16, mx.float32)

_CPU = mx.DeviceType.cpu


class _Forced(threading.local):
    choice: Backend | None = None


_forced = _Forced()


def backend() -> Backend:
    """The back-end for the current default device.

    On a CPU that is ``cpu`` (MLX's own CPU build multiplies matrices slowly); on a GPU the dialect
    of its kernels.
    """
    # layers ask at every call, so this is written to be quick
    choice = _forced.choice
    if choice is not None:
        return choice
    return "cpu" if mx.default_device().type is _CPU else _gpu_backend()


@cache
def _gpu_backend() -> Backend:
    if mx.metal.is_available():
        return "metal"
    return "cuda" if mx.cuda.is_available() else "portable"


def kernels_of_backend(dtype: mx.Dtype) -> Dialect | None:
    """The dialect of the back-end's kernels for activations of a dtype, None if it has none."""
    return kernels_of(backend(), dtype)


def kernels_of(choice: Backend, dtype: mx.Dtype) -> Dialect | None:
    """``kernels_of_backend`` for a back-end that has been asked for already."""
    if choice == "cpu" or choice == "portable" or dtype not in KERNEL_DTYPES:
        return None
    return choice


def why_backend() -> str:
    """One line for people: the back-end and what decided it."""
    choice = backend()
    if _forced.choice is not None:
        return f"{choice} (chosen by the caller)"
    if choice == "cpu":
        found = "the default device is the CPU"
        if _gpu_backend() == "portable":
            found = "MLX finds no GPU"
        return f"cpu ({found}; products by NumPy's BLAS)"
    if choice == "portable":
        return "portable (a GPU that is neither Metal nor CUDA; plain MLX operations)"
    name = "Metal" if choice == "metal" else "CUDA"
    return f"{choice} (the default device is a {name} GPU; kernels read packed weights)"


@contextmanager
def force_backend(choice: Backend) -> Iterator[None]:
    """Use one back-end in this thread, whatever the device."""
    previous = _forced.choice
    _forced.choice = choice
    try:
        yield
    finally:
        _forced.choice = previous


def is_differentiated(*arrays: mx.array) -> bool:
    """Whether a gradient through some of them may be asked for later.

    MLX has no such question, but where a gradient (or ``vjp``, ``jvp``) is being taken a compiled
    function calls the Python function again instead of its compiled form. (Where compiling is
    disabled it always does: True then, which costs time only.)
    """
    return _calls_python(*arrays) and _calls_python(*arrays)  # the first time it compiles


def _calls_python(*arrays: mx.array) -> bool:
    _asking.called = False
    _note_call(*arrays)
    return _asking.called


_asking = threading.local()


@partial(mx.compile, shapeless=True)
def _note_call(*arrays: mx.array) -> tuple[mx.array, ...]:
    _asking.called = True
    return arrays


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

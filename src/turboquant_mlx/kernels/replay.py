"""Programs of kernels that are traced once and replayed.

While single tokens are generated on a large GPU, the host's time for a call bounds the speed. In a
function that ``mx.compile`` has traced a call takes a third of what it takes from Python.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from .dialect import has_stand_in

Program = Callable[..., list[mx.array]]


def traced(program: Program) -> Program:
    """A program of kernels that holds no arrays, called as ``mx.compile`` has traced it.

    It is traced for each shape and dtype of its inputs, so sizes that change from token to token
    belong into an array.
    """
    compiled = mx.compile(program)

    def call(*inputs: mx.array) -> list[mx.array]:
        # what stands in for a kernel needs values
        return program(*inputs) if has_stand_in() else compiled(*inputs)

    return call


class Replay:
    """A program of arrays that it holds and of others that it is given.

    The arrays that it holds, weights, become part of the trace. They are compared by identity at
    each call, and the program is made anew when one has been replaced.
    """

    def __init__(self) -> None:
        self._held: tuple[mx.array, ...] = ()
        self._program: Program | None = None

    def __call__(
        self, held: tuple[mx.array, ...], make: Callable[[], Program], *inputs: mx.array
    ) -> list[mx.array]:
        """What the program makes of ``inputs``, lazy.

        Args:
            held: the arrays that the program will hold, the same in number at each call.
            make: returns a function of as many arrays as there are ``inputs``. It holds the
                arrays of this call.
            inputs: each shape and dtype of theirs is traced once.
        """
        if has_stand_in():
            return make()(*inputs)  # what stands in for a kernel needs values
        if self._program is None or not same_arrays(self._held, held):
            # whatever is not computed yet would be computed again at each call
            mx.eval(held)
            self._held, self._program = held, mx.compile(make())
        return self._program(*inputs)

    def __getstate__(self) -> dict[str, Any]:
        # a copy of the layer has arrays of its own
        return {"_held": (), "_program": None}


def same_arrays(held: tuple, now: tuple) -> bool:
    """Whether the entries are the very same objects, one by one."""
    if len(held) != len(now):
        return False
    for a, b in zip(held, now, strict=True):  # noqa: SIM110  # all() takes twice as long
        if a is not b:
            return False
    return True

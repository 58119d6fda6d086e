"""Layers that read the same activation rotate it once.

q, k and v of one attention block (gate and up of one MLP, all experts of one block) share an input
multiplier and a Hadamard block size. mlx-lm calls the layers one after the other with the same
array, so the group remembers its last input and what became of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..quant.rotation import rotate


class RotationGroup:
    """The shared input transform ``H (m * x)`` of a set of layers.

    The multiplier ``m`` (and that of the QJL sketch) is a parameter of the group's leader, one of
    its layers; the others reach it through the group. The group is a plain object, so MLX's
    parameter tree does not see it and stores nothing twice.

    The memo holds the input itself, not its ``id``: an id may be given to a new array as soon as
    the old one is gone. It belongs to one thread and is dropped when the last layer of the group
    has used it, so no activation outlives the block that made it.
    """

    def __init__(self, width: int, block: int):
        self.width = width
        self.block = block
        self.layers: list[nn.Module] = []
        self.leader: nn.Module | None = None
        self.joint: Any = None
        """What multiplies by all layers' weights at once, where there is such a thing."""
        self._local = threading.local()

    def join(self, layer: nn.Module, leads: bool) -> int:
        """Count a layer in; one of them leads. Returns its place in ``layers``."""
        self.layers.append(layer)
        if leads:
            self.leader = layer
        return len(self.layers) - 1

    @property
    def size(self) -> int:
        """How many layers read the input."""
        return len(self.layers)

    @property
    def multiplier(self) -> mx.array:
        """Input multiplier [width]."""
        assert self.leader is not None, "a rotation group was used before it was complete"
        return self.leader["multiplier"]

    def arrays(self) -> tuple[mx.array, ...]:
        """The multiplier and what the layers' codes are decoded from, QJL left out."""
        held = [self.multiplier]
        for layer in self.layers:
            held += (layer["codes"], layer["scales"], layer["table"])
        return tuple(held)

    @property
    def qjl_multiplier(self) -> mx.array:
        """Random signs of the QJL sketch [width]."""
        assert self.leader is not None, "a rotation group was used before it was complete"
        return self.leader["qjl_multiplier"]

    def read(self, x: mx.array, *, rotated: bool, dtype: mx.Dtype) -> mx.array:
        """The input as its layers multiply it, made once for all of them.

        Args:
            x: [..., width].
            rotated: ``H (m * x)`` over the last axis, or x as it is.
            dtype: of the result; the rotation is computed in float32.
        """
        return self.once(x, (rotated, dtype), lambda: self._make(x, rotated, dtype))

    def once(self, x: mx.array, kind: Any, make: Callable[[], Any]) -> Any:
        """What ``make()`` returns for this input, called by the first of the layers only."""
        if self.size == 1:
            return make()
        held = getattr(self._local, "held", None)
        if held is not None and held[0] is x and held[1] == kind:
            _, _, made, uses_left = held
        else:
            made, uses_left = make(), self.size
        self._local.held = (x, kind, made, uses_left - 1) if uses_left > 1 else None
        return made

    def _make(self, x: mx.array, rotated: bool, dtype: mx.Dtype) -> mx.array:
        if not rotated:
            return x.astype(dtype)
        wide = dtype if dtype.size > x.dtype.size else x.dtype
        return rotate(x.astype(wide), self.block, self.multiplier).astype(dtype)

    # A thread-local memo can be neither copied nor pickled, and need not be.
    def __getstate__(self) -> dict:
        return {name: value for name, value in self.__dict__.items() if name != "_local"}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._local = threading.local()

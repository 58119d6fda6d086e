"""The stored form of one quantized weight."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import mlx.core as mx

from .spec import QuantSpec

BLOCK_BYTES = 64 << 20
"""float32 working set of one block of rows where a weight does not go in one piece."""


@dataclass
class PackedWeight:
    """One quantized weight.

    Attributes:
        spec: how to read it.
        shape: (O, I), or (E, O, I) for a stack.
        codes: uint32 [..., O, words].
        scales: float16 or uint8 [..., O, I / group_size].
        table: float32 [2**window_bits], or [3] for ternary; times the scale, the value of a code.
        multiplier: float16 [I], of the input: m in W' = W diag(1/m) H^T.
        qjl_codes: uint32 [..., O, ceil(I / 32)], None without QJL.
        qjl_norms: float16 [..., O], None without QJL.
        qjl_multiplier: float16 [I], None without QJL.
    """

    spec: QuantSpec
    shape: tuple[int, ...]
    codes: mx.array
    scales: mx.array
    table: mx.array
    multiplier: mx.array
    qjl_codes: mx.array | None = None
    qjl_norms: mx.array | None = None
    qjl_multiplier: mx.array | None = None

    def arrays(self) -> dict[str, mx.array]:
        """The arrays that are present, by attribute name."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: a for name, a in found.items() if isinstance(a, mx.array)}

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, multipliers included."""
        return sum(a.nbytes for a in self.arrays().values())

    def rows(self, start: int, stop: int) -> PackedWeight:
        """The rows start..stop-1 of a matrix (experts of a stack) as a weight of their own."""
        return self._with_rows(lambda a: a[start:stop])

    def expert(self, index: int) -> PackedWeight:
        """One matrix of a stack."""
        return self._with_rows(lambda a: a[index])

    def experts(self, indices: mx.array) -> PackedWeight:
        """The matrices of a stack that an integer vector names, as a stack."""
        return self._with_rows(lambda a: a[indices])

    def flat(self) -> PackedWeight:
        """A stack as one tall matrix."""
        lead = len(self.shape) - 1
        rows = math.prod(self.shape[:-1])
        return self._with_rows(lambda a: a.reshape(rows, *a.shape[lead:]))

    def _with_rows(self, choose: Callable[[mx.array], mx.array]) -> PackedWeight:
        """The same weight with the arrays that have rows changed; the rest is shared."""
        changes: dict[str, Any] = {
            name: choose(a)
            for name, a in self.arrays().items()
            if name in ("codes", "scales", "qjl_codes", "qjl_norms")
        }
        shape = (*changes["codes"].shape[:-1], self.shape[-1])
        return replace(self, shape=shape, **changes)


def block_rows(width: int) -> int:
    """Rows whose float32 values fill BLOCK_BYTES."""
    return max(1, BLOCK_BYTES // (4 * width))

"""Decode rows quickly on a CPU: one table look-up yields several weights.

A byte of a 2-bit stream holds four codes, so a table of 256 entries of four float32 values each
decodes it in one step; 12 bits of a 3-bit stream hold four codes as well. Such an entry is moved
as one element of 8 or 16 bytes, which is several times faster than looking up each code.
Widths for which no such table is small (5 to 7 bits) and trellis windows take the general way,
``packing.unpack_codes``. Either way the result is exactly that of ``weight.dequantize_rows``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from .packing import unpack_codes, unpack_trits
from .scales import decode_scales

if TYPE_CHECKING:
    from .weight import PackedWeight

# bits of a code -> codes in one table entry (of a byte; of 12 bits for a 3-bit code)
_CODES_PER_ENTRY = {1: 8, 2: 4, 3: 4, 4: 2, 8: 1}


class RowDecoder:
    """Decodes rows of one packed (O, I) weight in its stored domain, QJL left out.

    Args:
        weight: evaluated arrays; they are viewed, not copied.
    """

    def __init__(self, weight: PackedWeight):
        self.spec = weight.spec
        self.width = weight.shape[-1]
        self._codes = np.array(weight.codes, copy=False)
        self._scales = np.array(weight.scales, copy=False)
        self._table = np.array(weight.table, copy=False)
        self._entries = self._lookup_table()

    def __call__(self, start: int, stop: int) -> np.ndarray:
        """float32 [stop - start, I]: ``scale * table[code]`` of rows start..stop-1."""
        codes = self._codes[start:stop]
        if self._entries is None:
            values = self._table[self._indices(codes)]
        else:
            values = self._look_up(codes)
        scales = decode_scales(self._scales[start:stop], self.spec.scale_layout)
        groups = values.reshape(*scales.shape, self.spec.group_size)
        groups *= scales[..., None]
        return groups.reshape(stop - start, self.width)

    def _indices(self, codes: np.ndarray) -> np.ndarray:
        spec = self.spec
        if spec.code == "ternary":
            return unpack_trits(codes, self.width)
        return unpack_codes(codes, spec.bits, self.width, spec.window_bits, spec.tile)

    def _lookup_table(self) -> np.ndarray | None:
        """[entries] of one opaque element each, or None where the general way is taken."""
        spec = self.spec
        if spec.code == "ternary" or spec.window_bits > spec.bits:
            return None
        n = _CODES_PER_ENTRY.get(spec.bits)
        if n is None:
            return None
        entries = self._table.take(_codes_of_entries(spec.bits, n))
        return entries.view(np.dtype((np.void, 4 * n))).reshape(-1)

    def _look_up(self, codes: np.ndarray) -> np.ndarray:
        assert self._entries is not None
        index = np.ascontiguousarray(codes).view(np.uint8)
        if self.spec.bits == 3:
            index = _twelve_bits(index)
        n = self._entries.dtype.itemsize // 4
        index = index[:, : -(-self.width // n)]
        values = _as_number(self._entries).take(index, mode="clip").view(np.float32)
        return np.ascontiguousarray(values.reshape(len(codes), -1)[:, : self.width])


@lru_cache
def _codes_of_entries(bits: int, n: int) -> np.ndarray:
    """The n codes that each table entry stands for, [2**(bits * n), n]."""
    # the first code is in the lowest bits
    return np.arange(1 << bits * n)[:, None] >> bits * np.arange(n) & ((1 << bits) - 1)


def _twelve_bits(stream: np.ndarray) -> np.ndarray:
    """A byte stream [n, 4 * words] as 12-bit numbers, two from each three bytes."""
    n, length = stream.shape
    if length % 3:
        stream = np.pad(stream, ((0, 0), (0, 3 - length % 3)))
    triples = stream.reshape(n, -1, 3)
    low, middle, high = (triples[..., i].astype(np.uint16) for i in range(3))
    numbers = np.empty((*triples.shape[:2], 2), np.uint16)
    numbers[..., 0] = low | ((middle & 15) << 8)
    numbers[..., 1] = (middle >> 4) | (high << 4)
    return numbers.reshape(n, -1)


def _as_number(entries: np.ndarray) -> np.ndarray:
    """The same bytes as a number type of that size, which numpy moves faster than raw bytes."""
    kind = {4: np.float32, 8: np.complex64, 16: np.complex128}.get(entries.dtype.itemsize)
    return entries if kind is None else entries.view(kind)

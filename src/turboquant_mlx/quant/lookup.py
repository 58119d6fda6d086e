"""Decode rows quickly on a CPU: one table look-up yields several weights.

A byte of a 2-bit stream holds four codes, so a table of 256 entries of four float32 values each
decodes it in one step; 12 bits of a 3-bit stream hold four codes as well. Such an entry is moved
as one element of 8 or 16 bytes, which is several times faster than looking up each code. The
windows of a trellis code overlap: four of 8 bits that slide by 2 lie in 14 bits of the stream, two
that slide by 3 in 11. What has no small table (5 to 7 bits, wide windows) takes the general way,
``packing.unpack_codes``. Either way the result is exactly that of ``weight.dequantize_rows``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from .packing import close_stream, unpack_codes, unpack_trits
from .scales import decode_scales
from .spec import QuantSpec

if TYPE_CHECKING:
    from .weight import PackedWeight

# bits of a code -> codes in one table entry (of a byte; of 12 bits for a 3-bit code)
_CODES_PER_ENTRY = {1: 8, 2: 4, 3: 4, 4: 2, 8: 1}

# the same for windows of 8 bits: of 14, 11 and 12 bits of the stream
_WINDOWS_PER_ENTRY = {2: 4, 3: 2, 4: 2}


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
        if spec.code == "ternary":
            return None
        if spec.is_trellis:
            n = _WINDOWS_PER_ENTRY.get(spec.bits) if spec.window_bits == 8 else None
        else:
            n = _CODES_PER_ENTRY.get(spec.bits)
        if n is None:
            return None
        entries = self._table.take(_windows_of_entries(spec.bits, spec.window_bits, n))
        return entries.view(np.dtype((np.void, 4 * n))).reshape(-1)

    def _look_up(self, codes: np.ndarray) -> np.ndarray:
        assert self._entries is not None
        n = self._entries.dtype.itemsize // 4
        rows, width = len(codes), self.width
        if self.spec.is_trellis:
            width = self.spec.tile or width
            index = _overlapping(codes.reshape(rows * self.width // width, -1), self.spec, width, n)
        else:
            index = np.ascontiguousarray(codes).view(np.uint8)
            if self.spec.bits == 3:
                index = _twelve_bits(index)
        index = index[:, : -(-width // n)]
        values = _as_number(self._entries).take(index, mode="clip").view(np.float32)
        values = values.reshape(len(index), -1)[:, :width]
        return np.ascontiguousarray(values).reshape(rows, self.width)


@lru_cache
def _windows_of_entries(bits: int, window_bits: int, n: int) -> np.ndarray:
    """The n windows that each table entry stands for, [2**(window_bits + bits * (n - 1)), n]."""
    # the first one is in the lowest bits
    stream = np.arange(1 << window_bits + bits * (n - 1))[:, None]
    return stream >> bits * np.arange(n) & ((1 << window_bits) - 1)


def _overlapping(words: np.ndarray, spec: QuantSpec, width: int, n: int) -> np.ndarray:
    """uint16 [rows, at least width / n]: the bits of n successive windows each.

    Args:
        words: uint32 [rows, words]; every row is a circular stretch of ``width`` codes.
    """
    closed = close_stream(words, width * spec.bits, spec.window_bits - spec.bits)
    mask = (1 << spec.window_bits + spec.bits * (n - 1)) - 1
    step = n * spec.bits  # bits from one number to the next
    together = 8 // np.gcd(8, step)  # numbers in whole bytes
    stride = together * step // 8
    groups = -(-width // (n * together))
    dtype = np.dtype("<u2" if together == 1 else "<u4")
    reads: np.ndarray = np.ndarray(
        (len(words), groups), dtype, closed, strides=(closed.strides[0], stride)
    )
    if together == 1:
        return reads & np.uint16(mask)
    numbers = np.empty((len(words), groups, together), np.uint16)
    for i in range(together):
        numbers[..., i] = (reads >> np.uint32(i * step)) & np.uint32(mask)
    return numbers.reshape(len(words), -1)


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

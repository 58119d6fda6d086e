"""Packed codes to levels on a CPU: several codes with one look-up, in memory that is used again.

Fresh memory costs more than the look-ups that fill it: for the arrays of a long context the system
hands it out page by page, at every token anew. So the larger arrays are kept, for each thread.
"""

from __future__ import annotations

import math
import threading
from functools import cache
from typing import Any

import numpy as np

from ..quant.codebook import lloyd_max
from ..quant.packing import unpack_codes

_TOGETHER = {1: 8, 2: 4, 3: 4, 4: 2, 5: 2, 6: 2, 8: 1}
"""bits -> codes that one look-up decodes: a byte, or 10 or 12 bits."""


@cache
def _entries(bits: int) -> np.ndarray:
    """The levels of all codes that are looked up together, each set as one number."""
    n = _TOGETHER[bits]
    stream = np.arange(1 << bits * n)[:, None]
    index = stream >> bits * np.arange(n) & ((1 << bits) - 1)
    entries = np.ascontiguousarray(lloyd_max(bits)[index])
    kinds = {1: np.float32, 2: np.complex64, 4: np.complex128}
    # moved as one number of that size, which NumPy does fastest
    kind = kinds.get(n, np.dtype((np.void, 4 * n)))
    return entries.view(kind).reshape(-1)


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.held: dict[str, np.ndarray] = {}

    def array(self, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Uninitialized; the same memory at every call with this name in this thread."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        held = self.held.get(name)
        if held is None or held.nbytes < size:
            held = self.held[name] = np.empty(size, np.uint8)
        return held[:size].view(dtype).reshape(shape)


_scratch = _Scratch()


def look_up(codes: np.ndarray, bits: int, width: int, name: str) -> np.ndarray:
    """Levels of packed codes.

    Args:
        codes: uint32 [..., words], a dense stream of ``bits`` bits in each row.
        bits: of a code. width: codes of a row.
        name: of the memory that is used for the result, overwritten by the next call with it.

    Returns:
        float32 [..., width].
    """
    lead = codes.shape[:-1]
    if bits not in _TOGETHER:
        return lloyd_max(bits).take(unpack_codes(codes, bits, width))
    rows, words, entries = math.prod(lead), codes.shape[-1], -(-width // _TOGETHER[bits])
    if bits in (3, 5, 6):
        index = _spread(codes, rows, bits * _TOGETHER[bits])
    else:
        index = _scratch.array("index", (rows, 4 * words), np.intp)
        np.copyto(index.reshape(*lead, 4 * words), np.ascontiguousarray(codes).view(np.uint8))
    if index.shape[1] != entries:
        index = np.ascontiguousarray(index[:, :entries])
    table = _entries(bits)
    found = _scratch.array(name, (rows, entries), table.dtype)
    # every code is in the table, so nothing is clipped; any other mode would copy the result
    np.take(table, index, out=found, mode="clip")
    values = found.view(np.float32).reshape(rows, -1)[:, :width]
    return np.ascontiguousarray(values).reshape(*lead, width)


def _spread(codes: np.ndarray, rows: int, bits: int) -> np.ndarray:
    """intp [rows, n]: the stream of each row, 10 or 12 bits at a time, zeros behind its end."""
    size, group = 4 * codes.shape[-1], math.lcm(bits, 8) // 8  # bytes after which it repeats
    padded = -(-size // group) * group
    stream = _scratch.array("stream", (*codes.shape[:-1], padded), np.uint8)
    stream[..., :size] = np.ascontiguousarray(codes).view(np.uint8)
    stream[..., size:] = 0
    stream = stream.reshape(rows, padded)
    index = _scratch.array("index", (rows, padded // group, 8 * group // bits), np.intp)
    high = _scratch.array("high", index.shape[:2], np.intp)
    for i in range(index.shape[2]):
        first, shift = divmod(i * bits, 8)
        entry = index[..., i]
        np.copyto(entry, stream[:, first::group])
        np.copyto(high, stream[:, first + 1 :: group])
        entry >>= shift
        high <<= 8 - shift
        entry |= high
        entry &= (1 << bits) - 1
    return index.reshape(rows, -1)

"""Dense packing of code indices into 32-bit words.

The stream of a row is little-endian: code i of k bits occupies bits [i*k, (i+1)*k), bit b of the
row is bit b % 32 of word b // 32, and every row starts on a word of its own. Unused bits at the
end of a row are zero. Eight codes of k bits are exactly k bytes, which is what makes packing
cheap: eight 8-bit lanes of a 64-bit word are squeezed together in three steps.

All functions take NumPy or MLX arrays and return the same kind.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from ..errors import QuantizationError
from .spec import TRITS_PER_WORD, WORD_BITS

Array = Any  # np.ndarray or mx.array

# (bits of a lane before the step, mask of the lower lane of each pair)
_SQUEEZE = (
    (8, 0x00FF00FF00FF00FF),
    (16, 0x0000FFFF0000FFFF),
    (32, 0x00000000FFFFFFFF),
)


def array_module(x: Array) -> ModuleType:
    """``numpy`` or ``mlx.core``, whichever made ``x``."""
    if isinstance(x, np.ndarray):
        return np
    import mlx.core as mx

    return mx


def _u64(xp: ModuleType, value: int) -> Array:
    return xp.array(value, dtype=xp.uint64)


def _view(xp: ModuleType, x: Array, dtype: Any) -> Array:
    """Reinterpret the bytes of the last axis."""
    if xp is np:
        return np.ascontiguousarray(x).view(dtype)
    return x.view(dtype)


def _pad_last(xp: ModuleType, x: Array, n: int) -> Array:
    """Append zeros to the last axis up to length n."""
    if x.shape[-1] == n:
        return x
    return xp.concatenate([x, xp.zeros((*x.shape[:-1], n - x.shape[-1]), dtype=x.dtype)], axis=-1)


def pack_codes(idx: Array, bits: int) -> Array:
    """Pack code indices into a dense little-endian stream.

    Args:
        idx: integers [..., n] below 2**bits, NumPy or MLX.
        bits: bits per code, 1 to 8.

    Returns:
        uint32 [..., ceil(n * bits / 32)].
    """
    xp = array_module(idx)
    n = idx.shape[-1]
    n_words = -(-n * bits // WORD_BITS)
    padded = -(-n // 32) * 32
    x = _view(xp, _pad_last(xp, idx.astype(xp.uint8), padded), xp.uint64)
    for step, (lane, mask) in enumerate(_SQUEEZE):
        low = _u64(xp, mask)
        x = (x & low) | (((x >> _u64(xp, lane)) & low) << _u64(xp, bits << step))
    packed_bytes = _view(xp, x, xp.uint8).reshape(*idx.shape[:-1], padded // 8, 8)[..., :bits]
    packed = packed_bytes.reshape(*idx.shape[:-1], padded // 8 * bits)
    return _view(xp, packed, xp.uint32)[..., :n_words]


def unpack_codes(
    words: Array, bits: int, n: int, window_bits: int | None = None, tile: int = 0
) -> Array:
    """Read the window of every code of a packed stream.

    The window of code i is the bits [i*k, i*k + L) of its tile's stream, k = ``bits`` and
    L = ``window_bits``, wrapping from the tile's last bit to its first.

    Args:
        words: uint32 [..., ceil(n * bits / 32)], NumPy or MLX.
        bits: bits that each code adds to the stream, 1 to 8.
        n: codes in a row.
        window_bits: bits that are read for each code, ``bits`` (the default) to 16.
        tile: codes per independent stretch of the row, 0 for the whole row.

    Returns:
        uint8 [..., n] for windows of up to 8 bits, else uint16.

    Raises:
        QuantizationError: a word count that does not fit n, or a tile that does not divide the row
            into stretches of whole words.
    """
    n_words = -(-n * bits // WORD_BITS)
    if words.shape[-1] != n_words:
        raise QuantizationError(
            f"{n} codes of {bits} bits take {n_words} words, not {words.shape[-1]}"
        )
    if window_bits is None or window_bits == bits:
        return _unpack_plain(words, bits, n)
    return _unpack_windows(words, bits, n, window_bits, tile)


def _unpack_plain(words: Array, bits: int, n: int) -> Array:
    xp = array_module(words)
    lead = words.shape[:-1]
    padded = -(-n // 32) * 32
    stream = _pad_last(xp, words, padded * bits // WORD_BITS)
    eights = _view(xp, stream, xp.uint8).reshape(*lead, padded // 8, bits)
    x = _view(xp, _pad_last(xp, eights, 8), xp.uint64)
    for step, (lane, _) in reversed(list(enumerate(_SQUEEZE))):
        lane_bits = bits << step
        keep = _u64(xp, _lane_mask(lane, lane_bits))
        x = (x & keep) | (((x >> _u64(xp, lane_bits)) & keep) << _u64(xp, lane))
    return _view(xp, x, xp.uint8).reshape(*lead, padded)[..., :n]


def _lane_mask(lane: int, lane_bits: int) -> int:
    """The low ``lane_bits`` of the lower lane of each pair of lanes."""
    mask = 0
    for start in range(0, 64, 2 * lane):
        mask |= ((1 << lane_bits) - 1) << start
    return mask


def _unpack_windows(words: Array, bits: int, n: int, window_bits: int, tile: int) -> Array:
    """Eight codes are ``bits`` bytes; two 64-bit reads hold the windows of four codes each."""
    xp = array_module(words)
    lead = words.shape[:-1]
    stretch = tile or n
    if n % stretch or (tile and tile * bits % WORD_BITS):
        raise QuantizationError(f"tiles of {tile} codes do not divide a row of {n}")
    tiles = n // stretch
    stream = words.reshape(*lead, tiles, words.shape[-1] // tiles)
    stream = _view(xp, close_stream(stream, stretch * bits, window_bits - bits), xp.uint8)

    eights = -(-stretch // 8)
    mask = _u64(xp, (1 << window_bits) - 1)
    dtype = xp.uint8 if window_bits <= 8 else xp.uint16
    windows = []
    for half in (0, 1):
        byte, bit = divmod(half * 4 * bits, 8)
        read = (np.arange(eights) * bits)[:, None] + (byte + np.arange(8))
        source = _view(xp, xp.take(stream, xp.array(read), axis=-1), xp.uint64)
        shifts = (bit + np.arange(4) * bits).astype(np.uint64)
        windows.append(((source >> xp.array(shifts)) & mask).astype(dtype))
    whole = xp.concatenate(windows, axis=-1).reshape(*lead, tiles, eights * 8)
    return whole[..., :stretch].reshape(*lead, n)


def close_stream(stream: Array, n_bits: int, extra: int) -> Array:
    """Repeat the first ``extra`` (at most 15) bits of a stretch of ``n_bits`` behind its last bit.

    Args:
        stream: uint32 [..., words], NumPy or MLX.

    Returns:
        uint32, four words more than were given, so that reads of eight bytes stay inside.
    """
    xp = array_module(stream)
    n_words = stream.shape[-1]
    last_bits = n_bits - (n_words - 1) * WORD_BITS
    last = stream[..., n_words - 1] & xp.array((1 << last_bits) - 1, dtype=xp.uint32)
    tail = [last, *[xp.zeros_like(last)] * 4]
    one = xp.array(1, dtype=xp.uint32)
    for t in range(extra):
        source, target = t % n_bits, last_bits + t
        bit = (stream[..., source // 32] >> xp.array(source % 32, dtype=xp.uint32)) & one
        bit = bit << xp.array(target % 32, dtype=xp.uint32)
        tail[target // 32] = tail[target // 32] | bit
    return xp.concatenate([stream[..., : n_words - 1], xp.stack(tail, axis=-1)], axis=-1)


def pack_trits(trits: Array) -> Array:
    """Pack values 0, 1, 2 twenty to a word: word = sum of t_j * 3**j, the first trit lowest.

    Args:
        trits: integers [..., n] in 0..2, NumPy or MLX.

    Returns:
        uint32 [..., ceil(n / 20)]; a short last word is filled with zeros.
    """
    xp = array_module(trits)
    n_words = -(-trits.shape[-1] // TRITS_PER_WORD)
    x = _pad_last(xp, trits.astype(xp.uint32), n_words * TRITS_PER_WORD)
    x = x.reshape(*trits.shape[:-1], n_words, TRITS_PER_WORD)
    words = x[..., TRITS_PER_WORD - 1]
    for j in range(TRITS_PER_WORD - 2, -1, -1):
        words = words * xp.array(3, dtype=xp.uint32) + x[..., j]
    return words


def unpack_trits(words: Array, n: int) -> Array:
    """Inverse of pack_trits.

    Args:
        words: uint32 [..., ceil(n / 20)], NumPy or MLX.
        n: trits in a row.

    Returns:
        uint8 [..., n].

    Raises:
        QuantizationError: a word count that does not fit n.
    """
    xp = array_module(words)
    if words.shape[-1] != -(-n // TRITS_PER_WORD):
        raise QuantizationError(f"{n} trits do not take {words.shape[-1]} words")
    three = xp.array(3, dtype=xp.uint32)
    trits, rest = [], words
    for _ in range(TRITS_PER_WORD):
        quotient = rest // three
        trits.append((rest - quotient * three).astype(xp.uint8))
        rest = quotient
    out = xp.stack(trits, axis=-1)
    return out.reshape(*words.shape[:-1], words.shape[-1] * TRITS_PER_WORD)[..., :n]

"""Group scales: how they are searched and how they are stored.

A group of g weights is decoded as ``scale * levels[index]``. For fixed indices the best scale is
the least-squares one, sum(x q) / sum(q q), and for a fixed scale the best index is the nearest
level; alternating the two (Lloyd) gets stuck close to where it starts, and starting from the root
mean square leaves a quarter of the error of a 4-bit code on the table. So a whole ladder of
starting scales is scored, each by the error that remains after its own least-squares refit, the
winner is alternated once more and rounded as it will be stored, and only then are the final
indices chosen (and, where rounding is coarse, the neighbouring scales compared).

A ladder step needs only the two sums, and those only a histogram of a group's magnitudes: in bins
of 1/32 of the root mean square it finds scales whose error is within 0.3 % of an exhaustive
search (3 and 4 bits, groups of 64). Tables re-trained for searched scales would gain less than
1 % more, which is why the plain ones for N(0, 1) are used.

Arrays are [n, g, r]: n * r groups, whose weights run along the middle axis (the NumPy path keeps
rows of the weight in the last axis; the MLX path has r = 1). The same code runs on NumPy and on
MLX arrays; only the inner loops differ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from .codebook import boundaries
from .packing import array_module

Array = Any  # np.ndarray or mx.array

LOG8_STEPS = 16  # steps per octave
LOG8_ONE = 240  # the code of scale 1.0; code 0 is an exact zero

# Groups whose largest weight is smaller than this decode to zeros.
_TINY = 1e-30

# Up to this many levels, comparing with every border is faster than looking the cell up.
_COMPARE_LEVELS = 16

# Multiplications per matrix product: so few that OpenBLAS does not start threads of its own, which
# would fight with ours.
_PRODUCT_SIZE = 1 << 18

# Tables of the ladder are rounded to multiples of this, which makes their sums exact in float64:
# the same winner whatever the order of summation in a BLAS.
_LADDER_UNIT = 2.0**-24


@dataclass(frozen=True)
class _Table:
    """What the search knows about one table of levels; arrays of one array module.

    Attributes:
        levels: float32 [n].
        borders: midpoints between the levels.
        step, offset, cells: a uniform grid with at most one border in each cell; the cell of z is
            floor(z * step + offset).
        below: uint8 [cells], index of the level below the cell's border.
        border: float32 [cells], the border inside the cell, inf where there is none.
        bin_step, bins: histogram bins per root mean square, and how many there are.
        starts: number of starting scales.
        ladder: float64 [bins, 2 * starts]: for a weight in this bin, the mean of |z| q and of q q,
            where q is the level of |z| at each starting scale. For MLX as two float32 parts of
            11 significant bits, [bins, 4 * starts], because a GPU may multiply in TF32.
    """

    levels: Array
    borders: tuple[float, ...]
    step: float
    offset: float
    cells: int
    below: Array
    border: Array
    bin_step: float
    bins: int
    starts: int
    ladder: Array


def _ladder(n_levels: int, group_size: int) -> np.ndarray:
    """Starting scales, as multiples of the root mean square.

    The more levels and the fewer weights, the further the best scale strays: a small group wastes
    outer levels that no weight reaches.
    """
    if n_levels <= 8:
        return np.geomspace(0.62, 1.6, 20) if group_size <= 16 else np.geomspace(0.72, 1.45, 16)
    low, high = (0.48, 1.5) if group_size <= 16 else (0.6, 1.4)
    return np.geomspace(low, high, 24 if n_levels <= 16 else 32)


@lru_cache(maxsize=32)
def _table(levels_bytes: bytes, group_size: int, use_mlx: bool) -> _Table:
    levels = np.frombuffer(levels_bytes, np.float32)
    borders = boundaries(levels).astype(np.float64)
    n = len(levels)

    step = 1.01 / float(np.diff(borders).min()) if n > 2 else 1.0
    low = float(borders[0]) - 0.5 / step
    cells = int((float(borders[-1]) - low) * step) + 2
    start = low + np.arange(cells) / step
    below = np.searchsorted(borders, start)
    border = np.append(borders, np.inf)[below]
    border[border >= start + 1 / step] = np.inf

    starts = _ladder(n, group_size)
    bin_step = 32.0 if n <= 16 else 64.0
    reach = min(math.sqrt(group_size), float(starts[-1] * levels[-1]) + 0.3)
    bins = int(bin_step * reach) + 1
    z = (np.arange(bins)[:, None] + (np.arange(16) + 0.5) / 16) / bin_step
    q = [levels[np.searchsorted(borders, z / f)].astype(np.float64) for f in starts]
    ladder = np.stack([(z * v).mean(axis=1) for v in q] + [(v * v).mean(axis=1) for v in q], axis=1)
    ladder = np.round(ladder / _LADDER_UNIT) * _LADDER_UNIT

    convert: Any = np.asarray
    if use_mlx:
        import mlx.core as mx

        convert = mx.array
        high = ladder.astype(np.float16).astype(np.float64)
        ladder = np.concatenate([high, ladder - high], axis=1).astype(np.float32)
    return _Table(
        levels=convert(levels),
        borders=tuple(float(b) for b in boundaries(levels)),
        step=step,
        offset=-low * step,
        cells=cells,
        below=convert(below.astype(np.uint8)),
        border=convert(border.astype(np.float32)),
        bin_step=bin_step,
        bins=bins,
        starts=len(starts),
        ladder=convert(ladder),
    )


def _sum(x: Array) -> Array:
    return x.sum(axis=1, keepdims=True)


def reciprocal(xp: Any, x: Array) -> Array:
    """1 / x where x > 0, else 0."""
    positive = x > 0
    return positive / xp.where(positive, x, xp.ones_like(x))


def lookup(xp: Any, table: Array, index: Array) -> Array:
    """table[index], for indices that are known to be in range."""
    if xp is np:
        return table.take(index, mode="clip")
    return xp.take(table, index)


def _floor_index(xp: Any, position: Array, size: int) -> Array:
    """Whole parts of positions, held between 0 and size - 1."""
    held = xp.minimum(xp.maximum(position, 0.0), float(size - 1))
    return held.astype(np.intp if xp is np else xp.int32)


def _nearest(xp: Any, t: _Table, x: Array, scale: Array) -> Array:
    """uint8 index of the level nearest to x / scale: the number of borders below it."""
    z = x * reciprocal(xp, scale)
    if len(t.borders) >= _COMPARE_LEVELS:
        cell = _floor_index(xp, z * t.step + t.offset, t.cells)
        above = z > lookup(xp, t.border, cell)
        return lookup(xp, t.below, cell) + above.astype(xp.uint8)
    if xp is not np:
        return sum((z > b).astype(xp.uint8) for b in t.borders)
    above = np.empty(z.shape, np.bool_)
    idx = np.greater(z, np.float32(t.borders[0])).view(np.uint8)
    for b in t.borders[1:]:
        np.greater(z, np.float32(b), out=above)
        np.add(idx, above.view(np.uint8), out=idx)
    return idx


def _refit(xp: Any, t: _Table, x: Array, idx: Array) -> Array:
    """The least-squares scale of given indices."""
    q = lookup(xp, t.levels, idx)
    return xp.maximum(_sum(x * q), 0.0) * reciprocal(xp, _sum(q * q))


def _error(xp: Any, t: _Table, x: Array, idx: Array, scale: Array) -> Array:
    d = x - lookup(xp, t.levels, idx) * scale
    return _sum(d * d)


def _best_start(xp: Any, t: _Table, y: Array) -> Array:
    """The best refitted scale over the ladder, for magnitudes y; 0 for an all-zero group."""
    n, g, r = y.shape
    rms = xp.sqrt(_sum(y * y) * (1.0 / g))
    position = y * (reciprocal(xp, rms) * t.bin_step)
    counts = _histograms(xp, _floor_index(xp, position, t.bins), t)
    sums = (counts @ t.ladder).reshape(-1, t.ladder.shape[1])[: n * r]
    half = t.starts
    yq, qq = sums[:, :half], sums[:, half : 2 * half]
    if xp is not np:
        yq, qq = yq + sums[:, 2 * half : 3 * half], qq + sums[:, 3 * half :]
    # All weights in the last bin have the outermost level, so what lies beyond it adds exactly.
    beyond = _sum(xp.maximum(position - (t.bins - 0.5), 0.0)).reshape(n * r, 1)
    yq = yq + beyond * (float(t.levels[-1]) / t.bin_step)
    fit = yq * reciprocal(xp, qq)
    winner = xp.argmax(yq * fit, axis=1)[:, None]
    fit = xp.take_along_axis(fit, winner, axis=1).astype(xp.float32)
    return fit.reshape(n, 1, r) * rms


def _histograms(xp: Any, bins: Array, t: _Table) -> Array:
    """How many weights of a group lie in each bin: [..., bins], n * r groups or a few more.

    The NumPy result, float64, has several matrices of so many groups that their product with the
    ladder is small.
    """
    n, _, r = bins.shape
    first = xp.arange(n)[:, None, None] * (r * t.bins) + xp.arange(r) * t.bins
    index = (bins + first).reshape(-1)
    if xp is not np:
        counts = xp.zeros((n * r * t.bins,), dtype=xp.float32).at[index].add(1.0)
        return counts.reshape(n * r, t.bins)
    rows = max(1, _PRODUCT_SIZE // t.ladder.size)
    padded = -(-n * r // rows) * rows
    counts = np.bincount(index, minlength=padded * t.bins)
    return counts.astype(np.float64).reshape(-1, rows, t.bins)


def search_scales(x: Array, levels: np.ndarray, layout: str) -> tuple[Array, Array]:
    """Scales (as they will be stored, up to a power of two) and the nearest indices for them.

    Args:
        x: float32 [n, g, r], NumPy or MLX; groups along the middle axis.
        levels: float32 NumPy table, ascending and antisymmetric, at most 256 entries.
        layout: "float16" or "log8".

    Returns:
        float32 [n, 1, r] scales, multiples of what ``encode_scales`` stores exactly, and uint8
        [n, g, r] indices. All-zero groups get the scale 0.
    """
    xp = array_module(x)
    t = _table(levels.tobytes(), x.shape[1], xp is not np)
    unit, inverse = power_of_two(xp, xp.abs(x).max(axis=1, keepdims=True))
    x = x * inverse  # exact; now no square can leave the range of float32
    scale = _best_start(xp, t, xp.abs(x))
    scale = _refit(xp, t, x, _nearest(xp, t, x, scale))

    best_scale, *others = stored_candidates(xp, scale, layout)
    best_idx = _nearest(xp, t, x, best_scale)
    if others:
        best_error = _error(xp, t, x, best_idx, best_scale)
    for other in others:
        idx = _nearest(xp, t, x, other)
        error = _error(xp, t, x, idx, other)
        better = error < best_error
        best_idx = xp.where(better, idx, best_idx)
        best_scale = xp.where(better, other, best_scale)
        best_error = xp.minimum(error, best_error)
    return best_scale * unit, best_idx


def power_of_two(xp: Any, largest: Array) -> tuple[Array, Array]:
    """The power of two next below each value and its inverse; both 0 for values under _TINY."""
    exponent = largest.view(xp.uint32) >> xp.array(23, dtype=xp.uint32)
    exponent = xp.minimum(exponent, xp.array(253, dtype=xp.uint32))  # or the inverse underflows
    keep = largest >= _TINY
    inverse = (xp.array(254, dtype=xp.uint32) - exponent) << xp.array(23, dtype=xp.uint32)
    unit = exponent << xp.array(23, dtype=xp.uint32)
    return unit.view(xp.float32) * keep, inverse.view(xp.float32) * keep


def stored_candidates(xp: Any, scale: Array, layout: str) -> list[Array]:
    """Storable scales near the wanted ones, the nearest first; zero stays zero."""
    if layout == "float16":
        return [_round_to_half(xp, scale)]
    code = _log8_position(xp, scale)
    keep = scale > 0
    return [keep * _log8_value(xp, code + step) for step in (0, -1, 1)]


def _round_to_half(xp: Any, scale: Array) -> Array:
    """Round float32 to the 11 significant bits of float16, whatever the exponent."""
    u = scale.view(xp.uint32)
    odd = (u >> xp.array(13, dtype=xp.uint32)) & xp.array(1, dtype=xp.uint32)
    u = (u + xp.array(0xFFF, dtype=xp.uint32) + odd) & xp.array(0xFFFFE000, dtype=xp.uint32)
    return u.view(xp.float32)


def _log8_position(xp: Any, scale: Array) -> Array:
    """int32 position of a scale on the grid 2**(position / 16); arbitrary for zeros."""
    positive = xp.where(scale > 0, scale, xp.ones_like(scale))
    return xp.round(xp.log2(positive) * float(LOG8_STEPS)).astype(xp.int32)


def _log8_value(xp: Any, position: Array) -> Array:
    """float32 2**(position / 16): a correctly rounded root times an exact power of two."""
    roots = xp.array(np.exp2(np.arange(LOG8_STEPS) / LOG8_STEPS).astype(np.float32))
    octave = position >> xp.array(4, dtype=xp.int32)
    root = lookup(xp, roots, position - octave * LOG8_STEPS)
    power = ((octave + 127) << xp.array(23, dtype=xp.int32)).view(xp.float32)
    return root * power


def table_exponent(largest_scale: float) -> int:
    """The power of two e for which largest_scale * 2**-e lies in (0.5, 1]; 0 for a zero tensor."""
    if not largest_scale > 0:
        return 0
    mantissa, exponent = math.frexp(largest_scale)
    return exponent - 1 if mantissa == 0.5 else exponent


def encode_scales(scales: np.ndarray, layout: str, exponent: int) -> np.ndarray:
    """Stored form of scales that ``search_scales`` returned.

    Args:
        scales: float32, any shape, at most 2**exponent.
        layout: "float16" or "log8".
        exponent: power of two that has moved into the table (see ``table_exponent``).

    Returns:
        float16 or uint8 of the same shape. Scales below about 2**-15 of the largest are rounded
        coarsely (float16) or to zero (log8).
    """
    if layout == "float16":
        return np.ldexp(scales, -exponent).astype(np.float16)
    code = _log8_position(np, scales) + (LOG8_ONE - LOG8_STEPS * exponent)
    return (np.maximum(code, 0) * (scales > 0)).astype(np.uint8)


@lru_cache(maxsize=1)
def log8_table() -> np.ndarray:
    """float32 [256]: the scale of every log8 code."""
    table = np.exp2((np.arange(256) - LOG8_ONE) / LOG8_STEPS).astype(np.float32)
    table[0] = 0.0
    table.flags.writeable = False
    return table


def decode_scales(stored: Array, layout: str) -> Array:
    """float32 scales of stored ones (float16 or uint8, NumPy or MLX)."""
    xp = array_module(stored)
    if layout == "float16":
        return stored.astype(xp.float32)
    return lookup(xp, xp.array(log8_table()), stored)

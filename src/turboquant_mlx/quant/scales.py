"""Group scales: how they are searched and how they are stored.

A group of g weights is decoded as ``scale * levels[index]``. For fixed indices the best scale is
the least-squares one, sum(x q) / sum(q q), and for a fixed scale the best index is the nearest
level; alternating the two (Lloyd) gets stuck close to where it starts, and starting from the root
mean square leaves a quarter of the error of a 4-bit code on the table. So a whole ladder of
starting scales is scored, each by the error that remains after its own least-squares refit, the
winner is alternated once more and rounded as it will be stored, and only then are the final
indices chosen (and, where rounding is coarse, the neighbouring scales compared).

Arrays are [n, g, r]: n * r groups, whose weights run along the middle axis (the NumPy path keeps
rows of the weight in the last axis; the MLX path has r = 1). The same code runs on NumPy and on
MLX arrays; only the inner loop over the ladder differs.
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

# Groups whose largest weight is smaller than this decode to zeros: its reciprocal overflows.
_TINY = 1e-30


@dataclass(frozen=True)
class _Search:
    """What the search needs to know about one table; arrays of one array module.

    A value z is looked up through a uniform grid of cells. For the exact assignment a cell is so
    narrow that at most one border lies in it; for the ladder |z| is only known by its cell.
    """

    levels: Array  # float32 [n]
    grid_step: float  # cells per unit
    grid_offset: float
    grid_size: int
    base: Array  # uint8 [grid_size]: index of the level below the cell's border
    border: Array  # float32 [grid_size]: the border inside the cell, inf where there is none
    ladder: Array  # float32 [starts, fine_size]: level of each |z| cell at each starting scale
    fine_step: float
    fine_size: int


def _ladder_range(n_levels: int, group_size: int) -> tuple[float, float]:
    """Where the best scale can lie, as multiples of the root mean square."""
    if n_levels <= 8:
        return (0.72, 1.45) if group_size > 16 else (0.62, 1.6)
    return (0.6, 1.4) if group_size > 16 else (0.48, 1.5)


@lru_cache(maxsize=32)
def _search_tables(levels_bytes: bytes, group_size: int, use_mlx: bool) -> _Search:
    levels = np.frombuffer(levels_bytes, np.float32)
    borders = boundaries(levels).astype(np.float64)
    n = len(levels)

    gap = float(np.diff(borders).min()) if n > 2 else 1.0
    grid_step = 1.01 / gap
    low = float(borders[0]) - 0.5 / grid_step
    grid_size = int((float(borders[-1]) - low) * grid_step) + 2
    cell_start = low + np.arange(grid_size) / grid_step
    base = np.searchsorted(borders, cell_start, side="left")
    base[0] = 0
    next_border = np.append(borders, np.inf)[base]
    inside = next_border < cell_start + 1 / grid_step
    border = np.where(inside, next_border, np.inf)

    fine_step = float(max(64, 8 * n))
    fine_size = int(fine_step * min(math.sqrt(group_size), 1.6 * float(levels[-1]) + 0.5)) + 1
    centre = (np.arange(fine_size) + 0.5) / fine_step
    starts = np.geomspace(*_ladder_range(n, group_size), 16)
    ladder = np.stack([levels[np.searchsorted(borders, centre / f)] for f in starts])

    convert: Any = np.asarray
    if use_mlx:
        import mlx.core as mx

        convert = mx.array
    return _Search(
        levels=convert(levels),
        grid_step=grid_step,
        grid_offset=-low * grid_step,
        grid_size=grid_size,
        base=convert(base.astype(np.uint8)),
        border=convert(border.astype(np.float32)),
        ladder=convert(ladder.astype(np.float32)),
        fine_step=fine_step,
        fine_size=fine_size,
    )


def _sum(x: Array) -> Array:
    return x.sum(axis=1, keepdims=True)


def _reciprocal(xp: Any, x: Array) -> Array:
    """1 / x where x > 0, else 0."""
    positive = x > 0
    return positive / xp.where(positive, x, xp.array(1.0, dtype=xp.float32))


def _lookup(xp: Any, table: Array, cells: Array) -> Array:
    if xp is np:
        return table.take(cells, mode="clip")
    return xp.take(table, cells)


def _cells(xp: Any, position: Array, size: int) -> Array:
    """Cell numbers 0..size-1 of positions that may lie outside."""
    clipped = xp.minimum(xp.maximum(position, 0.0), float(size - 1))
    return clipped.astype(np.intp if xp is np else xp.int32)


def _nearest(xp: Any, t: _Search, x: Array, scale: Array) -> Array:
    """uint8 index of the level nearest to x / scale."""
    z = x * _reciprocal(xp, scale)
    cells = _cells(xp, z * t.grid_step + t.grid_offset, t.grid_size)
    above = z > _lookup(xp, t.border, cells)
    return _lookup(xp, t.base, cells) + above.astype(xp.uint8)


def _refit(xp: Any, t: _Search, x: Array, idx: Array) -> Array:
    """The least-squares scale of given indices."""
    q = _lookup(xp, t.levels, idx)
    return xp.maximum(_sum(x * q), 0.0) * _reciprocal(xp, _sum(q * q))


def _error(xp: Any, t: _Search, x: Array, idx: Array, scale: Array) -> Array:
    d = x - _lookup(xp, t.levels, idx) * scale
    return _sum(d * d)


def _best_start(xp: Any, t: _Search, y: Array) -> Array:
    """The best refitted scale over the ladder, for magnitudes y; 0 for an all-zero group."""
    inverse_rms = _reciprocal(xp, xp.sqrt(_sum(y * y) * (1.0 / y.shape[1])))
    cells = _cells(xp, y * (inverse_rms * t.fine_step), t.fine_size)
    best = xp.full(inverse_rms.shape, -1.0, dtype=xp.float32)
    scale = xp.zeros(inverse_rms.shape, dtype=xp.float32)
    if xp is np:
        q, product = np.empty_like(y), np.empty_like(y)
    for i in range(t.ladder.shape[0]):
        if xp is np:
            np.take(t.ladder[i], cells, out=q, mode="clip")
            yq = _sum(np.multiply(y, q, out=product))
            qq = _sum(np.multiply(q, q, out=product))
        else:
            q = xp.take(t.ladder[i], cells)
            yq, qq = _sum(y * q), _sum(q * q)
        fit = yq * _reciprocal(xp, qq)
        score = yq * fit
        scale = xp.where(score > best, fit, scale)
        best = xp.maximum(best, score)
    return scale


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
    t = _search_tables(levels.tobytes(), x.shape[1], xp is not np)
    y = xp.abs(x)
    largest = y.max(axis=1, keepdims=True)
    largest = xp.where(largest >= _TINY, largest, xp.zeros_like(largest))
    scale = _best_start(xp, t, y * _reciprocal(xp, largest)) * largest
    scale = _refit(xp, t, x, _nearest(xp, t, x, scale))

    best_scale, *others = _stored_candidates(xp, scale, layout)
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
    return best_scale, best_idx


def _stored_candidates(xp: Any, scale: Array, layout: str) -> list[Array]:
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
    positive = xp.where(scale > 0, scale, xp.array(1.0, dtype=xp.float32))
    return xp.round(xp.log2(positive) * float(LOG8_STEPS)).astype(xp.int32)


def _log8_value(xp: Any, position: Array) -> Array:
    """float32 2**(position / 16): a correctly rounded root times an exact power of two."""
    roots = xp.array(np.exp2(np.arange(LOG8_STEPS) / LOG8_STEPS).astype(np.float32))
    octave = position >> xp.array(4, dtype=xp.int32)
    root = _lookup(xp, roots, position - octave * LOG8_STEPS)
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
    return _lookup(xp, xp.array(log8_table()), stored)

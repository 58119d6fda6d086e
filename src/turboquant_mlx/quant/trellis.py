"""Trellis codes for whole rows: which are supported, and their scales.

As for the plain codes, a weight is decoded as ``scale * table[window]``. But the windows of a row
come from one search over all its groups (``viterbi``), so the scales cannot be tried one by one as
``scales.search_scales`` does. A group starts from its root mean square, for which the table was
trained; after the search its scale is refitted by least squares. In small groups, where that moves
the scales noticeably, the search is repeated with the new ones.

Arrays are [n, g, r] as in ``scales``; here the n groups are those of a row, in order.
"""

from __future__ import annotations

from typing import Any

from ..errors import QuantizationError
from .packing import array_module
from .scales import lookup, power_of_two, reciprocal, stored_candidates
from .spec import QuantSpec
from .trellis_table import TRELLIS_BITS, TRELLIS_WINDOW
from .viterbi import best_windows, make_trellis

Array = Any  # np.ndarray or mx.array

# From this group size on, a second search gains less than 1 %.
LARGE_GROUP = 128


def check_trellis(spec: QuantSpec, width: int) -> None:
    """Raise QuantizationError unless rows of ``width`` weights can be encoded with this code."""
    if spec.bits not in TRELLIS_BITS or spec.window_bits != TRELLIS_WINDOW:
        raise QuantizationError(
            f"no trellis code of {spec.bits} bits with a window of {spec.window_bits} "
            f"({', '.join(map(str, TRELLIS_BITS))} bits with a window of {TRELLIS_WINDOW} exist)"
        )
    if spec.tile and width % spec.tile:
        raise QuantizationError(f"tiles of {spec.tile} weights do not divide a row of {width}")
    if (spec.tile or width) * spec.bits < spec.window_bits:
        raise QuantizationError(f"a stretch of {spec.tile or width} weights is too short to code")


def searches(spec: QuantSpec) -> int:
    """How often the rows of a weight are searched."""
    return 1 if spec.group_size >= LARGE_GROUP else 2


def search_trellis(x: Array, levels: Any, spec: QuantSpec) -> tuple[Array, Array]:
    """Scales (as they will be stored, up to a power of two) and windows of whole rows.

    Args:
        x: float32 [n, g, r], NumPy or MLX: r rows of n groups.
        levels: float32 NumPy table [2**window].
        spec: a trellis code that ``check_trellis`` accepts for rows of n * g weights.

    Returns:
        float32 [n, 1, r] scales, multiples of what ``encode_scales`` stores exactly, and windows
        [n, g, r] as a decoder will read them. All-zero groups get the scale 0.
    """
    xp = array_module(x)
    n, g, r = x.shape
    trellis = make_trellis(levels, spec.bits, spec.window_bits)
    table = xp.array(levels)
    unit, inverse = power_of_two(xp, xp.abs(x).max(axis=1, keepdims=True))
    x = x * inverse  # exact; now no square can leave the range of float32
    scale = xp.sqrt((x * x).sum(axis=1, keepdims=True) * (1.0 / g))
    scale, *_ = stored_candidates(xp, scale, spec.scale_layout)
    for _ in range(searches(spec)):
        rows = (x * reciprocal(xp, scale)).reshape(n * g, r)
        windows = best_windows(rows, trellis, spec.tile).reshape(n, g, r)
        q = lookup(xp, table, windows)
        xq, qq = (x * q).sum(axis=1, keepdims=True), (q * q).sum(axis=1, keepdims=True)
        fit = xp.maximum(xq, 0.0) * reciprocal(xp, qq)
        scale, *others = stored_candidates(xp, fit, spec.scale_layout)
        for other in others:  # the error is a parabola: the nearest is the best
            scale = xp.where(xp.abs(other - fit) < xp.abs(scale - fit), other, scale)
    return scale * unit, windows

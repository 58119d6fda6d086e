"""Packed rows to a dense matrix in the stored domain, for products with many activations.

``y[o, i] = scale[o, i / g] * table[window(o, i)]``, rounded once to the result's dtype. There is a
kernel for bit streams and one for ternary digits.

Thread map: a warp takes R rows one after the other, and its lanes consecutive units of a row (see
``unpack``), so that it writes consecutive memory. Bytes moved: codes and scales once, and the
dense matrix once, which is most of it.
"""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx

from ..quant.packed import PackedWeight
from ..quant.spec import QuantSpec
from . import ternary, unpack
from .dialect import Dialect, Kernel
from .selection import table_copies

_SIZES = """
  const uint outputs = uint(codes_shape[0]);
  const int words = codes_shape[1];
  const uint groups = uint(scales_shape[1]);
#define TQ_LEVEL(i) table[i]
"""

_BODY = (
    unpack.CONSTANTS
    + _SIZES
    + """
  const uint width = groups * uint(GROUP);
  const uint units = width / uint(UNIT);
"""
    + unpack.FILL_TABLE
    + """
  for (uint r = 0u; r < uint(R); ++r) {
    const uint o = (tq_bx * uint(R) + r) * uint(WARPS) + tq_warp;
    if (o >= outputs) break;
    for (uint at = tq_lane; at < units; at += 32u) {
"""
    + unpack.FIND_WORDS
    + """
      uint code[WORDS];
      TQ_UNROLL for (int j = 0; j < WORDS; ++j) code[j] = codes[int(o) * words + place[j]];
      const uint where = o * groups + at * uint(UNIT) / uint(GROUP);
"""
    + unpack.READ_SCALE
    + """
      float values[UNIT];
#define TQ_USE(i, value) values[i] = scale * (value)
"""
    + unpack.DECODE
    + """
#undef TQ_USE
      TQ_WRITE(y, o * width + at * uint(UNIT), values, UNIT);
    }
  }
"""
)

_INPUTS = ("codes", "scales", "table")
EXPAND = Kernel("turboquant_expand", _INPUTS, ("y",), _BODY)
EXPAND_TERNARY = Kernel(
    "turboquant_expand_ternary",
    _INPUTS,
    ("y",),
    _SIZES + ternary.EXPAND,
    metal=ternary.METAL,
    cuda=ternary.CUDA,
)
WARPS = 8
ROWS_OF_WARP = 4
"""Enough for filling the table to cost little beside them."""


@lru_cache(maxsize=256)
def template(spec: QuantSpec, width: int, dtype: mx.Dtype, dialect: Dialect) -> list:
    """Template arguments of the kernel."""
    unit = unpack.unit_of(spec, width)
    return [
        ("T", dtype),
        ("BITS", spec.bits),
        ("WINDOW", spec.window_bits),
        ("TILE", spec.tile),
        ("GROUP", spec.group_size),
        ("LOG8", spec.scale_layout == "log8"),
        ("UNIT", unit.weights),
        ("COPIES", table_copies(dialect, unit.table_bytes, unit.most_copies)),
        ("R", ROWS_OF_WARP),
        ("WARPS", WARPS),
    ]


def expand(weight: PackedWeight, dtype: mx.Dtype, dialect: Dialect) -> mx.array:
    """The decoded weight in the stored domain; no QJL.

    Args:
        weight: packed (O, I) that ``unpack.why_no_kernel`` has nothing against, of fewer than
            2**32 weights.
        dtype: float16, bfloat16 or float32.
        dialect: of the kernel.

    Returns:
        [O, I], lazy.
    """
    outputs, width = weight.shape
    kernel = EXPAND_TERNARY if weight.spec.code == "ternary" else EXPAND
    (y,) = kernel.launch(
        dialect,
        [weight.codes, weight.scales, weight.table],
        template=template(weight.spec, width, dtype, dialect),
        groups=(-(-outputs // (WARPS * ROWS_OF_WARP)), 1),
        threads=32 * WARPS,
        shapes=[(outputs, width)],
        dtypes=[dtype],
    )
    return y

"""A packed weight times one to eight activations.

``y[m, o] = sum_i x[m, i] * scale[o, i / g] * table[window(o, i)]``, x [M, I], codes [O, words].

Thread map: a warp computes R outputs for all M rows. Its lanes take consecutive units of the
input (see ``unpack``), keep their activations in registers as float32 for the R outputs, and add
up in float32; at the end the 32 partial sums of every output are added by exchanges that halve the
number of sums each lane holds. SPLIT warps share the outputs along the input where there would be
too few warps otherwise. A group that spans several steps of a warp is scaled once (SPAN steps).

Bytes moved: each code and scale once, whatever M is. Why it is so: on large GPUs the time goes
into instructions, not into memory, so what counts is how few a weight takes: about four for a
trellis code (half a shift, the byte's offset, a look-up, a multiply-add), about three for a scalar
code that is looked up in pairs.

With EXPERTS each threadgroup row ``tq_by`` multiplies one activation by one matrix of a stack.
"""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx

from ..quant.packed import PackedWeight
from ..quant.spec import QuantSpec
from . import unpack
from .dialect import Dialect, Kernel
from .selection import Launch, matvec_launch, table_copies

_BODY = (
    unpack.CONSTANTS
    + """
  constexpr int M = ROWS > 4 ? 8 : ROWS > 2 ? 4 : ROWS;
  constexpr int SUMS = M * R;
  constexpr int PARTIALS = SPLIT > 1 ? WARPS * SUMS : 1;
  TQ_FIND_SIZES
  const uint width = groups * uint(GROUP);
  const uint units = width / uint(UNIT);
"""
    + unpack.FILL_TABLE
    + """
  TQ_SHARED(float, partial, PARTIALS);
  const uint part = tq_warp % uint(SPLIT);
  const uint first = (tq_bx * uint(WARPS / SPLIT) + tq_warp / uint(SPLIT)) * uint(R);

  float sum[SUMS];
  TQ_UNROLL for (int i = 0; i < SUMS; ++i) sum[i] = 0.0f;
  const uint spans = (units + uint(32 * SPAN - 1)) / uint(32 * SPAN);
  for (uint span = part; span < spans; span += uint(SPLIT)) {
    float unscaled[SUMS];
    TQ_UNROLL for (int i = 0; i < SUMS; ++i) unscaled[i] = 0.0f;
    for (uint step = span * uint(SPAN); step < (span + 1u) * uint(SPAN); ++step) {
    const uint unit = step * 32u + tq_lane;
    const bool inside = unit < units;
    const uint at = inside ? unit : units - 1u;
"""
    + unpack.FIND_WORDS
    + """
    uint codes_of[R * WORDS];
    TQ_UNROLL for (int r = 0; r < R; ++r) {
      const uint o = first + uint(r) < outputs ? first + uint(r) : outputs - 1u;
      TQ_UNROLL for (int j = 0; j < WORDS; ++j) {
        codes_of[r * WORDS + j] = codes[int(matrix + o) * words + place[j]];
      }
    }
    float inputs[M * UNIT];
    TQ_UNROLL for (int m = 0; m < M; ++m) {
      const uint row = first_row + uint(m < ROWS ? m : ROWS - 1);
      TQ_READ((inputs + m * UNIT), UNIT, x, row * width + at * uint(UNIT));
    }
    if (!inside) {
      TQ_UNROLL for (int i = 0; i < M * UNIT; ++i) inputs[i] = 0.0f;
    }
    TQ_UNROLL for (int r = 0; r < R; ++r) {
      uint code[WORDS];
      TQ_UNROLL for (int j = 0; j < WORDS; ++j) code[j] = codes_of[r * WORDS + j];
      float dot[M];
      TQ_UNROLL for (int m = 0; m < M; ++m) dot[m] = 0.0f;
#define TQ_USE(i, value) \\
  TQ_UNROLL for (int m = 0; m < M; ++m) dot[m] += (value) * inputs[m * UNIT + (i)]
"""
    + unpack.DECODE
    + """
#undef TQ_USE
      if (SPAN > 1) {
        TQ_UNROLL for (int m = 0; m < M; ++m) unscaled[m * R + r] += dot[m];
      } else {
        const uint o = first + uint(r) < outputs ? first + uint(r) : outputs - 1u;
        const uint where = (matrix + o) * groups + at * uint(UNIT) / uint(GROUP);
"""
    + unpack.READ_SCALE
    + """
        TQ_UNROLL for (int m = 0; m < M; ++m) sum[m * R + r] += scale * dot[m];
      }
    }
    }
    if (SPAN > 1) {
      TQ_UNROLL for (int r = 0; r < R; ++r) {
        const uint o = first + uint(r) < outputs ? first + uint(r) : outputs - 1u;
        const uint where = (matrix + o) * groups + span * uint(SPAN * 32 * UNIT) / uint(GROUP);
"""
    + unpack.READ_SCALE
    + """
        TQ_UNROLL for (int m = 0; m < M; ++m) sum[m * R + r] += scale * unscaled[m * R + r];
      }
    }
  }

  // Halve the sums of each lane while there is more than one; then lanes hold the same sum.
  constexpr int LEFT = SUMS > 32 ? SUMS / 32 : 1;
  uint index = 0u;
  TQ_UNROLL for (int s = 0; s < 5; ++s) {
    constexpr_half
    const bool upper = (tq_lane & (16u >> s)) != 0u;
    if (half_of > 0) {
      TQ_UNROLL for (int i = 0; i < SUMS / 2; ++i) {
        if (i < half_of) {
          const float give = upper ? sum[i] : sum[i + half_of];
          const float keep = upper ? sum[i + half_of] : sum[i];
          sum[i] = keep + TQ_SHUFFLE_XOR(give, 16u >> s);
        }
      }
      if (upper) index += uint(half_of);
    } else {
      sum[0] += TQ_SHUFFLE_XOR(sum[0], 16u >> s);
    }
  }
"""
    + """
  if (SPLIT > 1) {
    TQ_UNROLL for (int i = 0; i < LEFT; ++i) {
      if (SUMS >= 32 || tq_lane % uint(32 / (SUMS < 32 ? SUMS : 32)) == 0u) {
        partial[tq_warp * uint(SUMS) + index + uint(i)] = sum[i];
      }
    }
    TQ_SYNC();
    if (part == 0u) {
      for (uint i = tq_lane; i < uint(SUMS); i += 32u) {
        float total = 0.0f;
        TQ_UNROLL for (int p = 0; p < SPLIT; ++p) {
          total += partial[(tq_warp + uint(p)) * uint(SUMS) + i];
        }
        const uint m = i / uint(R);
        const uint o = first + i % uint(R);
        if (o < outputs && m < uint(ROWS)) y[(out_row + m) * outputs + o] = T(total);
      }
    }
  } else {
    TQ_UNROLL for (int i = 0; i < LEFT; ++i) {
      if (SUMS >= 32 || tq_lane % uint(32 / (SUMS < 32 ? SUMS : 32)) == 0u) {
        const uint m = (index + uint(i)) / uint(R);
        const uint o = first + (index + uint(i)) % uint(R);
        if (o < outputs && m < uint(ROWS)) y[(out_row + m) * outputs + o] = T(sum[i]);
      }
    }
  }
"""
).replace("constexpr_half\n", "const int half_of = SUMS >> (s + 1);\n")

_DENSE = """
  // constant subscripts: CUDA passes shapes by value, and any others cost a chain of selections
  const uint outputs = uint(codes_shape[0]);
  const int words = codes_shape[1];
  const uint groups = uint(scales_shape[1]);
  const uint matrix = 0u, first_row = 0u, out_row = 0u;
"""

# The entries share the activations evenly: entry e reads row e * n / entries.
_EXPERT = """
  const uint outputs = uint(codes_shape[1]);
  const int words = codes_shape[2];
  const uint groups = uint(scales_shape[2]);
  const uint matrix = uint(experts[tq_by]) * outputs;
  const uint first_row = tq_by / (uint(experts_shape[0]) / uint(x_shape[0])), out_row = tq_by;
"""

MATVEC = Kernel(
    "turboquant_matvec",
    ("x", "codes", "scales", "table"),
    ("y",),
    _BODY.replace("  TQ_FIND_SIZES\n", _DENSE),
)
GATHER_MATVEC = Kernel(
    "turboquant_gather_matvec",
    ("x", "codes", "scales", "table", "experts"),
    ("y",),
    _BODY.replace("  TQ_FIND_SIZES\n", _EXPERT),
)


def check_width(x: mx.array, width: int) -> None:
    """Raise ValueError unless rows of ``x`` have ``width`` elements: a kernel would not notice."""
    if x.shape[-1] != width:
        raise ValueError(f"an activation of shape {x.shape} meets a weight of width {width}")


@lru_cache(maxsize=512)
def plan(
    spec: QuantSpec, outputs: int, width: int, rows: int, dialect: Dialect, launch: Launch | None
) -> tuple[tuple[tuple[str, int | bool], ...], Launch]:
    """Template arguments (but the result's dtype) and launch for ``rows`` activations."""
    unit = unpack.unit_of(spec, width)
    size = unit.weights
    if rows > 4:
        size = 8  # their activations must fit into registers
    launch = launch or matvec_launch(dialect, outputs, width, rows, size)
    span = 1
    if rows == 1 and spec.group_size % (32 * size) == 0:
        span = spec.group_size // (32 * size)
    template = (
        ("BITS", spec.bits),
        ("WINDOW", spec.window_bits),
        ("TILE", spec.tile),
        ("GROUP", spec.group_size),
        ("LOG8", spec.scale_layout == "log8"),
        ("UNIT", size),
        ("COPIES", table_copies(dialect, unit.entry_bytes, unit.paired)),
        ("ROWS", rows),
        ("R", launch.outputs),
        ("SPLIT", launch.split),
        ("SPAN", span),
        ("WARPS", launch.warps),
    )
    return template, launch


def matvec(
    x: mx.array,
    weight: PackedWeight,
    dialect: Dialect,
    *,
    dtype: mx.Dtype | None = None,
    launch: Launch | None = None,
) -> mx.array:
    """``x W'^T`` for at most eight activations; no QJL.

    Args:
        x: [..., I] in the stored domain; float16, bfloat16 or float32.
        weight: packed (O, I) that ``unpack.why_no_kernel`` has nothing against.
        dialect: of the kernel.
        dtype: of the result, default that of ``x``.
        launch: how to spread it, default ``selection.matvec_launch``.

    Returns:
        [..., O], lazy.
    """
    outputs, width = weight.shape
    check_width(x, width)
    rows = x.size // width
    template, launch = plan(weight.spec, outputs, width, rows, dialect, launch)
    per_group = launch.outputs * launch.warps // launch.split
    (y,) = MATVEC.launch(
        dialect,
        [x, weight.codes, weight.scales, weight.table],
        template=[("T", dtype or x.dtype), *template],
        groups=(-(-outputs // per_group), 1),
        threads=32 * launch.warps,
        shapes=[(*x.shape[:-1], outputs)],
        dtypes=[dtype or x.dtype],
    )
    return y


def gather_matvec(
    x: mx.array,
    weight: PackedWeight,
    experts: mx.array,
    dialect: Dialect,
    *,
    dtype: mx.Dtype | None = None,
    launch: Launch | None = None,
) -> mx.array:
    """One activation times one matrix of a stack for each entry of ``experts``; no QJL.

    Only the matrices that are named are read.

    Args:
        x: [n, I] in the stored domain; n divides the number of entries, and entry e takes row
            e * n / entries.
        weight: packed (E, O, I) that ``unpack.why_no_kernel`` has nothing against.
        experts: integers below E, [entries].
        dialect: of the kernel.
        dtype: of the result, default that of ``x``.
        launch: how to spread it, default ``selection.matvec_launch``.

    Returns:
        [entries, O], lazy.
    """
    _, outputs, width = weight.shape
    check_width(x, width)
    entries = experts.size
    if launch is None:
        # the entries fill the GPU together
        launch = matvec_launch(dialect, outputs, width, 1, 16, copies=entries)
    template, launch = plan(weight.spec, outputs, width, 1, dialect, launch)
    per_group = launch.outputs * launch.warps // launch.split
    (y,) = GATHER_MATVEC.launch(
        dialect,
        [x, weight.codes, weight.scales, weight.table, experts],
        template=[("T", dtype or x.dtype), *template],
        groups=(-(-outputs // per_group), entries),
        threads=32 * launch.warps,
        shapes=[(entries, outputs)],
        dtypes=[dtype or x.dtype],
    )
    return y

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

Three kernels have this body: one for a matrix; one for experts, where each threadgroup row
``tq_by`` multiplies one activation by one matrix of a stack; and one for the two or three matrices
that read the same input (q, k and v; gate and up), each with threadgroups of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
  const uint first = (block * uint(WARPS / SPLIT) + tq_warp / uint(SPLIT)) * uint(R);

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
  const uint outputs = uint(codes_shape[0]), block = tq_bx;
  const int words = codes_shape[1];
  const uint groups = uint(scales_shape[1]);
  const uint matrix = 0u, first_row = 0u, out_row = 0u;
#define TQ_LEVEL(i) table[i]
"""

# The entries share the activations evenly: entry e reads row e * n / entries.
_EXPERT = """
  const uint outputs = uint(codes_shape[1]), block = tq_bx;
  const int words = codes_shape[2];
  const uint groups = uint(scales_shape[2]);
  const uint matrix = uint(experts[tq_by]) * outputs;
  const uint first_row = tq_by / (uint(experts_shape[0]) / uint(x_shape[0])), out_row = tq_by;
#define TQ_LEVEL(i) table[i]
"""


def _joint(count: int) -> str:
    """Several matrices of one width, each with threadgroups of its own."""
    lines = [
        "  constexpr uint EACH = uint(WARPS / SPLIT * R);",
        "  uint block = tq_bx, which = 0u;",
        "  uint outputs = uint(codes0_shape[0]);",
        "  const int words = codes0_shape[1];",
        "  const uint groups = uint(scales0_shape[1]);",
        "  TQ_IN(uint) codes = codes0;",
        "  TQ_IN(S) scales = scales0;",
        "  TQ_OUT(T) y = y0;",
    ]
    for i in range(1, count):
        lines += [
            f"  if (which == {i - 1}u && block >= (outputs + EACH - 1u) / EACH) {{",
            "    block -= (outputs + EACH - 1u) / EACH;",
            f"    which = {i}u;",
            f"    outputs = uint(codes{i}_shape[0]);",
            f"    codes = codes{i};",
            f"    scales = scales{i};",
            f"    y = y{i};",
            "  }",
        ]
    level = f"table{count - 1}[i]"
    for i in reversed(range(count - 1)):
        level = f"(which == {i}u ? table{i}[i] : {level})"
    lines += [
        "  const uint matrix = 0u, first_row = 0u, out_row = 0u;",
        f"#define TQ_LEVEL(i) {level}",
        "",
    ]
    return "\n".join(lines)


def _kernel(name: str, inputs: tuple[str, ...], outputs: tuple[str, ...], sizes: str) -> Kernel:
    return Kernel(name, inputs, outputs, _BODY.replace("  TQ_FIND_SIZES\n", sizes))


MATVEC = _kernel("turboquant_matvec", ("x", "codes", "scales", "table"), ("y",), _DENSE)
GATHER_MATVEC = _kernel(
    "turboquant_gather_matvec", ("x", "codes", "scales", "table", "experts"), ("y",), _EXPERT
)
JOINT_MATVEC = {
    count: _kernel(
        f"turboquant_joint_matvec{count}",
        ("x", *(f"{name}{i}" for i in range(count) for name in ("codes", "scales", "table"))),
        tuple(f"y{i}" for i in range(count)),
        _joint(count),
    )
    for count in (2, 3)
}
"""By the number of matrices."""


def check_width(x: mx.array, width: int) -> None:
    """Raise ValueError unless rows of ``x`` have ``width`` elements: a kernel would not notice."""
    if x.shape[-1] != width:
        raise ValueError(f"an activation of shape {x.shape} meets a weight of width {width}")


@dataclass(frozen=True)
class Plan:
    """What a launch needs besides arrays and shapes; made once, for a call must be quick."""

    template: list
    groups: int
    threads: int


@lru_cache(maxsize=1024)
def plan(
    spec: QuantSpec,
    outputs: tuple[int, ...],
    width: int,
    rows: int,
    dtype: mx.Dtype,
    dialect: Dialect,
    launch: Launch | None = None,
    entries: int = 1,
) -> Plan:
    """The launch for ``rows`` activations of ``width`` values.

    Args:
        spec: of all matrices.
        outputs: of each matrix.
        dtype: of the results.
        launch: how to spread it, default ``selection.matvec_launch``.
        entries: how many products of this kind there are in the launch.
    """
    unit = unpack.unit_of(spec, width)
    size = unit.weights
    if rows > 4:
        size = 8  # their activations must fit into registers
    if launch is None:
        launch = matvec_launch(dialect, sum(outputs), width, rows, size, entries)
    span = 1
    if rows == 1 and spec.group_size % (32 * size) == 0:
        span = spec.group_size // (32 * size)
    log8 = spec.scale_layout == "log8"
    template = [
        ("T", dtype),
        ("S", mx.uint8 if log8 else mx.float16),
        ("BITS", spec.bits),
        ("WINDOW", spec.window_bits),
        ("TILE", spec.tile),
        ("GROUP", spec.group_size),
        ("LOG8", log8),
        ("UNIT", size),
        ("COPIES", table_copies(dialect, unit.entry_bytes, unit.paired)),
        ("ROWS", rows),
        ("R", launch.outputs),
        ("SPLIT", launch.split),
        ("SPAN", span),
        ("WARPS", launch.warps),
    ]
    each = launch.outputs * launch.warps // launch.split
    return Plan(template, sum(-(-n // each) for n in outputs), 32 * launch.warps)


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
    dtype = dtype or x.dtype
    made = plan(weight.spec, (outputs,), width, x.size // width, dtype, dialect, launch)
    (y,) = MATVEC.launch(
        dialect,
        [x, weight.codes, weight.scales, weight.table],
        template=made.template,
        groups=(made.groups, 1),
        threads=made.threads,
        shapes=[(*x.shape[:-1], outputs)],
        dtypes=[dtype],
    )
    return y


def why_not_jointly(weights: Sequence[PackedWeight]) -> str:
    """What keeps these weights, which read one input, from one launch; "" if nothing does."""
    first = weights[0]
    if len(weights) not in JOINT_MATVEC:
        return f"{len(weights)} weights"
    for weight in weights:
        if weight.spec != first.spec or weight.shape[1:] != first.shape[1:]:
            return "weights of different kinds"
        if min(weight.codes.size, weight.scales.size) < 8:
            return "a weight too small to be pointed to"
    return unpack.why_no_kernel(first)


def joint_matvec(
    x: mx.array, weights: Sequence[PackedWeight], dialect: Dialect, *, launch: Launch | None = None
) -> list[mx.array]:
    """``x W'^T`` for two or three weights that read the same input, in one launch; no QJL.

    Args:
        x: [..., I] in the stored domain, at most eight activations.
        weights: packed (O_i, I) that ``why_not_jointly`` has nothing against.
        dialect: of the kernel.
        launch: how to spread it, default ``selection.matvec_launch``.

    Returns:
        [..., O_i] of each in the dtype of ``x``, lazy.
    """
    width = weights[0].shape[-1]
    check_width(x, width)
    outputs = tuple(weight.shape[0] for weight in weights)
    made = plan(weights[0].spec, outputs, width, x.size // width, x.dtype, dialect, launch)
    inputs = [x]
    for weight in weights:
        inputs += (weight.codes, weight.scales, weight.table)
    lead = x.shape[:-1]
    return JOINT_MATVEC[len(weights)].launch(
        dialect,
        inputs,
        template=made.template,
        groups=(made.groups, 1),
        threads=made.threads,
        shapes=[(*lead, n) for n in outputs],
        dtypes=[x.dtype] * len(outputs),
    )


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
    dtype = dtype or x.dtype
    made = plan(weight.spec, (outputs,), width, 1, dtype, dialect, launch, entries)
    (y,) = GATHER_MATVEC.launch(
        dialect,
        [x, weight.codes, weight.scales, weight.table, experts],
        template=made.template,
        groups=(made.groups, entries),
        threads=made.threads,
        shapes=[(entries, outputs)],
        dtypes=[dtype],
    )
    return y

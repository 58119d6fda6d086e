"""A packed weight times one to eight activations.

``y[m, o] = sum_i x[m, i] * scale[o, i / g] * table[window(o, i)]``, x [M, I], codes [O, words].

Thread map: a warp computes R outputs for all M rows. Its lanes take consecutive units of the
input (see ``unpack``), keep their activations in registers as float32 for the R outputs, and add
up in float32; at the end the 32 partial sums of every output are added by exchanges that halve the
number of sums each lane holds. SPLIT warps share the outputs along the input where there would be
too few warps otherwise. A group that spans several steps of a warp is scaled once (SPAN steps).
For several rows of 16 bits on CUDA a warp has tiles of sixteen outputs instead, four lanes and two
outputs each (``matvec_bodies``, TENSOR_ROWS).

Bytes moved: each code and scale once, whatever M is. Why it is so: on large GPUs the time goes
into instructions, not into memory, so what counts is how few a weight takes: about four for a
trellis code (half a shift, the byte's offset, a look-up, a multiply-add), about three for a scalar
code that is looked up in pairs.

Four kinds of kernels have this body: for a matrix; for experts, where each threadgroup row
``tq_by`` multiplies one activation by one matrix of a stack; for the two or three matrices that
read the same input (q, k and v; gate and up), each with threadgroups of its own; and for two stacks
of experts that do (gate and up). Ternary digits have another body, see ``ternary``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import mlx.core as mx

from ..quant.packed import PackedWeight
from ..quant.spec import QuantSpec
from . import selection, ternary, unpack
from .dialect import Dialect, Kernel
from .kv_dialect import kv_kernel
from .matvec_bodies import MULTIPLY, TENSOR, TENSOR_ROWS, TERNARY
from .selection import Launch, codec_of, matvec_launch, table_copies, tile_launch

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


def _joint(count: int, experts: bool = False) -> str:
    """Several matrices, or stacks, of one width, each with threadgroups of its own."""
    rows = 1 if experts else 0  # the axis of outputs
    lines = [
        "  constexpr uint EACH = uint(WARPS / SPLIT * R);",
        "  uint block = tq_bx, which = 0u;",
        f"  uint outputs = uint(codes0_shape[{rows}]);",
        f"  const int words = codes0_shape[{rows + 1}];",
        f"  const uint groups = uint(scales0_shape[{rows + 1}]);",
        "  TQ_IN(uint) codes = codes0;",
        "  TQ_IN(S) scales = scales0;",
        "  TQ_OUT(T) y = y0;",
    ]
    for i in range(1, count):
        lines += [
            f"  if (which == {i - 1}u && block >= (outputs + EACH - 1u) / EACH) {{",
            "    block -= (outputs + EACH - 1u) / EACH;",
            f"    which = {i}u;",
            f"    outputs = uint(codes{i}_shape[{rows}]);",
            f"    codes = codes{i};",
            f"    scales = scales{i};",
            f"    y = y{i};",
            "  }",
        ]
    level = f"table{count - 1}[i]"
    for i in reversed(range(count - 1)):
        level = f"(which == {i}u ? table{i}[i] : {level})"
    if experts:
        lines += [
            "  const uint matrix = uint(experts[tq_by]) * outputs;",
            "  const uint first_row = tq_by / (uint(experts_shape[0]) / uint(x_shape[0]));",
            "  const uint out_row = tq_by;",
        ]
    else:
        lines += ["  const uint matrix = 0u, first_row = 0u, out_row = 0u;"]
    lines += [
        f"#define TQ_LEVEL(i) {level}",
        "",
    ]
    return "\n".join(lines)


@dataclass(frozen=True)
class Kernels:
    """The kernels of one kind.

    Attributes:
        multiply: by multiply-adds.
        tensor: by matrix units (CUDA only).
        tensor_rows: by matrix units, tiles of outputs by rows of activations (CUDA only).
        ternary: of ternary digits.
    """

    multiply: Kernel
    tensor: Kernel
    tensor_rows: Kernel
    ternary: Kernel


Body = Literal["multiply", "tensor", "tensor_rows", "ternary"]


def _kernels(name: str, inputs: tuple[str, ...], outputs: tuple[str, ...], sizes: str) -> Kernels:
    def with_sizes(body: str) -> str:
        return body.replace("  TQ_FIND_SIZES\n", sizes)

    return Kernels(
        Kernel(name, inputs, outputs, with_sizes(MULTIPLY)),
        Kernel(f"{name}_tensor", inputs, outputs, with_sizes(TENSOR)),
        kv_kernel(f"{name}_tensor_rows", inputs, outputs, with_sizes(TENSOR_ROWS)),
        Kernel(
            f"{name}_ternary",
            inputs,
            outputs,
            with_sizes(TERNARY),
            metal=ternary.METAL,
            cuda=ternary.CUDA,
        ),
    )


def _inputs_of(count: int) -> tuple[str, ...]:
    return "x", *(f"{name}{i}" for i in range(count) for name in ("codes", "scales", "table"))


def _outputs_of(count: int) -> tuple[str, ...]:
    return tuple(f"y{i}" for i in range(count))


MATVEC = _kernels("turboquant_matvec", ("x", "codes", "scales", "table"), ("y",), _DENSE)
GATHER_MATVEC = _kernels(
    "turboquant_gather_matvec", ("x", "codes", "scales", "table", "experts"), ("y",), _EXPERT
)
JOINT_MATVEC = {
    count: _kernels(
        f"turboquant_joint_matvec{count}", _inputs_of(count), _outputs_of(count), _joint(count)
    )
    for count in (2, 3)
}
"""By the number of matrices."""
JOINT_GATHER = _kernels(
    "turboquant_joint_gather2",
    (*_inputs_of(2), "experts"),
    _outputs_of(2),
    _joint(2, experts=True),
)


def check_width(x: mx.array, width: int) -> None:
    """Raise ValueError unless rows of ``x`` have ``width`` elements: a kernel would not notice."""
    if x.shape[-1] != width:
        raise ValueError(f"an activation of shape {x.shape} meets a weight of width {width}")


TENSOR_DTYPES = (mx.float16, mx.bfloat16)


def _has_pairs(spec: QuantSpec) -> bool:
    """Whether the bodies for matrix units know how to look these codes up."""
    return spec.code != "ternary" and spec.bits <= 4 and spec.window_bits in (spec.bits, 8)


def _suits_tensor(spec: QuantSpec, width: int, unit: int) -> bool:
    """Whether the matrix units can take these weights: four lanes must share a scale."""
    return _has_pairs(spec) and spec.group_size % (4 * unit) == 0 and width % (4 * unit) == 0


def _unit_of_tiles(spec: QuantSpec) -> int:
    """UNIT of a kernel of tiles, or 0 if these weights do not suit it.

    Four lanes' units must share a scale, and no tile of the code may cut one.
    """
    unit = selection.TILE_UNIT if _has_pairs(spec) else 0
    while unit >= 8:
        if spec.group_size % (4 * unit) == 0 and spec.tile % unit == 0:
            return unit
        unit //= 2
    return 0


def _span_of_tiles(group_steps: int, steps: int, split: int) -> int:
    """Steps that are scaled together, of ``group_steps`` in a group; no warp gets more for it."""
    for span in (4, 2):
        if group_steps % span == 0 and -(-steps // span // split) * span == -(-steps // split):
            return span
    return 1


@dataclass(frozen=True)
class Plan:
    """What a launch needs besides arrays and shapes; made once, for a call must be quick."""

    body: Body
    template: list
    groups: int
    threads: int


@lru_cache(maxsize=1024)
def plan(
    spec: QuantSpec,
    outputs: tuple[int, ...],
    width: int,
    rows: int,
    dtype_of_x: mx.Dtype,
    dtype: mx.Dtype,
    dialect: Dialect,
    launch: Launch | None = None,
    entries: int = 1,
) -> Plan:
    """The launch for ``rows`` activations of ``width`` values.

    Args:
        spec: of all matrices.
        outputs: of each matrix.
        dtype_of_x: of the activations.
        dtype: of the results.
        launch: how to spread it, default ``selection.matvec_launch`` or, for several rows on
            CUDA, ``selection.tile_launch``. Sixteen outputs or more mean tiles where they can be.
        entries: how many products of this kind there are in the launch.
    """
    unit = unpack.unit_of(spec, width)
    size, span = unit.weights, 1
    body: Body = "multiply"
    if spec.code == "ternary":
        body = "ternary"
    else:
        if rows > 4:
            size = 8  # their activations must fit into registers
        if rows == 1 and spec.group_size % (32 * size) == 0:
            span = spec.group_size // (32 * size)
    codec, total = codec_of(spec), sum(outputs)
    units_of_16_bits = dialect == "cuda" and dtype_of_x in TENSOR_DTYPES
    tiles = _unit_of_tiles(spec) if units_of_16_bits else 0
    if launch is None and tiles and rows >= selection.TILE_ROWS:
        launch = tile_launch(codec, total, width, rows, 4 * tiles)
    if launch is None:
        launch = matvec_launch(dialect, codec, total, width, rows, size * span, entries)
    if tiles and launch.outputs >= 16:
        body, size = "tensor_rows", tiles
        steps = width // (4 * size)
        span = _span_of_tiles(spec.group_size // (4 * size), steps, launch.split)
    elif units_of_16_bits and launch.outputs > 1 and _suits_tensor(spec, width, size):
        body = "tensor"
    copies = table_copies(dialect, unit.table_bytes, unit.most_copies)
    if body in ("tensor", "tensor_rows"):
        # entries are words: one level or two of 16 bits
        paired = not spec.is_trellis
        copies = table_copies(dialect, unit.table_bytes // (2 if paired else 1), 32)
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
        ("COPIES", copies),
        ("ROWS", rows),
        ("R", launch.outputs),
        ("SPLIT", launch.split),
        ("SPAN", span),
        ("WARPS", launch.warps),
    ]
    each = launch.outputs * launch.warps // launch.split
    return Plan(body, template, sum(-(-n // each) for n in outputs), 32 * launch.warps)


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
    made = plan(weight.spec, (outputs,), width, x.size // width, x.dtype, dtype, dialect, launch)
    (y,) = getattr(MATVEC, made.body).launch(
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
    """What keeps these weights, which read one input, from one launch; "" if nothing does.

    The weights are matrices, or stacks of as many experts.
    """
    first = weights[0]
    stacks = len(first.shape) == 3
    if len(weights) not in ((2,) if stacks else JOINT_MATVEC):
        return f"{len(weights)} weights"
    for weight in weights:
        alike = weight.shape[-1] == first.shape[-1] and weight.shape[:-2] == first.shape[:-2]
        if weight.spec != first.spec or not alike:
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
    made = plan(weights[0].spec, outputs, width, x.size // width, x.dtype, x.dtype, dialect, launch)
    inputs = [x]
    for weight in weights:
        inputs += (weight.codes, weight.scales, weight.table)
    lead = x.shape[:-1]
    return getattr(JOINT_MATVEC[len(weights)], made.body).launch(
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
    made = plan(weight.spec, (outputs,), width, 1, x.dtype, dtype, dialect, launch, entries)
    (y,) = getattr(GATHER_MATVEC, made.body).launch(
        dialect,
        [x, weight.codes, weight.scales, weight.table, experts],
        template=made.template,
        groups=(made.groups, entries),
        threads=made.threads,
        shapes=[(entries, outputs)],
        dtypes=[dtype],
    )
    return y


def joint_gather(
    x: mx.array,
    weights: Sequence[PackedWeight],
    experts: mx.array,
    dialect: Dialect,
    *,
    launch: Launch | None = None,
) -> list[mx.array]:
    """``gather_matvec`` for two stacks that read the same input, in one launch; no QJL.

    Args:
        x: [n, I] as there.
        weights: packed (E, O_i, I) that ``why_not_jointly`` has nothing against.
        experts: integers below E, [entries].
        dialect: of the kernel.
        launch: how to spread it, default ``selection.matvec_launch``.

    Returns:
        [entries, O_i] of each in the dtype of ``x``, lazy.
    """
    width = weights[0].shape[-1]
    check_width(x, width)
    entries = experts.size
    outputs = tuple(weight.shape[1] for weight in weights)
    spec = weights[0].spec
    made = plan(spec, outputs, width, 1, x.dtype, x.dtype, dialect, launch, entries)
    inputs = [x]
    for weight in weights:
        inputs += (weight.codes, weight.scales, weight.table)
    return getattr(JOINT_GATHER, made.body).launch(
        dialect,
        [*inputs, experts],
        template=made.template,
        groups=(made.groups, entries),
        threads=made.threads,
        shapes=[(entries, n) for n in outputs],
        dtypes=[x.dtype] * len(outputs),
    )

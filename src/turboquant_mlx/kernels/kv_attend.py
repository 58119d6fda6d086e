"""Attention of a few queries over packed keys and values, without unpacking them.

``y = softmax(scale * q K^T) V`` for 1 to 8 tokens' queries [B, H, L, D]; K and V are packed by
``kvcache.codec``, each row of the batch has its own first column and its own tokens in 16 bits.

First pass: the context of each head of keys is cut into splits, one threadgroup each, so that all
queries that share the head read its keys and values once (up to 16 at a time on NVIDIA's matrix
units, 8 elsewhere). A warp goes through tiles of tokens with a running maximum. Keys are not
rotated back: the queries are rotated instead, and scores are ``scale_of_token * (level . query)``.
One more threadgroup takes the tokens in 16 bits and the sinks. Second pass: a threadgroup for each
query adds the partial results and rotates the sum back.

Bytes moved: codes and scales once, and for each split a sum of the head's size in float32 and back.
A fixed mean that was taken off all packed keys changes all their scores alike and needs no term;
tokens in 16 bits and sinks are moved by it instead. See ``docs/concepts/kv-kernels.md``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import islice

import mlx.core as mx

from .dialect import Dialect
from .kv_attend_bodies import COMBINE
from .kv_attend_multiply import MULTIPLY
from .kv_attend_tensor import TENSOR
from .kv_dialect import kv_kernel
from .kv_selection import (
    COMBINE_SLICES,
    LONG,
    MOST_PARTS,
    QUERIES,
    RAW_TOKENS,
    SHARED_BYTES,
    AttendLaunch,
    attend_launch,
    split_limits,
    table_copies,
)
from .kv_sides import KVRows, KVSide, meta_of, packed_inputs, sizes_of
from .replay import Program, traced

_INPUTS = (
    "queries",
    "kcodes",
    "kscales",
    "kbiases",
    "vcodes",
    "vscales",
    "vbiases",
    "facts",
    "factor",
    "meta",
    "raw_keys",
    "raw_values",
    "shift",
    "sinks",
    "mask",
)
_OPTIONAL = _INPUTS[-5:]
ATTEND = (
    kv_kernel("turboquant_kv_attend", _INPUTS, ("sums", "marks"), MULTIPLY),
    kv_kernel("turboquant_kv_attend_tensor", _INPUTS, ("sums", "marks"), TENSOR),
)
"""By multiply-adds, and by matrix units (CUDA only)."""

ADD_UP = kv_kernel("turboquant_kv_combine", ("sums", "marks", "facts", "meta"), ("y",), COMBINE)

TENSOR_CAPACITY = 32
"""Tokens that a warp may read at a time on the matrix units."""

TENSOR_WIDTH = 256
"""Widest head whose sums fit a warp's registers beside the rest."""


@lru_cache(maxsize=64)
def _scalar(value: float) -> mx.array:
    return mx.array([value], dtype=mx.float32)


def why_no_kernel(
    sides: tuple[KVSide, KVSide],
    rows: KVRows,
    queries: mx.array,
    codes: tuple[mx.array, mx.array],
    mask: mx.array | None,
) -> str:
    """What keeps the kernels from this call; "" if nothing does.

    Args:
        codes: of keys and values, [B, Hkv, capacity, words].
        mask: None or an array.
    """
    for side in sides:
        if side.width % 8 or not 32 <= side.width <= 1024:
            return f"a head of {side.width} values"
        if side.group % 8:
            return f"groups of {side.group} values"
    if queries.shape[1] // codes[0].shape[1] * queries.shape[2] > QUERIES:
        return f"{queries.shape[1]} heads with {queries.shape[2]} queries each"
    if max(rows.raw) > RAW_TOKENS:
        return f"{max(rows.raw)} tokens that are held in 16 bits"
    if mask is not None and mask.shape[-1] != rows.columns:
        return f"a mask of the shape {mask.shape}"
    if max(c.size for c in codes) >= 2**31:
        return "more words than 32 bits can count"
    return ""


@dataclass(frozen=True)
class _Plan:
    """What a call needs besides its arrays."""

    launch: AttendLaunch
    groups: int
    template: list
    combine: list
    combine_threads: int
    programs: dict[tuple, Program] = field(default_factory=dict)
    """By the number of partial results, which arrays they are given and which ones they hold; for
    each shape of those given MLX traces them once."""


@lru_cache(maxsize=256)
def _plan(
    sides: tuple[KVSide, KVSide],
    batch: int,
    kv_heads: int,
    repeats: int,
    length: int,
    dtype: mx.Dtype,
    flags: tuple[int, bool, bool, bool, bool],
    dialect: Dialect,
    shared: int,
    roomy: bool,
    long: bool,
    launch: AttendLaunch | None,
) -> _Plan:
    key, value = sides
    widest = max(key.width, value.width)
    suits = all(
        not s.affine and s.group == s.width and s.width % 16 == 0 and s.width <= TENSOR_WIDTH
        for s in sides
    )
    suits = suits and roomy and dialect == "cuda" and dtype != mx.float32
    if launch is None:
        bits = max(key.bits, value.bits)
        launch = attend_launch(suits, repeats * length, widest, bits, long)
    if launch.tensor and not suits:
        raise ValueError("the matrix units do not take this case")
    row_blocks = -(-repeats * length // launch.rows)
    rest = 4 * launch.rows * widest + 8 * launch.warps * launch.rows + 4 * launch.rows
    if not launch.tensor:
        rest += 128 * launch.warps * launch.rows
    key_copies, value_copies = table_copies(launch.tensor, key.bits, value.bits, rest, shared)
    mask, causal, sinks, shift, raw = flags
    sizes = dict(sizes_of(sides))

    def of_sizes(*names: str) -> list[tuple[str, int]]:
        return [(name, sizes[name]) for name in names]

    # the second pass takes fewer of them, or there would be more of it to compile
    common = [*of_sizes("D", "DV", "KBASE", "VBASE", "VPOWER"), ("RAW", raw)]
    template = [
        *common,
        ("RB", launch.rows),
        ("LENGTH", length),
        ("REPEATS", repeats),
        ("HEADS", kv_heads),
        *of_sizes("KB", "VB", "KGROUP", "VGROUP"),
        ("KAFFINE", key.affine),
        ("VAFFINE", value.affine),
        *of_sizes("KPOWER"),
        ("WARPS", launch.warps),
        ("TILES", launch.tiles),
        ("KCOPIES", key_copies),
        ("VCOPIES", value_copies),
        ("MASK", mask),
        ("CAUSAL", causal),
        ("SINKS", sinks),
        ("SHIFT", shift),
    ]
    warps = min(16, -(-COMBINE_SLICES * value.width // 32))
    combine = [
        ("T", dtype),
        *common,
        ("WARPS", warps),
        ("ROWS", repeats * length),
        ("MOST_PARTS", MOST_PARTS),
        ("SLICES", COMBINE_SLICES),
    ]
    return _Plan(launch, batch * kv_heads * row_blocks, template, combine, 32 * warps)


@dataclass(frozen=True)
class Prepared:
    """``kv_attend`` but for its arrays and where the tokens are: what stays while a text grows.

    Attributes:
        plan: what stays for all layers.
        dialect: of the kernels.
        sides: how keys and values are packed.
        facts, factor: arrays that each launch is given.
        present: which of ``_OPTIONAL`` each call is given.
        capacity, raw_capacity, strides: what ``meta_of`` is told.
        special: whether threadgroups for tokens in 16 bits and sinks come on top.
        most_splits, step: parts of the context at most, and columns of one at least.
    """

    plan: _Plan
    dialect: Dialect
    sides: tuple[KVSide, KVSide]
    facts: mx.array
    factor: mx.array
    present: tuple[bool, ...]
    capacity: int
    raw_capacity: int
    strides: tuple[int, int, int]
    special: bool
    most_splits: int
    step: int

    def __call__(
        self,
        queries: mx.array,
        keys: tuple[mx.array, ...],
        values: tuple[mx.array, ...],
        rows: KVRows,
        *optional: mx.array | None,
    ) -> mx.array:
        """As ``kv_attend``; ``optional`` are the arrays of ``_OPTIONAL``."""
        splits = min(self.most_splits, -(-rows.columns // self.step)) or 1
        meta = meta_of(rows, splits, self.capacity, self.raw_capacity, self.strides)
        parts = splits + self.special
        # one program serves all layers whose codecs are alike
        key = parts, self.present, id(self.facts), id(self.factor)
        program = self.plan.programs.get(key)
        if program is None:
            program = traced(partial(_run, self, parts))
            self.plan.programs[key] = program
        given = [a for a, used in zip(optional, self.present, strict=True) if used]
        (y,) = program(queries, *keys, *values, meta, *given)  # type: ignore[arg-type]
        return y


def prepare(
    shape: tuple[int, ...],
    dtype: mx.Dtype,
    codes: tuple[int, ...],
    dialect: Dialect,
    *,
    sides: tuple[KVSide, KVSide],
    facts: mx.array,
    rows: KVRows,
    scale: float,
    raw_capacity: int = 0,
    shift: bool = False,
    mask: mx.array | None = None,
    causal: bool = False,
    sinks: bool = False,
    launch: AttendLaunch | None = None,
) -> Prepared:
    """What ``kv_attend`` needs besides arrays.

    Args:
        shape, dtype: of the queries.
        codes: shape of the keys' codes, [B, Hkv, capacity, words].
        raw_capacity: n of the tokens in 16 bits [B, Hkv, n, D].
        shift, sinks: whether there are any.
        dialect, sides, facts, scale, mask, causal, launch: as for ``kv_attend``; a mask must have
            four axes.
        rows: where the tokens are; each call may have others, as long as the same rows have tokens
            in 16 bits and the columns are on the same side of ``LONG``.
    """
    batch, heads, length, _ = shape
    kv_heads, capacity = codes[1:3]
    has_raw = max(rows.raw) > 0
    kind, strides = 0, (0, 0, 0)
    if mask is not None:
        kind = 1 if mask.dtype == mx.bool_ else 2
        mb, mh, ml, n = mask.shape
        strides = (mh * ml * n * (mb > 1), ml * n * (mh > 1), n * (ml > 1))
    special = has_raw or sinks
    shifted = shift and special
    made = _plan(
        sides,
        batch,
        kv_heads,
        heads // kv_heads,
        length,
        dtype,
        (kind, causal and length > 1, sinks, shifted, special),
        dialect,
        SHARED_BYTES[dialect],
        capacity >= TENSOR_CAPACITY,
        rows.columns >= LONG,
        launch,
    )
    most, step = split_limits(dialect, made.launch, made.groups, special)
    return Prepared(
        plan=made,
        dialect=dialect,
        sides=sides,
        facts=facts,
        factor=_scalar(scale * math.log2(math.e)),
        present=(has_raw, has_raw, shifted, sinks, mask is not None),
        capacity=capacity,
        raw_capacity=raw_capacity if has_raw else 0,
        strides=strides,
        special=special,
        most_splits=most,
        step=step,
    )


def kv_attend(
    queries: mx.array,
    keys: tuple[mx.array, ...],
    values: tuple[mx.array, ...],
    dialect: Dialect,
    *,
    sides: tuple[KVSide, KVSide],
    facts: mx.array,
    rows: KVRows,
    scale: float,
    shift: mx.array | None = None,
    raw: tuple[mx.array, mx.array] | None = None,
    mask: mx.array | None = None,
    causal: bool = False,
    sinks: mx.array | None = None,
    launch: AttendLaunch | None = None,
) -> mx.array:
    """Attention that ``why_no_kernel`` has nothing against.

    Args:
        queries: [B, H, L, D], float16, bfloat16 or float32, those of the last L columns.
        keys, values: (codes, scales) or (codes, scales, biases), [B, Hkv, capacity, n].
        dialect: of the kernels.
        sides: how keys and values are packed.
        facts: ``kv_sides.constants`` of them.
        rows: where the tokens are.
        scale: of the scores.
        shift: [B, Hkv, 1, D] that was taken off every packed key, or None.
        raw: keys and values [B, Hkv, n, D] of the tokens in 16 bits.
        mask: boolean or additive, of up to four axes, the last as long as ``rows.columns``.
        causal: whether query i sees only the columns up to its own.
        sinks: None or logits [H].
        launch: how to spread it, default ``kv_selection.attend_launch``.

    Returns:
        [B, H, L, Dv] in the queries' dtype, lazy.
    """
    if mask is not None:
        mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    if raw is None:
        rows = rows._replace(raw=(0,) * len(rows.raw))
    call = prepare(
        queries.shape,
        queries.dtype,
        keys[0].shape,
        dialect,
        sides=sides,
        facts=facts,
        rows=rows,
        scale=scale,
        raw_capacity=0 if raw is None else raw[0].shape[2],
        shift=shift is not None,
        mask=mask,
        causal=causal,
        sinks=sinks is not None,
        launch=launch,
    )
    return call(queries, keys, values, rows, *(raw or (None, None)), shift, sinks, mask)


def _run(call: Prepared, parts: int, *given: mx.array) -> list:
    """Both passes, of the arrays that ``call`` gives its program."""
    made, facts = call.plan, call.facts
    arrays = iter(given)
    queries = next(arrays)
    keys, values = (tuple(islice(arrays, 3 if side.affine else 2)) for side in call.sides)
    meta = next(arrays)
    optional = [next(arrays) if there else facts for there in call.present]
    batch, heads, length, _ = queries.shape
    kv_heads, width = keys[0].shape[1], call.sides[1].width
    lead = (batch * kv_heads, parts, heads // kv_heads * length)
    sums, marks = ATTEND[made.launch.tensor].launch(
        call.dialect,
        [queries, *packed_inputs(keys, values, facts), facts, call.factor, meta, *optional],
        template=made.template,
        groups=(parts, made.groups),
        threads=32 * made.launch.warps,
        shapes=[(*lead, width), (*lead, 2)],
        dtypes=[mx.float32, mx.float32],
    )
    return ADD_UP.launch(
        call.dialect,
        [sums, marks, facts, meta],
        template=made.combine,
        groups=(batch * heads * length, 1),
        threads=made.combine_threads,
        shapes=[(batch, heads, length, width)],
        dtypes=[queries.dtype],
    )

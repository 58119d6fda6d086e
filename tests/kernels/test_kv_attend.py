"""Attention over packed keys and values in kernels: the same as over the decoded store.

Expected values are attention in float64 over what the store decodes to.
"""

from __future__ import annotations

import copy
import itertools

import mlx.core as mx
import numpy as np
import pytest

from kernel_cases import BOUNDS, all_pairs, as_double, dialects, running
from kv_cases import COLUMNS, WIDTHS, expected, filled, random
from turboquant_mlx.kernels import kv_attend as kernels
from turboquant_mlx.kernels.dialect import Kernel
from turboquant_mlx.kernels.dispatch import force_backend
from turboquant_mlx.kernels.kv_selection import (
    QUERIES,
    RAW_TOKENS,
    AttendLaunch,
    attend_launch,
    split_limits,
    table_copies,
)
from turboquant_mlx.kvcache.attend import (
    attend,
    kernel_facts,
    kernel_sides,
    why_reference,
)
from turboquant_mlx.kvcache.spec import KVSpec
from turboquant_mlx.kvcache.store import PackedStore

BITS = [2, 3, 4, 5, 6, 8]
AXES = {
    "width": [48, 64, 80, 128, 256, 576],
    "bits": [(3, 4), (4, 4), (2, 3), (4, 5), (8, 4), (6, 2)],
    "queries": [(1, 1), (4, 1), (8, 1), (2, 5), (2, 8)],
    "dtype": [mx.float16, mx.bfloat16, mx.float32],
    "padding": [(0,), (0, 0), (13, 0)],
    "mask": ["none", "causal", "bool", "additive", "per head", "window"],
    "sinks": [False, True],
    "min_tokens": [0, 1, 5],
}


def mask_of(kind: str, store: PackedStore, heads: int, length: int):
    columns = store.columns
    column = np.arange(columns)[None, None, None]
    row = (columns - length + np.arange(length))[None, None, :, None]
    seen = (column <= row) & (column >= np.array(store.padding)[:, None, None, None])
    if kind in ("none", "causal"):
        return None if kind == "none" or length == 1 else "causal"
    if kind == "window":
        return mx.array(seen & (column > row - 20))
    if kind == "bool":
        return mx.array(seen)
    additive = mx.array(np.where(seen, 0, -1e9).astype(np.float32))
    if kind == "additive":
        return additive.astype(mx.float32)
    return additive + random(1, heads, 1, columns, seed=5)


def assert_near(got: mx.array, want: np.ndarray, dtype: mx.Dtype, slack: float = 1.0) -> None:
    assert got.dtype == dtype
    assert got.shape == want.shape
    distance = np.linalg.norm(as_double(got) - want)
    assert distance <= slack * BOUNDS[dtype] * np.linalg.norm(want)


# Scores of about 10 amplify the rounding of queries and levels to 16 bits on the matrix units.
SLACK = 3.0


def check(
    dialect, width, bits, queries, dtype, padding, mask, sinks, min_tokens, columns=COLUMNS
) -> None:
    """``queries`` are those of a head of keys: heads and tokens."""
    repeats, length = queries
    spec = KVSpec(*bits, min_tokens=min_tokens)
    store = filled(spec, padding, columns, 2, width, dtype=dtype)
    heads = 2 * repeats
    q = random(len(padding), heads, length, width, seed=3, dtype=dtype)
    sink = random(heads, seed=4) if sinks else None
    given = mask_of(mask, store, heads, length)
    scale = width**-0.5
    with running(dialect):
        assert why_reference(q, store, given) == ""
        out = attend(q, store, scale=scale, mask=given, sinks=sink)
        mx.eval(out)
    assert_near(out, expected(q, store, scale, given, sink), dtype, SLACK)


@pytest.mark.parametrize("dialect", dialects())
@pytest.mark.parametrize(
    "case", list(all_pairs(**AXES)), ids=lambda c: "-".join(map(str, c.values()))
)
def test_every_two_properties_together(dialect, case):
    check(dialect, **case)


@pytest.mark.heavy
@pytest.mark.parametrize("dialect", dialects())
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("bits", list(itertools.product(BITS, BITS)), ids=str)
def test_all_widths_and_bits_together(dialect, width, bits):
    for i, (queries, dtype) in enumerate(itertools.product(AXES["queries"], AXES["dtype"])):
        rest = {name: AXES[name][i % len(AXES[name])] for name in ("padding", "mask", "sinks")}
        check(dialect, width, bits, queries, dtype, **rest, min_tokens=i % 3)


USUAL = {
    "width": 128,
    "bits": (3, 4),
    "queries": (4, 1),
    "dtype": mx.float16,
    "padding": (0,),
    "mask": "none",
    "sinks": False,
    "min_tokens": 1,
}


@pytest.mark.parametrize("dialect", dialects())
@pytest.mark.parametrize("columns", [34, 47, 48, 49, 64, 65, 128, 129, 300])
def test_contexts_around_the_borders_of_tiles_and_splits(dialect, columns):
    check(dialect, **USUAL, columns=columns)


@pytest.mark.parametrize("dialect", dialects())
@pytest.mark.parametrize("columns", [1, 2, 17, 32])
def test_few_tokens(dialect, columns):
    """MLX's own scheme has no mean key to wait for."""
    spec = KVSpec(4, 4, "uniform", "turboquant", min_tokens=0)
    store = filled(spec, (0,), columns, 2, 64)
    q = random(1, 4, 1, 64, seed=3, dtype=mx.float16)
    with running(dialect):
        assert why_reference(q, store, None) == ""
        out = attend(q, store, scale=0.1)
        mx.eval(out)
    assert_near(out, expected(q, store, 0.1, None, None), mx.float16, SLACK)


@pytest.mark.parametrize("dialect", dialects())
def test_a_store_without_room_for_a_tile(dialect):
    """A tile of the matrix units would reach beyond it."""
    store = filled(KVSpec(3, 4, min_tokens=0), (0,), 40, 2, 64)
    store = store.rows([0]).tight()
    store.keys, store.values = (tuple(p[:, :, 20:] for p in x) for x in (store.keys, store.values))
    store.columns = 20
    q = random(1, 4, 1, 64, seed=3, dtype=mx.float16)
    with running(dialect):
        assert why_reference(q, store, None) == ""
        out = attend(q, store, scale=0.1)
        mx.eval(out)
    assert_near(out, expected(q, store, 0.1, None, None), mx.float16, SLACK)


def launches(dialect):
    if dialect == "metal":
        return [AttendLaunch(False, r, 1, w, s) for r, w, s in [(1, 4, 1), (4, 2, 3), (8, 8, 2)]]
    return [
        AttendLaunch(True, 8, 1, 8, 1),
        AttendLaunch(True, 8, 2, 4, 3),
        AttendLaunch(True, 16, 1, 2, 2),
        AttendLaunch(False, 4, 1, 4, 2),
    ]


@pytest.mark.parametrize("dialect", dialects())
@pytest.mark.parametrize("repeats, length", [(4, 1), (4, 3)])
def test_any_launch_gives_the_result(dialect, repeats, length):
    store = filled(KVSpec(3, 4), (0, 30), 100, 1, 64)
    q = random(2, repeats, length, 64, seed=3, dtype=mx.float16)
    mask = mask_of("causal", store, repeats, length)
    want = expected(q, store, 0.125, mask, None)
    for launch in launches(dialect):
        with running(dialect):
            out = with_launch(q, store, 0.125, launch, dialect, causal=mask is not None)
            mx.eval(out)
        assert_near(out, want, mx.float16, SLACK)


def with_launch(q, store: PackedStore, scale, launch, dialect, **more) -> mx.array:
    return kernels.kv_attend(
        q,
        store.keys,
        store.values,
        dialect,
        sides=kernel_sides(store.key_codec, store.value_codec),
        facts=kernel_facts(store.key_codec, store.value_codec),
        rows=store.token_rows(),
        scale=scale,
        shift=store.shift,
        raw=(store.raw_keys, store.raw_values),
        launch=launch,
        **more,
    )


@pytest.mark.parametrize("dialect", dialects())
@pytest.mark.parametrize("tensor", [False, True])
def test_a_split_may_be_empty(dialect, tensor):
    """More splits than tiles, and rows of very different lengths."""
    if tensor and dialect == "metal":
        pytest.skip("Metal has no such kernel")
    store = filled(KVSpec(3, 4), (0, 200), 260, 2, 64)
    q = random(2, 8, 1, 64, seed=3, dtype=mx.float16)
    with running(dialect):
        launch = AttendLaunch(tensor, 8, 1, 2, 40)
        most, step = split_limits(dialect, launch, 4)
        assert min(most, 260 // step) > 1
        out = with_launch(q, store, 0.125, launch, dialect)
        mx.eval(out)
    assert_near(out, expected(q, store, 0.125, None, None), mx.float16, SLACK)


@pytest.mark.parametrize("dialect", dialects())
@pytest.mark.parametrize(
    "padding, sinks", [((0, 84), False), ((0, 20, 89), True), ((70, 0), False)]
)
def test_rows_that_are_not_packed_yet_beside_rows_that_are(dialect, padding, sinks):
    check(dialect, **{**USUAL, "padding": padding, "width": 64, "sinks": sinks})


@pytest.mark.parametrize("dialect", dialects())
def test_many_tokens_in_16_bits(dialect):
    check(dialect, **{**USUAL, "min_tokens": 70, "width": 64}, columns=150)


@pytest.mark.parametrize("dialect", dialects())
@pytest.mark.parametrize("dtype", [mx.float16, mx.float32])
def test_a_row_that_sees_nothing_is_zero(dialect, dtype):
    store = filled(KVSpec(3, 4, min_tokens=0), (0, 0), dtype=dtype)
    q = random(2, 4, 1, 64, seed=3, dtype=dtype)
    seen = np.ones((2, 1, 1, COLUMNS), bool)
    seen[1] = False
    with running(dialect):
        out = attend(q, store, scale=0.125, mask=mx.array(seen))
        mx.eval(out)
    assert_near(out, expected(q, store, 0.125, mx.array(seen), None), dtype, SLACK)
    assert not as_double(out[1]).any()


@pytest.mark.parametrize("dialect", dialects())
def test_sinks_alone(dialect):
    check(dialect, **{**USUAL, "min_tokens": 0, "sinks": True, "width": 64})


@pytest.mark.parametrize("dialect", dialects())
@pytest.mark.parametrize("widths", [(96, 48), (64, 128), (576, 512)])
def test_keys_and_values_of_different_widths(dialect, widths):
    store = filled(KVSpec(3, 4), (0, 9), COLUMNS, 1, *widths)
    q = random(2, 4, 2, widths[0], seed=3, dtype=mx.float16)
    with running(dialect):
        out = attend(q, store, scale=0.1, mask="causal")
        mx.eval(out)
    assert_near(out, expected(q, store, 0.1, "causal", None), mx.float16, SLACK)


@pytest.mark.parametrize("dialect", dialects())
@pytest.mark.parametrize("group, dtype", [(16, mx.float32), (32, mx.float16)])
def test_several_scales_for_a_head(dialect, group, dtype):
    store = filled(KVSpec(3, 5, group_size=group), (0, 9), width=128, dtype=dtype)
    q = random(2, 4, 1, 128, seed=3, dtype=dtype)
    with running(dialect):
        assert why_reference(q, store, None) == ""
        out = attend(q, store, scale=0.1)
        mx.eval(out)
    assert_near(out, expected(q, store, 0.1, None, None), dtype, SLACK)


@pytest.mark.parametrize("dialect", dialects())
@pytest.mark.parametrize(
    "bits, schemes",
    [
        ((3, 4), ("uniform", "uniform")),
        ((6, 5), ("uniform", "turboquant")),
        ((8, 2), ("turboquant", "uniform")),
    ],
)
def test_mlx_own_quantization_beside_ours(dialect, schemes, bits):
    store = filled(KVSpec(*bits, *schemes, group_size=32), (0, 9), width=64, dtype=mx.float32)
    q = random(2, 4, 1, 64, seed=3)
    with running(dialect):
        assert why_reference(q, store, None) == ""
        out = attend(q, store, scale=0.1)
        mx.eval(out)
    assert_near(out, expected(q, store, 0.1, None, None), mx.float32, 5)


@pytest.mark.parametrize("dialect", dialects())
@pytest.mark.parametrize("size", [1e-4, 1e-2, 1e3])
def test_keys_and_values_of_any_size(dialect, size):
    """Weights times scales must fit 16 bits on the matrix units, whatever the values' scale."""
    keys = random(1, 2, COLUMNS, 64, seed=1).astype(mx.bfloat16)
    with force_backend("portable"):
        store = PackedStore(KVSpec(4, 4, min_tokens=0), [0])
        store.append(keys * size, random(1, 2, COLUMNS, 64, seed=2).astype(mx.bfloat16) * size)
    q = (random(1, 8, 1, 64, seed=3) / size).astype(mx.bfloat16)
    with running(dialect):
        out = attend(q, store, scale=0.125)
        mx.eval(out)
    assert_near(out, expected(q, store, 0.125, None, None), mx.bfloat16, SLACK)


@pytest.mark.parametrize("dialect", dialects())
def test_one_key_that_outweighs_all_others(dialect):
    """The running maximum grows by much, late."""
    store = PackedStore(KVSpec(4, 4, min_tokens=0), [0])
    keys = np.array(random(1, 2, 300, 64, seed=1)) * 0.1
    keys[:, :, 250] = 4
    with force_backend("portable"):
        store.append(mx.array(keys).astype(mx.float16), random(1, 2, 300, 64).astype(mx.float16))
    q = mx.ones((1, 8, 1, 64), mx.float16)
    with running(dialect):
        out = attend(q, store, scale=0.25)
        mx.eval(out)
    assert_near(out, expected(q, store, 0.25, None, None), mx.float16, SLACK)


def test_what_kernels_do_not_take_is_answered_by_the_reference(monkeypatch):
    with running(dialects()[0]):
        cases = []
        store = filled(KVSpec(3, 4))
        q = random(1, 4, 1, 64, seed=3)
        cases.append((q, store, mx.ones((1, 1, 1, 1), mx.bool_), "a mask of the shape"))
        many = random(1, 2 * (QUERIES // 8 + 1), 8, 64)
        cases.append((many, store, "causal", "heads with 8 queries"))
        long = filled(KVSpec(3, 4, min_tokens=RAW_TOKENS + 1), columns=RAW_TOKENS + 60)
        cases.append((q, long, None, "held in 16 bits"))
        wide = filled(KVSpec(3, 4), width=20)
        cases.append((random(1, 4, 1, 20), wide, None, "a head of 20 values"))
        monkeypatch.setattr("turboquant_mlx.kvcache.attend.prepare", None)
        for queries, held, mask, reason in cases:
            assert reason in why_reference(queries, held, mask)
            out = attend(queries, held, scale=0.125, mask=mask)
            mx.eval(out)
            assert_near(out, expected(queries, held, 0.125, mask, None), mx.float32, 100)


@pytest.mark.parametrize("padding", [(0,), (0, 5)])
def test_before_anything_is_packed_mlx_own_attention_answers(padding, monkeypatch):
    monkeypatch.setattr("turboquant_mlx.kvcache.attend.prepare", None)
    store = filled(KVSpec(3, 4), padding, columns=20)
    q = random(len(padding), 4, 1, 64, seed=3)
    with running(dialects()[0]):
        assert why_reference(q, store, None) == "nothing is packed yet"
        out = attend(q, store, scale=0.125)
        mx.eval(out)
    assert not any(store.frozen)
    # no packed part to decode: compared with the reference of the same store
    with force_backend("portable"):
        assert mx.allclose(out, attend(q, store, scale=0.125), atol=1e-3)


def test_matrix_units_are_used_where_they_can_be():
    assert attend_launch(True, 4, 128, 4).tensor
    assert attend_launch(True, 32, 128, 4).rows == 16
    assert attend_launch(True, 32, 256, 4).rows == 8
    assert attend_launch(True, 4, 128, 8).warps == 4
    assert attend_launch(False, 3, 128, 4).rows == 4
    assert attend_launch(False, 64, 576, 4).rows == 2
    names = []

    def note(self, *args, **kwargs):
        names.append(self.name)
        return [mx.zeros(s, d) for s, d in zip(kwargs["shapes"], kwargs["dtypes"], strict=True)]

    with pytest.MonkeyPatch.context() as patch, force_backend("cuda"):
        patch.setattr(Kernel, "launch", note)
        for dtype, spec in [
            (mx.float16, KVSpec(3, 4)),
            (mx.float32, KVSpec(3, 4)),
            (mx.float16, KVSpec(3, 4, group_size=32)),
        ]:
            store = filled(spec)
            names.clear()
            with force_backend("cuda"):
                attend(random(1, 4, 1, 64, dtype=dtype), store, scale=0.1)
            special = dtype == mx.float16 and spec.group_size == 0
            assert names[0].startswith("turboquant_kv_attend_tensor") == special
            assert names[1:] == ["turboquant_kv_combine"]


def test_tables_get_as_many_copies_as_memory_holds():
    assert table_copies(True, 3, 4, 5000, 47 * 1024) == (32, 32)
    assert table_copies(True, 4, 4, 5000, 47 * 1024) == (32, 32)
    assert table_copies(True, 8, 4, 5000, 47 * 1024) == (16, 16)
    assert table_copies(False, 8, 8, 5000, 24 * 1024) == (8, 8)
    for bits in itertools.product(range(1, 9), repeat=2):
        for tensor in (False, True):
            keys, values = table_copies(tensor, *bits, 12000, 24 * 1024)
            assert 1 <= keys <= 32
            assert 1 <= values <= 32


def test_splits_fill_the_device_but_are_not_cut_finer_than_a_step():
    launch = AttendLaunch(True, 8, 1, 8)
    assert split_limits("cuda", launch, 8) == (33, 128)
    assert split_limits("cuda", launch, 8, beside=True) == (32, 128)
    assert split_limits("cuda", launch, 64) == (4, 128)
    assert split_limits("cuda", launch, 64, beside=True) == (4, 128)
    assert split_limits("cuda", launch, 1000) == (1, 128)
    assert split_limits("metal", AttendLaunch(False, 4, warps=4), 8) == (32, 128)


def test_long_contexts_get_larger_threadgroups_where_these_pay():
    assert attend_launch(True, 4, 128, 4, long=False) == AttendLaunch(True, 8, tiles=2, warps=4)
    assert attend_launch(True, 4, 128, 4, long=True) == AttendLaunch(True, 8, tiles=1, warps=8)
    assert attend_launch(True, 16, 128, 4, long=False) == AttendLaunch(True, 16, tiles=1, warps=8)
    assert attend_launch(True, 4, 128, 8, long=True) == AttendLaunch(True, 8, tiles=1, warps=4)


@pytest.mark.parametrize("dialect", dialects())
def test_what_is_kept_from_token_to_token_follows_every_change_of_the_store(dialect):
    """A store keeps what a call needs besides its arrays; a copy of it keeps nothing."""
    store = filled(KVSpec(3, 4, min_tokens=3), (0, 9), 60, 1, 32)

    def append(n: int) -> None:
        store.append(*(random(2, 1, n, 32, seed=n + i, dtype=mx.float16) for i in range(2)))

    changes = [
        lambda: append(1),
        lambda: append(1),
        lambda: store.trim(2),
        lambda: append(1),
        lambda: append(30),  # beyond the capacity
        lambda: append(1),
        lambda: store.drop(5),
        lambda: append(1),
        lambda: store.cut(store.live),
        lambda: store.trim(35),  # into the tokens in 16 bits
        lambda: append(1),
    ]
    one, two = (random(2, 2, n, 32, seed=3, dtype=mx.float16) for n in (1, 2))
    with running(dialect):
        for change in changes:
            change()
            for q, scale, mask in [(one, 0.125, None), (two, 0.1, "causal")]:
                bare = copy.deepcopy(store)
                assert bare.held("attention") is None
                got = attend(q, store, scale=scale, mask=mask)
                assert mx.array_equal(got, attend(q, bare, scale=scale, mask=mask))
            assert mx.array_equal(store.decoded(store.columns)[0], bare.decoded(store.columns)[0])


def test_a_traced_program_is_given_the_arrays_that_it_takes(monkeypatch):
    """On a GPU programs are traced once and shared; here nothing but the tracing happens."""

    def build(kernel: Kernel, dialect: str):
        def call(inputs, output_shapes, output_dtypes, **launch):
            assert len(inputs) == len(kernel.inputs)
            made = zip(output_shapes, output_dtypes, strict=True)
            return mx.depends([mx.zeros(*one) for one in made], list(inputs))

        return call

    monkeypatch.setattr(Kernel, "build", build)
    q, sinks = random(1, 4, 1, 64, seed=3, dtype=mx.float16), random(4, seed=4)
    for dialect, min_tokens, sink, kind in itertools.product(
        ["cuda", "metal"], [0, 3], [None, sinks], ["none", "bool", "additive"]
    ):
        store = filled(KVSpec(3, 4, min_tokens=min_tokens), (0,), 60, 2, 64)
        with force_backend(dialect):
            for _ in range(2):
                out = attend(q, store, scale=0.1, mask=mask_of(kind, store, 4, 1), sinks=sink)
                assert mx.array_equal(out, mx.zeros(q.shape, q.dtype))
                store.append(q[:, :2], q[:, 2:])

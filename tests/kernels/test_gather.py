"""Packed experts: a kernel reads only those that are named."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from kernel_cases import (
    CODES,
    ON_GPU,
    activation,
    all_pairs,
    as_double,
    assert_close,
    assert_product,
    counting,
    dense,
    dialects,
    each_of_all,
    name_of,
    packed,
    running,
    spec_of,
)
from turboquant_mlx.kernels.gather import are_few, gather_matmul, portable_gather
from turboquant_mlx.kernels.matvec import gather_matvec, joint_gather, why_not_jointly
from turboquant_mlx.kernels.selection import GATHER_PER_EXPERT, Launch, gather_entries
from turboquant_mlx.layers.rotation_group import RotationGroup
from turboquant_mlx.quant.rotation import rotate
from turboquant_mlx.quant.spec import QuantSpec

SPEC = QuantSpec(bits=3, window_bits=8, group_size=64, scale_layout="log8")
EXPERTS, OUTPUTS, WIDTH = 6, 13, 192


def expected(x: mx.array, weight, indices: mx.array, use_qjl: bool = True) -> np.ndarray:
    matrices = dense(weight, use_qjl)[np.array(indices)]
    return as_double(x) @ matrices.swapaxes(-1, -2)


@pytest.mark.parametrize("dialect", dialects())
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_the_experts_of_a_token_share_its_activation(dialect, dtype):
    """The gate and up projections of a decode step, as mlx-lm calls them."""
    weight, x = packed(SPEC, EXPERTS, OUTPUTS, WIDTH), activation(1, 1, 1, 1, WIDTH, dtype=dtype)
    indices = mx.array([[[4, 0, 5]]], mx.uint32)
    with running(dialect):
        y = gather_matmul(x, weight, indices)
        mx.eval(y)
    assert_close(y, expected(x, weight, indices), dtype)


@pytest.mark.parametrize("dialect", dialects())
def test_each_expert_has_an_activation_of_its_own(dialect):
    """The down projection of a decode step."""
    weight, x = packed(SPEC, EXPERTS, OUTPUTS, WIDTH), activation(2, 3, 1, WIDTH)
    indices = mx.array([[4, 0, 5], [4, 4, 1]], mx.int32)
    with running(dialect):
        y = gather_matmul(x, weight, indices)
        mx.eval(y)
    assert_close(y, expected(x, weight, indices), mx.float32)


@pytest.mark.parametrize("dialect", dialects())
def test_a_small_batch_of_tokens(dialect):
    weight, x = packed(SPEC, EXPERTS, OUTPUTS, WIDTH), activation(3, 1, 1, 1, WIDTH)
    indices = mx.array([[[4, 0]], [[5, 5]], [[1, 2]]], mx.uint32)
    with running(dialect):
        y = gather_matmul(x, weight, indices)
        mx.eval(y)
    assert_close(y, expected(x, weight, indices), mx.float32)


@pytest.mark.parametrize("dialect", dialects())
def test_axes_that_broadcast_otherwise(dialect):
    weight, x = packed(SPEC, EXPERTS, OUTPUTS, WIDTH), activation(1, 3, 1, WIDTH)
    indices = mx.array([[4], [2]], mx.uint32)
    with running(dialect):
        y = gather_matmul(x, weight, indices)
        mx.eval(y)
    assert_close(y, expected(x, weight, mx.broadcast_to(indices, (2, 3))), mx.float32)


AXES = {
    "code": CODES,
    "group": [16, 32, 64, 128],
    "layout": ["float16", "log8"],
    "dtype": [mx.float16, mx.bfloat16, mx.float32],
    "rows": [1, 2, 4],
    "outputs": [(7,), (70,), (7, 70), (70, 24)],
    "tile": [0, 128],
    "launch": [None, Launch(2, 2, 4), Launch(8, 1, 4)],
}


def check(dialect, code, group, layout, dtype, rows, outputs, tile, launch, width=384):
    """``rows`` activations, two experts for each; of one stack or of two together."""
    spec = spec_of(code, group_size=group, scale_layout=layout, tile=tile)
    weights = [packed(spec, 3, n, width, seed=i) for i, n in enumerate(outputs)]
    x = activation(rows, width, dtype=dtype)
    experts = [2, 0, 1, 1, 0, 2, 2, 2][: 2 * rows]
    chosen = mx.array(experts, mx.uint32)
    with running(dialect):
        if len(weights) == 1:
            products = [gather_matvec(x, weights[0], chosen, dialect, launch=launch)]
        else:
            products = joint_gather(x, weights, chosen, dialect, launch=launch)
        mx.eval(products)
    for y, weight in zip(products, weights, strict=True):
        assert y.shape == (2 * rows, weight.shape[1])
        for i, expert in enumerate(experts):
            assert_product(y[i], x[i // 2], weight.expert(expert))


@pytest.mark.parametrize("dialect", dialects())
@pytest.mark.parametrize("case", list(all_pairs(**AXES)), ids=name_of)
def test_every_two_properties_of_experts_together(dialect, case):
    check(dialect, **case)


@pytest.mark.heavy
@pytest.mark.parametrize("dialect", dialects())
@pytest.mark.parametrize("code", CODES, ids=str)
def test_all_properties_of_experts_together(dialect, code):
    for case in each_of_all(AXES, "group", "layout", "dtype", "outputs"):
        check(dialect, **{**case, "code": code})


@pytest.mark.parametrize("dialect", dialects())
@pytest.mark.parametrize("bits, group, width", [(2, 32, 96), (3, 64, 576), (4, 16, 2048)])
def test_scalar_codes(dialect, bits, group, width):
    weight = packed(QuantSpec(bits=bits, group_size=group), 3, 37, width)
    x, indices = activation(2, width), mx.array([2, 0, 1, 1], mx.uint32)
    with running(dialect):
        y = gather_matvec(x, weight, indices, dialect)
        mx.eval(y)
    rows = mx.repeat(x, 2, axis=0)[:, None]
    assert_close(y, expected(rows, weight, indices)[:, 0], mx.float32)


@pytest.mark.parametrize("dialect", dialects())
def test_experts_with_many_outputs(dialect):
    """Enough of them for a warp to compute several together."""
    weight, x = packed(SPEC, 3, 150, WIDTH), activation(1, WIDTH, dtype=mx.float16)
    with running(dialect):
        y = gather_matvec(x, weight, mx.array([2, 0], mx.uint32), dialect)
        mx.eval(y)
    assert_close(y, expected(x, weight, mx.array([2, 0]))[:, 0], mx.float16)


def test_no_other_expert_is_read():
    """The scales of the others are not numbers, so whatever touches them shows."""
    weight = packed(QuantSpec(bits=3, group_size=64), EXPERTS, OUTPUTS, WIDTH)
    named = np.array(weight.scales.astype(mx.float32))
    named[[0, 2, 3]] = np.nan
    weight.scales = mx.array(named.astype(np.float16))
    x = activation(1, WIDTH)
    with running(dialects()[0]):
        y = gather_matvec(x, weight, mx.array([1, 5, 4], mx.uint32), dialects()[0])
        mx.eval(y)
    assert mx.isfinite(y).all()


@pytest.mark.parametrize("dialect", dialects())
@pytest.mark.parametrize("shape", [(13, 1), (5, 3)])
def test_many_rows_go_through_decoded_experts(dialect, shape, monkeypatch):
    monkeypatch.setitem(GATHER_PER_EXPERT, dialect, 2.0)
    assert gather_entries(dialect, EXPERTS) == 12
    weight = packed(SPEC, EXPERTS, OUTPUTS, WIDTH)
    x = activation(*shape, WIDTH)
    indices = mx.sort(mx.array(np.random.default_rng(0).integers(0, EXPERTS, shape[0])))
    with running(dialect):
        y = gather_matmul(x, weight, indices, sorted_indices=True)
        mx.eval(y)
    want = expected(x, weight, indices)
    # a GPU may multiply float32 in TF32
    bound = 2.0**-10 if ON_GPU else 2e-6
    assert np.linalg.norm(as_double(y) - want) <= bound * np.linalg.norm(want)


@pytest.mark.parametrize("dialect", dialects())
def test_the_sketch_of_the_residual_counts(dialect):
    spec = QuantSpec(bits=3, group_size=64, rotation_block=64, qjl=True)
    weight, x = packed(spec, EXPERTS, OUTPUTS, WIDTH), activation(1, 1, 1, WIDTH)
    indices = mx.array([[4, 0, 5]], mx.uint32)
    with running(dialect):
        y = gather_matmul(x, weight, indices)
        fast = gather_matmul(x, weight, indices, use_qjl=False)
        mx.eval(y, fast)
    assert_close(y, expected(x, weight, indices), mx.float32)
    assert_close(fast, expected(x, weight, indices, use_qjl=False), mx.float32)


def test_the_reference_agrees():
    weight, x = packed(SPEC, EXPERTS, OUTPUTS, WIDTH), activation(2, 3, 1, WIDTH)
    indices = mx.array([[4, 0, 5], [4, 4, 1]], mx.int32)
    want = expected(x, weight, indices)
    error = np.linalg.norm(as_double(portable_gather(x, weight, indices)) - want)
    assert error <= (2.0**-10 if ON_GPU else 2e-6) * np.linalg.norm(want)


def test_stacks_that_cannot_be_multiplied_together():
    spec = QuantSpec(bits=3, group_size=64)
    one = packed(spec, EXPERTS, 8, 128)
    assert why_not_jointly([one, packed(spec, EXPERTS, 24, 128)]) == ""
    assert "3 weights" in why_not_jointly([one] * 3)
    assert "different kinds" in why_not_jointly([one, packed(spec, EXPERTS + 1, 8, 128)])
    assert "different kinds" in why_not_jointly([one, packed(spec, EXPERTS, 8, 192)])
    assert "different kinds" in why_not_jointly([one, packed(spec, 8, 128)])


def test_few_pairs():
    x = mx.zeros((1, 1, 1, 1, 64))
    most = gather_entries("cuda", 128)
    assert are_few(x, mx.zeros((1, 1, 8), mx.uint32), 2, "cuda"), "what a token routes to"
    assert are_few(x, mx.zeros((1, most), mx.uint32), 128, "cuda")
    assert not are_few(x, mx.zeros((1, most + 1), mx.uint32), 128, "cuda")
    together = mx.zeros((2, 3, 64))
    assert not are_few(together, mx.zeros((2,), mx.uint32), 128, "cuda"), "rows that share experts"
    assert not are_few(mx.zeros((0, 1, 64)), mx.zeros((0,), mx.uint32), 128, "cuda")


@pytest.mark.parametrize("dialect", dialects())
@pytest.mark.parametrize("kinds", ["alike", "different"])
def test_gate_and_up_are_multiplied_together(dialect, kinds):
    """Where that is possible; either way the outputs are those of the layers alone."""
    pytest.importorskip("threadpoolctl")  # of the layers' CPU back-end
    from turboquant_mlx.layers.switch import TurboQuantSwitchLinear

    spec = SPEC.with_(window_bits=8, rotation_block=64)
    other = spec if kinds == "alike" else spec.with_(bits=4, window_bits=8)
    group = RotationGroup(WIDTH, 64)
    layers, weights = [], []
    for i, kind in enumerate((spec, other)):
        weight = packed(kind, EXPERTS, 8 + 8 * i, WIDTH, seed=i)
        layer = TurboQuantSwitchLinear(kind, weight.shape, group=group, leads=not i, bias=i == 1)
        layer.codes, layer.scales, layer.table = weight.codes, weight.scales, weight.table
        layers.append(layer.eval())
        weights.append(weight)
    x = activation(2, 1, 1, WIDTH)
    rotated = rotate(x, 64)
    launches: list[str] = []
    with running(dialect), counting(launches):
        # the same activation may meet other experts afterwards
        for indices in (mx.array([[4, 0], [1, 5]]), mx.array([[3, 3], [2, 0]])):
            outputs = [layer(x, indices) for layer in layers]
            mx.eval(outputs)
            for y, weight in zip(outputs, weights, strict=True):
                assert_close(y, expected(rotated, weight, indices), mx.float32)
    joint = ["turboquant_rotate", "turboquant_joint_gather2"]
    apart = ["turboquant_rotate", *["turboquant_gather_matvec"] * 2]
    # on a GPU they are traced once and then replayed, without Python
    times = 1 if ON_GPU else 2
    assert launches == times * (joint if kinds == "alike" else apart)

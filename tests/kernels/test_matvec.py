"""Packed weights times a few activations, in a kernel: the same as by the decoded weight."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from kernel_cases import (
    CODES,
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
from turboquant_mlx.kernels.matmul import packed_matmul
from turboquant_mlx.kernels.matvec import (
    JOINT_MATVEC,
    MATVEC,
    gather_matvec,
    joint_matvec,
    matvec,
    plan,
    why_not_jointly,
)
from turboquant_mlx.kernels.selection import Launch
from turboquant_mlx.kernels.unpack import why_no_kernel
from turboquant_mlx.layers.rotation_group import RotationGroup
from turboquant_mlx.quant.rotation import rotate
from turboquant_mlx.quant.spec import QuantSpec

WIDTH = 384
AXES = {
    "code": CODES,
    "group": [16, 32, 64, 128, 192, WIDTH],
    "layout": ["float16", "log8"],
    "tile": [0, 96],
    "dtype": [mx.float16, mx.bfloat16, mx.float32],
    "rows": [1, 2, 3, 4, 5, 8],
    "outputs": [1, 7, 70],
    # two outputs or more, of 16 bits, are multiplied by the matrix units on CUDA
    "launch": [None, Launch(2, 2, 4), Launch(4, 4, 4), Launch(8, 1, 4)],
}


def check(dialect, code, group, layout, tile, dtype, rows, outputs, launch=None, width=WIDTH):
    spec = spec_of(code, group_size=group, scale_layout=layout, tile=tile)
    weight = packed(spec, outputs, width)
    x = activation(rows, width, dtype=dtype)
    with running(dialect):
        y = matvec(x, weight, dialect, launch=launch)
        mx.eval(y)
    assert_product(y, x, weight)


@pytest.mark.parametrize("dialect", dialects())
@pytest.mark.parametrize("case", list(all_pairs(**AXES)), ids=name_of)
def test_every_two_properties_of_a_weight_together(dialect, case):
    check(dialect, **case)


@pytest.mark.heavy
@pytest.mark.parametrize("dialect", dialects())
@pytest.mark.parametrize("code", CODES, ids=str)
def test_all_properties_of_a_weight_together(dialect, code):
    for case in each_of_all(AXES, "group", "layout", "dtype", "rows"):
        check(dialect, **{**case, "code": code})


DEFAULT = {"code": (3, 8), "layout": "log8", "tile": 0}


@pytest.mark.parametrize("dialect", dialects())
@pytest.mark.parametrize(
    "outputs, width, group",
    [
        pytest.param(576, 1536, 768, marks=pytest.mark.heavy),
        pytest.param(1536, 576, 192, marks=pytest.mark.heavy),
        (48, 1536, 768),
        (96, 576, 192),
        (64, 4096, 1024),
        pytest.param(24, 14336, 1024, marks=pytest.mark.heavy),
        (9, 2880, 64),
    ],
)
def test_shapes_of_real_models(dialect, outputs, width, group):
    shape = {"outputs": outputs, "width": width, "group": group}
    check(dialect, **DEFAULT, **shape, dtype=mx.float16, rows=1)
    check(dialect, **DEFAULT, **shape, dtype=mx.bfloat16, rows=4)


@pytest.mark.parametrize("dialect", dialects())
@pytest.mark.parametrize("width, group", [(8, 8), (24, 8), (40, 40), (72, 24)])
def test_rows_that_end_within_a_word(dialect, width, group):
    check(dialect, (3, 3), group, "float16", 0, mx.float32, rows=2, outputs=5, width=width)


@pytest.mark.parametrize("dialect", dialects())
@pytest.mark.parametrize("width, group", [(16, 16), (20, 20), (36, 36), (48, 16), (640, 128)])
def test_rows_that_end_within_a_word_of_ternary_digits(dialect, width, group):
    for dtype in (mx.float32, mx.bfloat16):
        check(dialect, "ternary", group, "float16", 0, dtype, rows=3, outputs=5, width=width)


@pytest.mark.parametrize("dialect", dialects())
@pytest.mark.parametrize("width", [32, 96])
def test_the_last_windows_of_a_row_reach_its_beginning(dialect, width):
    check(dialect, (3, 8), width, "log8", 0, mx.float32, rows=1, outputs=3, width=width)
    check(dialect, (2, 8), 16, "log8", 32, mx.float32, rows=1, outputs=3, width=width)


@pytest.mark.parametrize("dialect", dialects())
@pytest.mark.parametrize(
    "launch", [Launch(1, 8, 8), Launch(2, 4, 4), Launch(8, 1, 1), Launch(4, 2, 8), Launch(16, 1, 2)]
)
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_any_launch_gives_the_result(dialect, launch, rows, dtype):
    spec = QuantSpec(bits=3, window_bits=8, group_size=1024, scale_layout="log8")
    weight, x = packed(spec, 37, 4096), activation(rows, 4096, dtype=dtype)
    with running(dialect):
        y = matvec(x, weight, dialect, launch=launch)
        mx.eval(y)
    assert_product(y, x, weight)


@pytest.mark.parametrize("dialect", dialects())
def test_an_activation_may_begin_anywhere_in_memory(dialect):
    weight = packed(QuantSpec(bits=4, group_size=32), 9, 64)
    x = activation(1, 67, dtype=mx.float16).reshape(-1)
    mx.eval(x)
    with running(dialect):
        for launch in (None, Launch(2, 1, 4)):
            y = matvec(x[3:], weight, dialect, launch=launch)
            mx.eval(y)
            assert_product(y, x[3:], weight)
        ternary = packed(QuantSpec(code="ternary", group_size=32), 9, 64)
        for start in (1, 3):
            y = matvec(x[start : start + 64], ternary, dialect)
            mx.eval(y)
            assert_product(y, x[start : start + 64], ternary)


@pytest.mark.parametrize("dialect", dialects())
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e30])
def test_levels_of_any_size(dialect, size):
    """The matrix units take levels of 16 bits, and float16 would not reach these."""
    weight = packed(QuantSpec(bits=3, window_bits=8, group_size=64), 16, 192)
    weight.table = weight.table * size
    x = activation(1, 192, dtype=mx.float16)
    with running(dialect):
        y = matvec(x, weight, dialect, dtype=mx.float32, launch=Launch(8, 1, 4))
        mx.eval(y)
    expected = as_double(x) @ dense(weight).T
    assert np.linalg.norm(as_double(y) - expected) <= 2.0**-11 * np.linalg.norm(expected)


@pytest.mark.parametrize("dialect", dialects())
def test_large_activations_do_not_overflow(dialect):
    """bfloat16 reaches further than float16, and so must every step in between."""
    weight = packed(QuantSpec(bits=3, window_bits=8, group_size=64), 5, 64)
    x = activation(2, 64, dtype=mx.bfloat16) * 1e6
    with running(dialect):
        y = packed_matmul(x, weight)
        mx.eval(y)
    assert_close(y, as_double(x) @ dense(weight).T, mx.bfloat16)


@pytest.mark.parametrize("dialect", dialects())
@pytest.mark.parametrize("shape", [(64,), (1, 1, 64), (2, 3, 64)])
def test_leading_axes_are_kept(dialect, shape):
    weight = packed(QuantSpec(bits=2, group_size=32), 11, 64)
    x = activation(*shape)
    with running(dialect):
        y = packed_matmul(x, weight)
        mx.eval(y)
    assert_close(y, as_double(x) @ dense(weight).T, mx.float32)


@pytest.mark.parametrize("dialect", dialects())
@pytest.mark.parametrize("rows", [1, 3])
def test_the_sketch_of_the_residual_counts(dialect, rows):
    spec = QuantSpec(bits=3, group_size=64, rotation_block=64, qjl=True)
    weight, x = packed(spec, 10, 192), activation(rows, 192)
    with running(dialect):
        whole, fast = packed_matmul(x, weight), packed_matmul(x, weight, use_qjl=False)
        mx.eval(whole, fast)
    assert_close(whole, as_double(x) @ dense(weight).T, mx.float32)
    assert_close(fast, as_double(x) @ dense(weight, use_qjl=False).T, mx.float32)


def test_an_activation_of_another_width_is_refused():
    spec = QuantSpec(bits=3, group_size=64)
    weight, stack = packed(spec, 10, 192), packed(spec, 2, 10, 192)
    with pytest.raises(ValueError, match="width 192"):
        matvec(activation(1, 128), weight, "metal")
    with pytest.raises(ValueError, match="width 192"):
        gather_matvec(activation(1, 128), stack, mx.array([0]), "metal")


@pytest.mark.parametrize(
    "spec, width, reason",
    [
        (QuantSpec(code="ternary", group_size=8), 128, "ternary digits in groups of 8"),
        (QuantSpec(bits=3, window_bits=13, group_size=64), 128, "window of 13 bits"),
        (QuantSpec(bits=3, group_size=4), 12, "width of 12"),
        (QuantSpec(bits=3, window_bits=8, group_size=16), 48, "end within a word"),
        (QuantSpec(bits=8, window_bits=8, tile=4, group_size=16), 64, "tiles of 4"),
    ],
)
def test_what_kernels_cannot_read_goes_the_portable_way(spec, width, reason):
    weight, x = packed(spec, 6, width), activation(2, width)
    assert reason in why_no_kernel(weight)
    with running(dialects()[0]):
        y = packed_matmul(x, weight)
        mx.eval(y)
    expected = as_double(x) @ dense(weight).T
    assert mx.allclose(y, mx.array(expected.astype("float32")), rtol=1e-2, atol=1e-2)


on_cuda = pytest.mark.skipif("cuda" not in dialects(), reason="a body for CUDA alone")

# Matrix units that multiply tiles of sixteen outputs by all rows of activations.
TILES = [
    # code, group, layout, tile, dtype, rows, outputs, launch, width
    ((3, 8), 128, "log8", 0, mx.float16, 8, 37, Launch(16, 1, 2), 384),
    ((3, 8), 384, "float16", 0, mx.bfloat16, 5, 70, Launch(32, 2, 4), 384),
    ((3, 8), 64, "log8", 96, mx.float16, 3, 7, Launch(16, 8, 8), 384),
    ((3, 8), 1024, "log8", 0, mx.float16, 6, 16, Launch(16, 4, 4), 2048),
    ((2, 8), 32, "log8", 96, mx.float16, 3, 70, Launch(32, 4, 4), 384),
    ((4, 8), 1024, "log8", 0, mx.bfloat16, 8, 33, Launch(32, 1, 1), 2048),
    ((3, 3), 64, "float16", 0, mx.bfloat16, 5, 37, Launch(16, 2, 4), 320),
    ((3, 3), 128, "log8", 0, mx.float16, 8, 100, Launch(64, 2, 4), 384),
    ((3, 3), 32, "float16", 0, mx.float16, 7, 1, Launch(16, 1, 4), 96),
    ((2, 2), 64, "float16", 0, mx.float16, 4, 40, Launch(32, 1, 2), 192),
    ((4, 4), 384, "log8", 0, mx.float16, 2, 17, Launch(16, 4, 8), 384),
    ((1, 1), 64, "log8", 0, mx.bfloat16, 1, 50, Launch(16, 8, 8), 384),
]


@on_cuda
@pytest.mark.parametrize("case", TILES, ids=lambda case: "-".join(map(str, case)))
def test_tiles_of_outputs_by_all_rows_of_activations(case):
    code, group, layout, tile, dtype, rows, outputs, launch, width = case
    launches: list[str] = []
    with counting(launches):
        check("cuda", code, group, layout, tile, dtype, rows, outputs, launch, width)
    assert launches == [MATVEC.tensor_rows.name]


@on_cuda
@pytest.mark.parametrize(
    "code, rows, outputs, launch",
    [
        ((3, 8), 5, (70, 9), Launch(16, 2, 4)),
        ((3, 3), 8, (8, 200, 8), Launch(32, 1, 2)),
        ((4, 4), 3, (64, 16, 133), None),
    ],
)
def test_tiles_of_matrices_that_read_one_input(code, rows, outputs, launch):
    launches: list[str] = []
    with counting(launches):
        check_together("cuda", code, 128, "log8", mx.bfloat16, rows, outputs, launch)
    assert launches == [JOINT_MATVEC[len(outputs)].tensor_rows.name]


@on_cuda
def test_tiles_of_experts():
    """Not by themselves, for an expert has one row; but a launch may say so."""
    stack = packed(QuantSpec(bits=3, window_bits=8, group_size=128), 3, 40, 384)
    experts = mx.array([2, 0], mx.uint32)
    x = activation(2, 384, dtype=mx.float16)
    with running("cuda"):
        y = gather_matvec(x, stack, experts, "cuda", launch=Launch(16, 2, 4))
        mx.eval(y)
    weights = dense(stack)
    expected = np.stack([as_double(x)[i] @ weights[e].T for i, e in enumerate((2, 0))])
    typical = np.linalg.norm(weights[[2, 0]]) * np.linalg.norm(as_double(x)) / 384**0.5
    assert np.linalg.norm(as_double(y) - expected) <= 2.0**-10 * typical


@on_cuda
def test_tiles_of_activations_that_begin_anywhere_in_memory():
    weight = packed(QuantSpec(bits=4, group_size=64), 9, 64)
    x = activation(1, 3 * 64 + 3, dtype=mx.float16).reshape(-1)
    mx.eval(x)
    rows = x[3:].reshape(3, 64)
    with running("cuda"):
        y = matvec(rows, weight, "cuda", launch=Launch(16, 1, 4))
        mx.eval(y)
    assert_product(y, rows, weight)


@on_cuda
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e30])
def test_tiles_take_levels_of_any_size(size):
    weight = packed(QuantSpec(bits=3, window_bits=8, group_size=64), 16, 192)
    weight.table = weight.table * size
    x = activation(4, 192, dtype=mx.float16)
    with running("cuda"):
        y = matvec(x, weight, "cuda", dtype=mx.float32, launch=Launch(16, 2, 4))
        mx.eval(y)
    expected = as_double(x) @ dense(weight).T
    assert np.linalg.norm(as_double(y) - expected) <= 2.0**-11 * np.linalg.norm(expected)


def body_of(code, rows, dtype=mx.float16, dialect="cuda", launch=None, **more) -> str:
    spec = spec_of(code, **{"group_size": 64, **more})
    return plan(spec, (4096,), 4096, rows, dtype, dtype, dialect, launch).body


def test_several_rows_go_through_tiles_where_these_can_be():
    for code in ((2, 2), (3, 3), (3, 8), (4, 8)):
        assert [body_of(code, rows) for rows in (1, 2, 3, 8)] == [
            *["tensor"] * 2,
            *["tensor_rows"] * 2,
        ]
        assert body_of(code, 8, mx.float32) == "multiply"
        assert body_of(code, 8, dialect="metal") == "multiply"
        assert body_of(code, 8, group_size=16) == "multiply"  # four lanes have two scales
        assert body_of(code, 8, launch=Launch(8, 1, 4)) == "tensor"
        assert body_of(code, 1, launch=Launch(16, 1, 4)) == "tensor_rows"
    assert body_of((5, 5), 8) == body_of((3, 12), 8) == "multiply"
    assert body_of("ternary", 8) == "ternary"


def test_a_group_is_scaled_once_where_no_warp_gets_more_to_do_for_it():
    def span(width, split):
        spec = QuantSpec(bits=3, window_bits=8, group_size=1024)
        launch = Launch(16, split, 8)
        made = plan(spec, (64,), width, 8, mx.float16, mx.float16, "cuda", launch)
        return dict(made.template)["SPAN"]

    # steps of 4 x 32 weights, eight to a group
    assert [span(4096, split) for split in (1, 4, 8)] == [4, 4, 4]
    assert span(2048, 8) == 2
    assert span(1024, 8) == 1
    assert span(15360, 8) == 1  # 120 steps, 15 of each warp


TOGETHER = {
    "code": [(2, 2), (3, 3), (5, 5), (3, 8), (4, 8), "ternary"],
    "group": [32, 64, 128],
    "layout": ["float16", "log8"],
    "dtype": [mx.float16, mx.bfloat16, mx.float32],
    "rows": [1, 3, 8],
    "outputs": [(70, 9), (64, 16, 133), (8, 200, 8)],
    "launch": [None, Launch(2, 2, 4)],
}


def check_together(dialect, code, group, layout, dtype, rows, outputs, launch):
    spec = spec_of(code, group_size=group, scale_layout=layout)
    weights = [packed(spec, n, 384, seed=i) for i, n in enumerate(outputs)]
    x = activation(1, rows, 384, dtype=dtype)
    assert why_not_jointly(weights) == ""
    with running(dialect):
        products = joint_matvec(x, weights, dialect, launch=launch)
        mx.eval(products)
    for y, weight in zip(products, weights, strict=True):
        assert_product(y, x, weight)


@pytest.mark.parametrize("dialect", dialects())
@pytest.mark.parametrize("case", list(all_pairs(**TOGETHER)), ids=name_of)
def test_matrices_that_read_one_input_are_multiplied_together(dialect, case):
    check_together(dialect, **case)


@pytest.mark.heavy
@pytest.mark.parametrize("dialect", dialects())
@pytest.mark.parametrize("code", TOGETHER["code"], ids=str)
def test_all_properties_of_matrices_together(dialect, code):
    for case in each_of_all(TOGETHER, "group", "layout", "dtype", "rows"):
        check_together(dialect, **{**case, "code": code})


def test_matrices_that_cannot_be_multiplied_together():
    spec = QuantSpec(bits=3, group_size=64)
    one = packed(spec, 8, 128)
    assert "1 weights" in why_not_jointly([one])
    assert "4 weights" in why_not_jointly([one] * 4)
    assert "different kinds" in why_not_jointly([one, packed(spec.with_(bits=4), 8, 128)])
    assert "too small" in why_not_jointly([one, packed(spec, 1, 128)])


@pytest.mark.parametrize("dialect", dialects())
@pytest.mark.parametrize("kinds", ["alike", "different"])
def test_layers_of_a_group_are_multiplied_together(dialect, kinds):
    """Where that is possible; either way the outputs are those of the layers alone."""
    pytest.importorskip("threadpoolctl")  # of the layers' CPU back-end
    from turboquant_mlx.layers.linear import TurboQuantLinear

    spec = QuantSpec(bits=3, window_bits=8, group_size=64, rotation_block=64)
    other = spec if kinds == "alike" else spec.with_(bits=4, window_bits=8)
    group = RotationGroup(192, 64)
    layers, expected = [], []
    x = activation(1, 1, 192)
    for i, (kind, outputs) in enumerate([(spec, 24), (other, 8), (spec, 40)]):
        weight = packed(kind, outputs, 192, seed=i)
        layer = TurboQuantLinear(kind, (outputs, 192), group=group, leads=not i, bias=i == 1)
        layer.codes, layer.scales, layer.table = weight.codes, weight.scales, weight.table
        layers.append(layer.eval())
        expected.append(as_double(rotate(x, 64)) @ dense(weight).T)
    launches: list[str] = []
    with running(dialect), counting(launches):
        mx.eval([layer(x) for layer in layers])
        # arrays that are replaced after a first call count
        layers[2].scales = weight.scales * 0.5
        expected[2] = expected[2] * 0.5
        outputs = [layer(x) for layer in layers]
        mx.eval(outputs)
    for y, want in zip(outputs, expected, strict=True):
        assert_close(y, want, mx.float32)
    joint = ["turboquant_rotate", "turboquant_joint_matvec3"]
    apart = ["turboquant_rotate", *["turboquant_matvec"] * 3]
    assert launches == 2 * (joint if kinds == "alike" else apart)

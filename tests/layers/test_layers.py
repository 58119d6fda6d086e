"""TurboQuant layers against the dense weight that they stand for, on every path they can take."""

from __future__ import annotations

import copy
import gc
import threading

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from turboquant_mlx.kernels import gather, matmul
from turboquant_mlx.kernels.cpu_matrix import CpuMatrix
from turboquant_mlx.kernels.dispatch import force_backend
from turboquant_mlx.layers import cpu, rotation_group
from turboquant_mlx.layers.linear import TurboQuantLinear
from turboquant_mlx.layers.rotation_group import RotationGroup
from turboquant_mlx.layers.switch import TurboQuantSwitchLinear
from turboquant_mlx.quant.spec import QuantSpec
from turboquant_mlx.quant.weight import dequantize_weight, quantize_weight

SPECS = [
    QuantSpec(bits=2, group_size=32, rotation_block=96),
    QuantSpec(bits=3, group_size=64, rotation_block=192),
    QuantSpec(bits=4, group_size=64, rotation_block=64, scale_layout="log8"),
    QuantSpec(bits=8, group_size=16, rotation_block=1),
    QuantSpec(code="ternary", group_size=32, rotation_block=12),
    QuantSpec(bits=3, window_bits=8, group_size=192, rotation_block=192, scale_layout="log8"),
    QuantSpec(bits=2, window_bits=8, group_size=96, rotation_block=96, tile=96),
    QuantSpec(bits=3, group_size=64, rotation_block=192, qjl=True),
]
IDS = ["2-bit", "3-bit", "4-bit log8", "8-bit", "ternary", "trellis", "trellis tiles", "qjl"]
WIDTH = 192
TOLERANCE = 2e-5  # relative to the largest output; float32 sums in another order


def random(*shape, seed=0, dtype=mx.float32):
    return mx.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32), dtype)


def make(spec, shape, *, bias=False, group=None, leads=True, seed=0):
    """(layer, dense weight) of random values."""
    group = group or RotationGroup(shape[-1], spec.rotation_block)
    packed = quantize_weight(random(*shape, seed=seed), spec)
    kind = TurboQuantLinear if len(shape) == 2 else TurboQuantSwitchLinear
    layer = kind(spec, shape, group=group, leads=leads, bias=bias)
    arrays = packed.arrays()
    if not leads:
        arrays = {k: v for k, v in arrays.items() if not k.endswith("multiplier")}
    if bias:
        arrays["bias"] = random(*shape[:-1], seed=seed + 1)
    layer.load_weights(list(arrays.items()), strict=True)
    return layer, dequantize_weight(packed)


def close(got, expected, tolerance=TOLERANCE):
    error = mx.abs(got.astype(mx.float32) - expected).max() / mx.abs(expected).max()
    return error.item() < tolerance


@pytest.fixture(params=["cpu", "portable"])
def backend(request):
    with force_backend(request.param):
        yield request.param


@pytest.mark.parametrize("spec", SPECS, ids=IDS)
def test_linear_equals_its_dense_weight(spec, backend):
    layer, weight = make(spec, (40, WIDTH), bias=True)
    x = random(2, 3, WIDTH, seed=9)
    assert close(layer(x), x @ weight.T + layer.bias)


@pytest.mark.parametrize("spec", SPECS, ids=IDS)
def test_experts_equal_their_dense_weights(spec, backend):
    layer, weight = make(spec, (5, 24, WIDTH), bias=True)
    x = random(2, 3, 1, 1, WIDTH, seed=9)
    indices = mx.array(np.random.default_rng(1).integers(0, 5, (2, 3, 2)))
    expected = x @ weight[indices].swapaxes(-1, -2) + layer.bias[indices][..., None, :]
    assert close(layer(x, indices), expected)


def test_experts_sorted_for_a_long_prompt(backend):
    layer, weight = make(SPECS[1], (5, 24, WIDTH))
    x, indices = random(70, 1, WIDTH, seed=9), mx.sort(mx.arange(70) % 5)
    expected = x @ weight[indices].swapaxes(-1, -2)
    assert close(layer(x, indices, sorted_indices=True), expected)


def test_many_experts_are_decoded_in_bounded_blocks(monkeypatch):
    layer, weight = make(SPECS[1], (5, 24, WIDTH))
    x, indices = random(70, 1, WIDTH, seed=9), mx.arange(70) % 5
    monkeypatch.setattr(gather, "EXPERT_BLOCK_BYTES", 2 * 24 * WIDTH * 4)
    with force_backend("portable"):
        y = layer(x, indices)
    assert close(y, x @ weight[indices].swapaxes(-1, -2))


def test_many_rows_are_decoded_in_bounded_blocks(monkeypatch):
    layer, weight = make(SPECS[1], (40, WIDTH))
    x = random(3, WIDTH, seed=9)
    monkeypatch.setattr(matmul, "BLOCK_BYTES", 7 * WIDTH * 4)
    with force_backend("portable"):
        assert close(layer(x), x @ weight.T)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
def test_the_dtype_is_kept(dtype, backend):
    linear, weight = make(SPECS[1], (40, WIDTH), bias=True)
    x = random(4, WIDTH, seed=9).astype(dtype)
    y = linear(x)
    assert y.dtype == dtype
    assert close(y, x.astype(mx.float32) @ weight.T + linear.bias, 0.03)
    experts, _ = make(SPECS[1], (5, 24, WIDTH), bias=True)
    assert experts(x[:, None], mx.array([0, 1, 2, 4])).dtype == dtype


def test_one_row_and_no_row(backend):
    layer, weight = make(SPECS[1], (33, WIDTH))
    x = random(1, WIDTH, seed=3)
    assert close(layer(x), x @ weight.T)
    assert layer(mx.zeros((0, WIDTH))).shape == (0, 33)


# MLX compiles a program for each: one by default, with what all have in common
@pytest.mark.parametrize(
    "spec",
    [pytest.param(s, marks=[pytest.mark.heavy] if s is not SPECS[1] else []) for s in SPECS],
    ids=IDS,
)
def test_works_inside_compile(spec):
    layer, weight = make(spec, (40, WIDTH))
    x = random(4, WIDTH, seed=9)
    assert close(mx.compile(layer)(x), x @ weight.T)


def test_gradients_with_respect_to_the_input(backend):
    layer, weight = make(SPECS[1], (40, WIDTH))
    x = random(4, WIDTH, seed=9)
    got = mx.grad(lambda a: (layer(a) ** 2).sum())(x)
    assert close(got, mx.grad(lambda a: ((a @ weight.T) ** 2).sum())(x), 1e-4)


def test_nothing_of_a_packed_layer_is_trainable():
    layer, _ = make(SPECS[1], (40, WIDTH), bias=True)
    assert tree_flatten(layer.trainable_parameters()) == []


def test_no_attribute_makes_mlx_lm_take_it_for_an_affine_layer():
    layer, _ = make(SPECS[1], (40, WIDTH))
    assert not hasattr(layer, "bits")


def test_skipping_the_sketch_changes_the_result_and_back(backend):
    layer, _ = make(SPECS[-1], (40, WIDTH))
    x = random(4, WIDTH, seed=9)
    full = layer(x)
    layer.use_qjl = False
    fast = layer(x)
    layer.use_qjl = True
    assert not close(fast, full, 1e-3)
    assert close(layer(x), full, 1e-6)


def test_new_weights_replace_an_expanded_copy():
    layer, weight = make(SPECS[1], (40, WIDTH), seed=0)
    other, other_weight = make(SPECS[1], (40, WIDTH), seed=5)
    x = random(4, WIDTH, seed=9)
    with force_backend("cpu"):
        assert close(layer(x), x @ weight.T)
        layer.load_weights(tree_flatten(other.parameters()))
        assert close(layer(x), x @ other_weight.T)


def test_a_deep_copy_works_on_its_own(backend):
    layer, weight = make(SPECS[-1], (40, WIDTH))
    x = random(4, WIDTH, seed=9)
    layer(x)
    clone = copy.deepcopy(layer)
    assert clone.group is not layer.group
    assert clone.group.leader is clone
    assert close(clone(x), x @ weight.T)


# --- rotation groups ---------------------------------------------------------------------------


@pytest.fixture
def rotations(monkeypatch):
    """Counts the rotations that are computed."""
    count = []
    real = rotation_group.rotate
    monkeypatch.setattr(rotation_group, "rotate", lambda *a: count.append(1) or real(*a))
    return count


def three_layers():
    group = RotationGroup(WIDTH, 192)
    q = make(SPECS[1], (40, WIDTH), group=group)
    k = make(SPECS[1], (8, WIDTH), group=group, leads=False, seed=1)
    v = make(SPECS[1], (8, WIDTH), group=group, leads=False, seed=2)
    return group, q, k, v


def test_layers_of_a_group_rotate_their_input_once(rotations, backend):
    _, *layers = three_layers()
    for layer, _ in layers:
        layer.expanded.keep = False  # a weight that is kept on the CPU takes the input as it is
    for seed in range(3):
        x = random(4, WIDTH, seed=seed)
        for layer, weight in layers:
            assert close(layer(x), x @ weight.T)
    assert len(rotations) == 3


class Sum(nn.Module):
    """q x + sum(k x) + sum(v x)"""

    def __init__(self):
        super().__init__()
        _, *layers = three_layers()
        self.layers = [layer for layer, _ in layers]
        self.whole = mx.concatenate([weight for _, weight in layers])
        cpu.prepare(self, "always")

    def __call__(self, x):
        return mx.concatenate([layer(x) for layer in self.layers], axis=-1)


def test_a_joint_product_has_gradients_compiles_and_is_copied():
    model, x = Sum(), random(4, WIDTH, seed=9)
    with force_backend("cpu"):
        assert close(model(x), x @ model.whole.T)
        grad = mx.grad(lambda x: (model(x) ** 2).sum())(x)
        assert close(grad, 2 * (x @ model.whole.T) @ model.whole)
        assert close(mx.compile(model)(x), x @ model.whole.T)
        clone = copy.deepcopy(model)
        clone.layers[0].codes = mx.zeros_like(clone.layers[0].codes)
        assert close(model(x), x @ model.whole.T)
        assert not close(clone(x), x @ model.whole.T)


def test_on_the_cpu_kept_weights_of_a_group_are_multiplied_at_once(monkeypatch):
    _, *layers = three_layers()
    model = nn.Module()
    model.layers = [layer for layer, _ in layers]
    cpu.prepare(model, "always")
    products = []
    real = CpuMatrix.multiply
    monkeypatch.setattr(
        CpuMatrix, "multiply", lambda self, x: products.append(self.shape) or real(self, x)
    )
    with force_backend("cpu"):
        for seed in range(2):
            x = random(4, WIDTH, seed=seed)
            for layer, weight in layers:
                assert close(layer(x), x @ weight.T)
        assert products == [(56, WIDTH)] * 2
        other, weight = make(SPECS[1], (8, WIDTH), seed=7)
        layers[1][0].load_weights([("codes", other.codes), ("scales", other.scales)], strict=False)
        y = layers[1][0](random(4, WIDTH, seed=5))
        assert products[2:] == [(56, WIDTH)]
        assert not close(y, random(4, WIDTH, seed=5) @ layers[1][1].T, 0.1)  # new codes are used
    cpu.drop_expansions(model)
    assert layers[0][0].group.joint._expanded._matrix is None


def test_only_the_leader_stores_the_multiplier():
    _, (q, _), (k, _), _ = three_layers()
    assert "multiplier" in q.parameters()
    assert "multiplier" not in k.parameters()


def test_the_group_lets_go_of_its_input(backend):
    group, *layers = three_layers()
    x = random(4, WIDTH)
    for layer, _ in layers:
        layer(x)
    assert getattr(group._local, "held", None) is None


def test_another_input_at_the_address_of_the_last_one_is_not_mistaken_for_it(backend):
    _, (q, weight), _, _ = three_layers()
    for seed in range(20):
        x = random(4, WIDTH, seed=seed)
        assert close(q(x), x @ weight.T)
        del x
        gc.collect()


@pytest.mark.skipif(
    mx.default_device().type != mx.DeviceType.cpu, reason="a GPU stream belongs to one thread"
)
def test_threads_do_not_see_each_others_inputs():
    _, *layers = three_layers()
    wrong = []

    def work(seed):
        for i in range(10):
            x = random(4, WIDTH, seed=seed * 100 + i)
            for layer, weight in layers:
                if not close(layer(x), x @ weight.T):
                    wrong.append(seed)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_shape_is_no_part_of_the_module_tree():
    layer, _ = make(SPECS[1], (40, WIDTH))
    names = [name for name, _ in tree_flatten(layer.parameters())]
    assert names == ["codes", "scales", "table", "multiplier"]
    assert isinstance(layer, nn.Module)
    assert "shape=(40, 192)" in repr(layer)

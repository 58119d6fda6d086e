"""Quantizing and decoding whole weights."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from turboquant_mlx.errors import QuantizationError
from turboquant_mlx.quant import decode, encode, packed, viterbi
from turboquant_mlx.quant.rotation import random_signs, rotate
from turboquant_mlx.quant.spec import QuantSpec
from turboquant_mlx.quant.weight import (
    PackedWeight,
    dequantize_numpy,
    dequantize_rows,
    dequantize_weight,
    quantize_weight,
)

WIDTH = 576


def weight(*shape: int, seed: int = 0, size: float = 0.02) -> mx.array:
    values = np.random.default_rng(seed).standard_normal(shape) * size
    return mx.array(values.astype(np.float32)).astype(mx.bfloat16)


def relative_error(made: PackedWeight, w: mx.array, **options) -> float:
    exact = np.array(w.astype(mx.float32)).astype(np.float64)
    d = np.array(dequantize_weight(made, **options)) - exact
    return float((d * d).sum() / (exact * exact).sum())


def contents(made: PackedWeight) -> dict[str, bytes]:
    return {name: np.array(a).tobytes() for name, a in made.arrays().items()}


SPECS = [
    QuantSpec(bits=3, rotation_block=192),
    QuantSpec(bits=2, group_size=32, rotation_block=64),
    QuantSpec(bits=4, group_size=16, scale_layout="log8", rotation_block=12),
    QuantSpec(bits=1, rotation_block=1),
    QuantSpec(bits=5, group_size=192, rotation_block=192),
    QuantSpec(bits=8, rotation_block=64),
    QuantSpec(code="ternary", group_size=32, rotation_block=192),
    QuantSpec(code="ternary", scale_layout="log8", rotation_block=192),
    QuantSpec(bits=3, window_bits=8, group_size=192, rotation_block=192),
    QuantSpec(bits=2, window_bits=8, tile=64, scale_layout="log8", rotation_block=192),
    QuantSpec(bits=4, window_bits=8, group_size=576, rotation_block=192, qjl=True),
    QuantSpec(bits=3, rotation_block=192, qjl=True),
]


# --------------------------------------------------------------------------------------- quality


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        (QuantSpec(bits=1), 0.360),
        (QuantSpec(bits=2), 0.1115),
        (QuantSpec(bits=3), 0.0294),
        (QuantSpec(bits=4), 0.0070),
        (QuantSpec(bits=5), 0.00167),
        (QuantSpec(bits=6), 0.00042),
        (QuantSpec(bits=8), 3.2e-5),
        (QuantSpec(code="ternary"), 0.186),
        (QuantSpec(bits=2, group_size=32, scale_layout="log8"), 0.1053),
        (QuantSpec(bits=3, group_size=32, scale_layout="log8"), 0.0258),
        (QuantSpec(bits=4, group_size=32, scale_layout="log8"), 0.0061),
        (QuantSpec(bits=3, group_size=16, scale_layout="log8"), 0.0214),
        (QuantSpec(bits=3, qjl=True), 0.0170),
    ],
    ids=str,
)
def test_error_on_normal_weights(spec, error):
    w = weight(256, WIDTH)
    assert relative_error(quantize_weight(w, spec.with_(rotation_block=192)), w) < error


def test_the_rotation_spreads_outliers():
    w = np.array(weight(256, WIDTH).astype(mx.float32))
    w[:, 7] *= 30
    w = mx.array(w)
    rotated = relative_error(quantize_weight(w, QuantSpec(bits=3, rotation_block=192)), w)
    assert rotated < 0.032
    assert relative_error(quantize_weight(w, QuantSpec(bits=3)), w) > 2 * rotated


# ------------------------------------------------------------------------------ what is stored


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("shape", [(7, WIDTH), (3, 5, WIDTH)])
def test_shapes_dtypes_and_bytes(spec, shape):
    made = quantize_weight(weight(*shape), spec)
    lead = shape[:-1]
    assert made.spec is spec
    assert made.shape == shape
    assert made.codes.shape == (*lead, spec.words_per_row(WIDTH))
    assert made.codes.dtype == mx.uint32
    assert made.scales.shape == (*lead, WIDTH // spec.group_size)
    assert made.scales.dtype == (mx.float16 if spec.scale_layout == "float16" else mx.uint8)
    assert made.table.shape == (spec.table_size,)
    assert made.table.dtype == mx.float32
    assert made.multiplier.shape == (WIDTH,)
    assert made.multiplier.dtype == mx.float16
    names = {"codes", "scales", "table", "multiplier"}
    if spec.qjl:
        assert made.qjl_codes.shape == (*lead, WIDTH // 32)
        assert made.qjl_norms.shape == lead
        assert (made.qjl_codes.dtype, made.qjl_norms.dtype) == (mx.uint32, mx.float16)
        assert made.qjl_multiplier.dtype == mx.float16
        names |= {"qjl_codes", "qjl_norms", "qjl_multiplier"}
    assert set(made.arrays()) == names
    multipliers = 2 * WIDTH * (2 if spec.qjl else 1)
    assert made.nbytes == spec.packed_bytes(shape) + multipliers


@pytest.mark.parametrize("layout", ["float16", "log8"])
@pytest.mark.parametrize("size", [1e-6, 0.02, 3e4])
def test_the_table_carries_the_magnitude(layout, size):
    spec = QuantSpec(bits=3, rotation_block=192, scale_layout=layout)
    w = weight(8, WIDTH, size=size)
    made = quantize_weight(w, spec)
    scales = np.array(made.scales)
    largest = scales.max() if layout == "float16" else 2 ** ((scales.max() - 240.0) / 16)
    assert 0.5 < largest <= 1
    ratio = np.array(made.table) / np.array(quantize_weight(weight(8, WIDTH), spec).table)
    assert np.log2(ratio[0]) == np.round(np.log2(ratio[0]))
    assert relative_error(made, w) < 0.03


def test_powers_of_two_only_change_the_table():
    spec = QuantSpec(bits=3, rotation_block=192)
    w = weight(8, WIDTH)
    a, b = quantize_weight(w, spec), quantize_weight(w * 2.0**-20, spec)
    assert mx.array_equal(a.table * 2.0**-20, b.table)
    assert mx.array_equal(a.codes, b.codes)
    assert mx.array_equal(a.scales, b.scales)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_the_same_values_give_the_same_bytes_in_any_dtype(dtype):
    w = mx.round(weight(9, WIDTH, size=20).astype(mx.float32)) / 16  # exact in all of them
    spec = QuantSpec(bits=3, rotation_block=192)
    assert contents(quantize_weight(w.astype(dtype), spec)) == contents(quantize_weight(w, spec))


def test_the_weight_may_be_a_view():
    w = weight(20, 2 * WIDTH)
    spec = QuantSpec(bits=3, rotation_block=192)
    part = w[3:12, WIDTH:]
    copy = mx.array(np.array(part.astype(mx.float32)))
    assert contents(quantize_weight(part, spec)) == contents(quantize_weight(copy, spec))
    turned = weight(WIDTH, 9).T
    copy = mx.array(np.array(turned.astype(mx.float32)))
    assert contents(quantize_weight(turned, spec)) == contents(quantize_weight(copy, spec))


# ------------------------------------------------------------------------------------- decoding


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_decoding_in_numpy_and_in_mlx_is_the_same(spec):
    made = quantize_weight(weight(3, 45, WIDTH), spec)
    for rotated in (False, True):
        a = np.array(dequantize_weight(made, rotated=rotated, backend="numpy"))
        b = np.array(dequantize_weight(made, rotated=rotated, backend="mlx"))
        assert a.shape == b.shape == (3, 45, WIDTH)
        np.testing.assert_allclose(a, b, atol=1e-7)
    a = dequantize_numpy(made, 40, 100, use_qjl=False)
    b = dequantize_rows(made, 40, 100, rotated=False)
    np.testing.assert_allclose(a, np.array(b), atol=1e-7)


@pytest.mark.parametrize("block", [1, 64, 192, 12, 20, 80, 28, 224, 640])
def test_products_in_the_stored_domain_are_products_with_the_decoded_weight(block):
    """Any supported block, 20- and 28-based ones included, whose inverse is the transpose."""
    width = {20: 320, 80: 320, 28: 448, 224: 448, 640: 640}.get(block, WIDTH)
    w, x = weight(11, width), mx.array(np.random.default_rng(1).standard_normal(width))
    x = x.astype(mx.float32)
    made = quantize_weight(w, QuantSpec(bits=3, rotation_block=block))
    stored = dequantize_weight(made, rotated=True) @ rotate(x, block, made.multiplier)
    for backend in ("numpy", "mlx"):
        decoded = dequantize_weight(made, backend=backend) @ x
        np.testing.assert_allclose(stored.tolist(), decoded.tolist(), rtol=1e-4, atol=1e-5)
    assert relative_error(made, w) < 0.03


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("backend", ["numpy", "mlx"])
def test_decoded_dtype(dtype, backend):
    made = quantize_weight(weight(5, WIDTH), QuantSpec(bits=3, rotation_block=192))
    decoded = dequantize_weight(made, dtype=dtype, backend=backend)
    assert decoded.dtype == dtype
    exact = dequantize_weight(made, backend=backend)
    assert mx.array_equal(decoded, exact.astype(dtype))


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_rows_and_experts(spec):
    made = quantize_weight(weight(3, 10, WIDTH), spec)
    whole = np.array(dequantize_weight(made))
    np.testing.assert_allclose(np.array(dequantize_weight(made.expert(1))), whole[1], atol=1e-7)
    np.testing.assert_allclose(np.array(dequantize_weight(made.rows(1, 3))), whole[1:], atol=1e-7)
    flat = made.flat()
    assert flat.shape == (30, WIDTH)
    np.testing.assert_allclose(
        np.array(dequantize_weight(flat.rows(7, 12))), whole.reshape(30, WIDTH)[7:12], atol=1e-7
    )
    rows = dequantize_rows(made, 7, 12, rotated=False, use_qjl=True)
    np.testing.assert_allclose(np.array(rows), whole.reshape(30, WIDTH)[7:12], atol=1e-7)


def test_rows_for_a_product_are_in_the_stored_domain_without_the_sketch():
    made = quantize_weight(weight(6, WIDTH), SPECS[-1])
    expected = dequantize_weight(made, rotated=True, use_qjl=False)
    np.testing.assert_allclose(np.array(dequantize_rows(made, 0, 6)), np.array(expected), atol=1e-7)


def test_trellis_windows_and_tiles_are_decoded():
    """Made by another encoder; decoding needs only the stream and the table."""
    rng = np.random.default_rng(0)
    spec = QuantSpec(bits=3, window_bits=8, tile=64, rotation_block=64)
    made = PackedWeight(
        spec=spec,
        shape=(4, 128),
        codes=mx.array(rng.integers(0, 2**32, (4, 12), dtype=np.uint32)),
        scales=mx.array(rng.random((4, 2)).astype(np.float16)),
        table=mx.array(rng.standard_normal(256).astype(np.float32)),
        multiplier=mx.ones((128,), mx.float16),
    )
    bits = np.unpackbits(np.array(made.codes).view(np.uint8), axis=-1, bitorder="little")
    expected = np.empty((4, 128), np.float32)
    for row in range(4):
        for i in range(128):
            tile = bits[row, i // 64 * 192 : (i // 64 + 1) * 192]
            window = sum(int(tile[(i % 64 * 3 + j) % 192]) << j for j in range(8))
            expected[row, i] = made.table[window].item() * made.scales[row, i // 64].item()
    for backend in ("numpy", "mlx"):
        decoded = dequantize_weight(made, rotated=True, backend=backend)
        np.testing.assert_allclose(np.array(decoded), expected, rtol=1e-6)


# ---------------------------------------------------------------------- zeros, stacks, multipliers


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_zero_rows_and_zero_tensors_decode_to_zeros(spec):
    w = np.array(weight(6, WIDTH).astype(mx.float32))
    w[2] = 0
    decoded = np.array(dequantize_weight(quantize_weight(mx.array(w), spec)))
    assert (decoded[2] == 0).all()
    assert decoded[3].any()
    for zeros in (mx.zeros((3, WIDTH)), mx.zeros((2, 3, WIDTH), mx.bfloat16)):
        decoded = dequantize_weight(quantize_weight(zeros, spec))
        assert not decoded.any().item()


def test_zero_groups_without_rotation():
    w = np.array(weight(4, WIDTH).astype(mx.float32))
    w[1, 64:128] = 0
    made = quantize_weight(mx.array(w), QuantSpec(bits=3))
    assert np.array(made.scales)[1, 1] == 0
    assert (np.array(dequantize_weight(made))[1, 64:128] == 0).all()


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_stack_is_its_matrices(spec):
    w = weight(3, 9, WIDTH)
    stack = np.array(dequantize_weight(quantize_weight(w, spec)))
    for e in range(3):
        alone = np.array(dequantize_weight(quantize_weight(w[e], spec)))
        np.testing.assert_allclose(stack[e], alone, atol=1e-7)


@pytest.mark.parametrize("rows", [1, 2, 127, 128, 129, 300])
def test_a_row_does_not_depend_on_its_neighbours(rows):
    spec = QuantSpec(bits=3, rotation_block=192)
    w = weight(300, WIDTH)
    whole, part = quantize_weight(w, spec), quantize_weight(w[:rows], spec)
    assert mx.array_equal(part.codes, whole.codes[:rows])


def test_the_default_multiplier_is_the_random_signs_of_the_label():
    w, spec = weight(3, WIDTH), QuantSpec(bits=3, rotation_block=192)
    made = quantize_weight(w, spec, seed=7, label="model.layers.0.self_attn.q_proj")
    signs = random_signs(WIDTH, 7, "model.layers.0.self_attn.q_proj")
    assert np.array(made.multiplier).tolist() == signs.tolist()
    same = quantize_weight(w, spec, multiplier=signs)
    assert contents(same) == contents(made)
    other = quantize_weight(w, spec, seed=8, label="model.layers.0.self_attn.q_proj")
    assert contents(other) != contents(made)


@pytest.mark.parametrize("kind", [mx.array, np.asarray])
def test_a_multiplier_is_rounded_before_it_is_used(kind):
    """What is divided out is what is stored, so rounding it to float16 costs nothing."""
    signs = random_signs(WIDTH, 0, "a")
    m = kind((signs * np.linspace(0.3, 3.1, WIDTH)).astype(np.float32))
    w, spec = weight(16, WIDTH), QuantSpec(bits=8, rotation_block=192)
    made = quantize_weight(w, spec, multiplier=m)
    assert made.multiplier.dtype == mx.float16
    assert relative_error(made, w) < 1e-4


# ----------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("backend", ["numpy", "mlx"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_named(backend, bad):
    w = np.zeros((200, WIDTH), np.float32)
    w[177, 500] = bad
    with pytest.raises(QuantizationError, match=r"lm_head\.weight has values that are not finite"):
        quantize_weight(
            mx.array(w),
            QuantSpec(bits=3, rotation_block=192),
            label="lm_head",
            name="lm_head.weight",
            backend=backend,
        )


@pytest.mark.parametrize("backend", ["numpy", "mlx"])
def test_absurdly_large_values_are_reported(backend):
    for spec in (QuantSpec(bits=3, rotation_block=192), QuantSpec(bits=3)):
        for w in (mx.full((4, WIDTH), 3e38), mx.full((4, WIDTH), -1e31)):
            with pytest.raises(QuantizationError, match="exceed 1e30"):
                quantize_weight(w, spec, multiplier=np.ones(WIDTH), backend=backend)
    w = weight(4, WIDTH, size=1e27)
    made = quantize_weight(w, QuantSpec(bits=3, rotation_block=192), backend=backend)
    assert relative_error(made, w) < 0.03


@pytest.mark.parametrize(
    ("w", "spec", "options", "message"),
    [
        (mx.zeros((4, 100)), QuantSpec(), {}, "m is 100 wide, not a multiple .* group size 64"),
        (mx.zeros((64,)), QuantSpec(), {}, "m has 1 dimensions, not 2 or 3"),
        (mx.zeros((2, 2, 2, 64)), QuantSpec(), {}, "m has 4 dimensions"),
        (mx.zeros((0, 64)), QuantSpec(), {}, r"m is empty: \(0, 64\)"),
        (mx.zeros((4, 64), mx.int32), QuantSpec(), {}, "m is .*int32, not a"),
        (mx.zeros((4, 64)), QuantSpec(rotation_block=36), {}, "m: a rotation block of 36"),
        (mx.zeros((4, 64)), QuantSpec(rotation_block=128), {}, "m: .* 128 does not divide"),
        (mx.zeros((4, 64)), QuantSpec(window_bits=7), {}, "m: no trellis code of 3 bits with a"),
        (mx.zeros((4, 64)), QuantSpec(), {"multiplier": np.ones(63)}, r"m: .*shape \(63,\)"),
        (mx.zeros((4, 64)), QuantSpec(), {"multiplier": np.zeros(64)}, "m: .* zeros"),
        (mx.zeros((4, 64)), QuantSpec(), {"multiplier": np.full(64, 1e9)}, "m: .* beyond float16"),
        (mx.zeros((4, 64)), QuantSpec(), {"multiplier": np.full(64, np.nan)}, "m: .* float16"),
        (mx.full((4, 64), 3e6), QuantSpec(bits=1, qjl=True, rotation_block=1), {}, None),
    ],
)
def test_what_cannot_be_quantized_is_refused_by_name(w, spec, options, message):
    if message is None:
        w, message = w * mx.array([[1.0, 0.1] * 32]), "m has residuals too large"
    with pytest.raises(QuantizationError, match=message) as caught:
        quantize_weight(w, spec, name="m", **options)
    assert "\n" not in caught.value.message


# ------------------------------------------------------------------- blocks, threads and back-ends


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_both_back_ends_make_the_same_weight(spec, monkeypatch):
    monkeypatch.setitem(viterbi.SECTION, "mlx", viterbi.SECTION["numpy"])
    w = weight(40, WIDTH)
    a = quantize_weight(w, spec, backend="numpy")
    b = quantize_weight(w, spec, backend="mlx")
    assert mx.array_equal(a.table, b.table)
    assert mx.array_equal(a.multiplier, b.multiplier)
    assert mx.mean(a.scales == b.scales).item() > 0.9
    assert relative_error(b, w) == pytest.approx(relative_error(a, w), rel=5e-3)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_do_not_change_a_byte(threads):
    w = weight(3, 250, WIDTH)
    for spec in (SPECS[0], SPECS[8], SPECS[-2], SPECS[-1]):
        expected = contents(quantize_weight(w, spec))
        assert contents(quantize_weight(w, spec, threads=threads)) == expected
    made = quantize_weight(w, SPECS[-1])
    expected = np.array(dequantize_weight(made))
    np.testing.assert_array_equal(np.array(dequantize_weight(made, threads=threads)), expected)


def test_wide_rows_go_in_several_chunks(monkeypatch):
    w = weight(5, 4 * WIDTH)
    for spec in (SPECS[0], SPECS[6], SPECS[-1]):
        expected = quantize_weight(w, spec)
        with monkeypatch.context() as patch:
            patch.setattr(encode, "CHUNK_VALUES", 1)
            assert contents(quantize_weight(w, spec)) == contents(expected)
            a = np.array(dequantize_weight(expected, backend="numpy"))
        np.testing.assert_allclose(a, np.array(dequantize_weight(expected)), atol=1e-7)


@pytest.mark.parametrize("backend", ["numpy", "mlx"])
def test_large_weights_go_in_several_blocks(monkeypatch, backend):
    w = weight(2, 35, WIDTH)
    spec = SPECS[-1]
    expected = quantize_weight(w, spec, backend=backend)
    decoded = np.array(dequantize_weight(expected, backend=backend))
    monkeypatch.setattr(packed, "BLOCK_BYTES", 8 * 4 * WIDTH)
    assert packed.block_rows(WIDTH) == 8
    assert contents(quantize_weight(w, spec, backend=backend)) == contents(expected)
    again = dequantize_weight(expected, backend=backend)
    np.testing.assert_allclose(np.array(again), decoded, atol=1e-7)


def test_the_back_end_follows_the_device():
    with mx.stream(mx.cpu):
        assert decode.default_backend() in ("numpy", "mlx")
    if mx.default_device() == mx.Device(mx.cpu):
        assert decode.default_backend() == "numpy"

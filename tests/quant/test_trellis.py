"""Trellis codes: the search for the best stream, its closing, and whole weights."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from turboquant_mlx.errors import QuantizationError
from turboquant_mlx.quant import viterbi
from turboquant_mlx.quant.codebook import lloyd_max
from turboquant_mlx.quant.lookup import RowDecoder
from turboquant_mlx.quant.packing import pack_codes, unpack_codes
from turboquant_mlx.quant.spec import QuantSpec
from turboquant_mlx.quant.trellis import check_trellis, search_trellis, searches
from turboquant_mlx.quant.trellis_table import TRELLIS_BITS, TRELLIS_WINDOW, trellis_table
from turboquant_mlx.quant.viterbi import best_windows, make_trellis
from turboquant_mlx.quant.weight import dequantize_rows, dequantize_weight, quantize_weight

# Mean square error on N(0, 1) with the right scale: the promise of each table.
ERRORS = {2: 0.0757, 3: 0.0202, 4: 0.0055}
bits_of_trellis = pytest.mark.parametrize("bits", TRELLIS_BITS)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def trellis(bits: int) -> viterbi.Trellis:
    return make_trellis(trellis_table(bits), bits, TRELLIS_WINDOW)


def error(x: np.ndarray, windows: np.ndarray, bits: int) -> float:
    d = x - trellis_table(bits)[np.array(windows)]
    return float((d * d).sum() / (x * x).sum())


def through_the_stream(windows: np.ndarray, bits: int, tile: int = 0) -> np.ndarray:
    """What a decoder sees of windows [n, lanes] of which the stream holds only the low bits."""
    codes = np.ascontiguousarray((windows & ((1 << bits) - 1)).T)
    return unpack_codes(pack_codes(codes, bits), bits, len(windows), TRELLIS_WINDOW, tile).T


# ------------------------------------------------------------------------------------ the tables


@bits_of_trellis
def test_tables(bits):
    table = trellis_table(bits)
    assert table.shape == (256,)
    assert table.dtype == np.float32
    assert not table.flags.writeable
    assert 2.5 < np.abs(table).max() < viterbi.LIMIT
    assert abs(table.mean()) < 0.05


@bits_of_trellis
def test_levels_are_the_means_of_what_they_stand_for(bits):
    """So the error is orthogonal to the result, and least squares leaves the scale alone."""
    x = normal(1000, 512, seed=1)
    windows = best_windows(x, trellis(bits)).ravel()
    count = np.bincount(windows, minlength=256)
    assert count.min() > 20
    mean = np.bincount(windows, x.ravel(), 256) / count
    deviation = (mean - trellis_table(bits)) * np.sqrt(count / ERRORS[bits])
    assert np.sqrt((deviation**2).mean()) < 2.5


def test_other_tables_do_not_exist():
    with pytest.raises(QuantizationError, match="no trellis table for 5 bits"):
        trellis_table(5)


# ------------------------------------------------------------------------------------ the search


@bits_of_trellis
def test_error_on_normal_values(bits):
    x = normal(1536, 256)
    assert error(x, best_windows(x, trellis(bits)), bits) < ERRORS[bits]


@bits_of_trellis
@pytest.mark.parametrize("array", [np.asarray, mx.array], ids=["numpy", "mlx"])
@pytest.mark.parametrize(
    ("n", "lanes", "tile"), [(16, 3, 0), (576, 5, 0), (600, 2, 0), (192, 4, 64), (2080, 1, 0)]
)
def test_windows_are_those_of_the_stream(bits, array, n, lanes, tile):
    x = normal(n, lanes, seed=n)
    windows = best_windows(array(x), trellis(bits), tile)
    assert windows.shape == (n, lanes)
    windows = np.array(windows)
    assert windows.dtype == np.uint8
    np.testing.assert_array_equal(through_the_stream(windows, bits, tile), windows)


@pytest.mark.parametrize("seed", range(40))
def test_any_values_become_a_stream(seed):
    rng = np.random.default_rng(seed)
    bits = int(rng.choice(TRELLIS_BITS))
    n, lanes = int(rng.integers(4, 90)), int(rng.integers(1, 6))
    x = normal(n, lanes, seed=seed) * rng.choice(np.float32([0.0, 0.01, 1.0, 50.0]))
    windows = best_windows(x, trellis(bits))
    np.testing.assert_array_equal(through_the_stream(windows, bits), windows)


def least_error(x: np.ndarray, bits: int) -> np.ndarray:
    """The least squared error of any circular stream, for each column of x [n, lanes]."""
    fan, states = 1 << bits, 1 << (TRELLIS_WINDOW - bits)
    windows = np.arange(1 << TRELLIS_WINDOW)
    levels = trellis_table(bits).astype(np.float64)
    # [first state, state, lanes]
    cost = np.where(np.eye(states, dtype=bool)[..., None], np.zeros(x.shape[1]), np.inf)
    for value in x:
        path = cost[:, windows % states] + (value - levels[:, None]) ** 2
        cost = path.reshape(states, states, fan, -1).min(axis=2)
    return cost[np.arange(states), np.arange(states)].min(axis=0)


@pytest.mark.parametrize(("n", "loss"), [(32, 0.04), (64, 0.02), (160, 0.01)])
@bits_of_trellis
def test_hardly_any_circular_stream_is_better(bits, n, loss):
    x = normal(n, 30, seed=3)
    best = least_error(x, bits)
    found = np.square(x - trellis_table(bits)[best_windows(x, trellis(bits))]).sum(axis=0)
    assert (found >= best * (1 - 1e-6)).all()
    assert found.sum() < best.sum() * (1 + loss)


@bits_of_trellis
def test_closing_the_circle_costs_little(bits):
    """Against streams of which only the inside counts."""
    x = normal(576, 256, seed=4)
    windows = best_windows(x, trellis(bits))
    whole = error(x, windows, bits)
    inside = error(x[64:-64], windows[64:-64], bits)
    assert whole < inside * 1.02


@bits_of_trellis
def test_sections_cost_little(bits, monkeypatch):
    x = normal(1000, 128, seed=5)
    whole = error(x, best_windows(x, trellis(bits)), bits)
    monkeypatch.setitem(viterbi.SECTION, "numpy", 100)
    windows = best_windows(x, trellis(bits))
    np.testing.assert_array_equal(through_the_stream(windows, bits), windows)
    assert whole < error(x, windows, bits) < 1.01 * whole


@bits_of_trellis
def test_numpy_and_mlx_find_the_same_codes(bits, monkeypatch):
    monkeypatch.setitem(viterbi.SECTION, "mlx", viterbi.SECTION["numpy"])
    x = normal(300, 7, seed=6)
    x[100] = 30
    for tile in (0, 100):
        a, b = best_windows(x, trellis(bits), tile), best_windows(mx.array(x), trellis(bits), tile)
        np.testing.assert_array_equal(a, np.array(b))


@bits_of_trellis
def test_streams_do_not_influence_each_other(bits, monkeypatch):
    x = normal(1100, 300, seed=7)
    whole = best_windows(x, trellis(bits))
    for lanes in (slice(0, 1), slice(40, 167), slice(299, 300)):
        part = best_windows(np.ascontiguousarray(x[:, lanes]), trellis(bits))
        np.testing.assert_array_equal(whole[:, lanes], part)
    monkeypatch.setitem(viterbi.LANES, "numpy", 10**6)
    np.testing.assert_array_equal(best_windows(x, trellis(bits)), whole)


@pytest.mark.parametrize("steps", [5, 16, 64])
def test_compiled_steps_fit_any_length(steps, monkeypatch):
    monkeypatch.setattr(viterbi, "_UNROLLED", steps)
    monkeypatch.setitem(viterbi.SECTION, "mlx", viterbi.SECTION["numpy"])
    x = normal(75, 3, seed=8)
    windows = best_windows(mx.array(x), trellis(3))
    np.testing.assert_array_equal(best_windows(x, trellis(3)), np.array(windows))


@bits_of_trellis
def test_hard_values_stay_in_bounds(bits):
    """Costs must not grow until their lowest bits are lost, whatever the data."""
    table = trellis_table(bits)
    for x in (
        np.full((1024, 3), viterbi.LIMIT, np.float32),
        np.tile(np.float32([[-4], [4]]), (300, 3)),
        np.sign(normal(512, 3)) * 9,
    ):
        values = table[best_windows(x.astype(np.float32), trellis(bits))]
        # No worse than the plain code, whose outer levels are smaller.
        plain = np.abs(np.clip(x, -lloyd_max(bits)[-1], lloyd_max(bits)[-1]) - x).mean()
        assert np.abs(values - x).mean() < plain + 0.5


# ---------------------------------------------------------------------------------- whole weights


def weight(*shape: int, seed: int = 0) -> mx.array:
    return mx.array(normal(*shape, seed=seed) * np.float32(0.02)).astype(mx.bfloat16)


def relative_error(spec: QuantSpec, w: mx.array, **options) -> float:
    exact = np.array(w.astype(mx.float32)).astype(np.float64)
    d = np.array(dequantize_weight(quantize_weight(w, spec, **options))) - exact
    return float((d * d).sum() / (exact * exact).sum())


@pytest.mark.parametrize(
    ("bits", "group_size", "layout", "limit"),
    [
        (2, 192, "float16", 0.0757),
        (3, 192, "float16", 0.0201),
        (4, 192, "float16", 0.0055),
        (3, 576, "float16", 0.0204),
        (3, 192, "log8", 0.0203),
        (3, 64, "float16", 0.0195),
        (3, 64, "log8", 0.0197),
        (3, 32, "log8", 0.0190),
        (4, 32, "log8", 0.0053),
    ],
)
def test_error_of_weights(bits, group_size, layout, limit):
    spec = QuantSpec(
        bits=bits,
        window_bits=8,
        group_size=group_size,
        scale_layout=layout,
        rotation_block=192,
    )
    assert relative_error(spec, weight(256, 576)) < limit


def test_at_equal_bits_a_trellis_beats_a_plain_code():
    w = weight(256, 768)
    for bits in TRELLIS_BITS:
        plain = QuantSpec(bits=bits, group_size=32, scale_layout="log8", rotation_block=768)
        coded = QuantSpec(bits=bits, window_bits=8, group_size=64, rotation_block=768)
        assert coded.packed_bytes(w.shape) == pytest.approx(plain.packed_bytes(w.shape), rel=0.03)
        gain = relative_error(coded, w) / relative_error(plain, w)
        assert gain < {2: 0.75, 3: 0.80, 4: 0.90}[bits]


def test_small_groups_are_searched_twice():
    large = QuantSpec(bits=3, window_bits=8, group_size=128)
    assert [searches(large), searches(large.with_(group_size=64, window_bits=8))] == [1, 2]


@pytest.mark.parametrize("layout", ["float16", "log8"])
@pytest.mark.parametrize("tile", [0, 64])
def test_scales_and_windows_belong_together(layout, tile):
    """The windows are the stream's, and no other stored scale would suit them better."""
    spec = QuantSpec(bits=3, window_bits=8, tile=tile, group_size=32, scale_layout=layout)
    x = normal(6, 32, 9) * np.float32(0.3)
    scale, windows = search_trellis(x, trellis_table(3), spec)
    flat = windows.reshape(192, 9)
    np.testing.assert_array_equal(through_the_stream(flat, 3, tile), flat)
    q = trellis_table(3)[windows]
    found = np.square(x - q * scale).sum(axis=1)
    step = 2.0 ** (1 / 16) if layout == "log8" else 1 + 2.0**-10
    for factor in (step, 1 / step):
        other = np.square(x - q * scale * np.float32(factor)).sum(axis=1)
        assert (other >= found * (1 - 1e-4)).all()


def test_zero_groups_and_rows_are_exact_zeros():
    w = np.array(weight(6, 256).astype(mx.float32))
    w[2] = 0
    w[4, 64:192] = 0
    for spec in (
        QuantSpec(bits=3, window_bits=8),
        QuantSpec(bits=2, window_bits=8, group_size=32, scale_layout="log8"),
    ):
        for backend in ("numpy", "mlx"):
            made = quantize_weight(mx.array(w), spec, backend=backend)
            decoded = np.array(dequantize_weight(made))
            assert (decoded[w == 0] == 0).all()
            assert np.square(decoded - w).sum() < 0.1 * np.square(w).sum()
    zero = quantize_weight(mx.zeros((3, 64)), QuantSpec(bits=3, window_bits=8))
    assert not np.array(dequantize_weight(zero)).any()


def test_one_large_weight_keeps_its_size():
    w = np.array(weight(4, 256).astype(mx.float32))
    w[1, 70] = 1.0
    made = quantize_weight(mx.array(w), QuantSpec(bits=3, window_bits=8))
    assert np.array(dequantize_weight(made))[1, 70] == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize(
    ("spec", "width", "message"),
    [
        (QuantSpec(bits=3, window_bits=9), 64, "no trellis code of 3 bits with a window of 9"),
        (QuantSpec(bits=5, window_bits=8), 64, "no trellis code of 5 bits with a window of 8"),
        (QuantSpec(bits=2, window_bits=8, tile=48), 64, "tiles of 48 weights do not divide .* 64"),
        (QuantSpec(bits=2, window_bits=8), 3, "a stretch of 3 weights is too short"),
    ],
)
def test_codes_that_do_not_exist_are_refused(spec, width, message):
    with pytest.raises(QuantizationError, match=message):
        check_trellis(spec, width)
    check_trellis(QuantSpec(bits=3, window_bits=8, tile=32), 64)


# --------------------------------------------------------------------------------------- decoding


@bits_of_trellis
@pytest.mark.parametrize(
    ("width", "group_size", "tile"), [(1000, 50, 0), (576, 192, 64), (5, 5, 0)]
)
def test_rows_are_decoded_exactly_on_the_cpu(bits, width, group_size, tile):
    spec = QuantSpec(bits=bits, window_bits=8, group_size=group_size, tile=tile)
    made = quantize_weight(weight(9, width, seed=bits), spec)
    expected = np.array(dequantize_rows(made, 2, 9))
    np.testing.assert_array_equal(RowDecoder(made)(2, 9), expected)

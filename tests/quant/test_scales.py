"""The search for group scales, and how scales are stored."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from turboquant_mlx.quant.codebook import boundaries, lloyd_max, ternary
from turboquant_mlx.quant.scales import (
    decode_scales,
    encode_scales,
    log8_table,
    search_scales,
    table_exponent,
)

TABLES = {"ternary": ternary(), **{f"{b} bits": lloyd_max(b) for b in range(1, 9)}}


def groups(n: int, g: int, r: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, g, r)).astype(np.float32)


def group_errors(x: np.ndarray, levels: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Squared error [n, r] of the nearest levels at given scales [n, 1, r]."""
    safe = np.where(scale > 0, scale, 1)
    q = levels[np.searchsorted(boundaries(levels), x / safe)]
    return ((x - q * scale) ** 2).sum(axis=1)


def rms(x: np.ndarray) -> np.ndarray:
    return np.sqrt((x * x).mean(axis=1, keepdims=True))


def exhaustive(x: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """The least error of each group over a fine grid of scales."""
    factors = np.geomspace(0.35, 2.2, 150)
    return np.min([group_errors(x, levels, rms(x) * f) for f in factors], axis=0)


# ------------------------------------------------------------------------------------ the search


@pytest.mark.parametrize("g", [16, 32, 64, 128])
@pytest.mark.parametrize("table", ["ternary", "1 bits", "2 bits", "3 bits", "4 bits"])
def test_the_search_is_as_good_as_trying_every_scale(table, g):
    levels = TABLES[table]
    x = groups(6400 // g, g, 4)
    scale, idx = search_scales(x, levels, "float16")
    found = ((x - levels[idx] * scale) ** 2).sum()
    assert found <= exhaustive(x, levels).sum() * 1.012


@pytest.mark.parametrize(("bits", "gain"), [(2, 0.02), (3, 0.10), (4, 0.20), (6, 0.3), (8, 0.3)])
def test_the_search_beats_the_root_mean_square(bits, gain):
    levels = lloyd_max(bits)
    x = groups(400, 64, 4)
    scale, idx = search_scales(x, levels, "float16")
    found = ((x - levels[idx] * scale) ** 2).sum()
    assert found < (1 - gain) * group_errors(x, levels, rms(x)).sum()


@pytest.mark.parametrize("layout", ["float16", "log8"])
@pytest.mark.parametrize("table", TABLES)
def test_indices_are_the_nearest_levels_for_the_stored_scale(table, layout):
    levels = TABLES[table]
    x = groups(20, 64, 3)
    scale, idx = search_scales(x, levels, layout)
    assert idx.dtype == np.uint8
    assert scale.dtype == np.float32
    distance = np.abs(x[..., None] - scale[..., None] * levels)
    chosen = np.take_along_axis(distance, idx[..., None].astype(int), axis=-1)[..., 0]
    assert (chosen <= distance.min(axis=-1) + 1e-6).all()


@pytest.mark.parametrize("layout", ["float16", "log8"])
def test_log8_costs_little_against_float16(layout):
    levels = lloyd_max(4)
    x = groups(200, 32, 4)
    scale, idx = search_scales(x, levels, layout)
    error = ((x - levels[idx] * scale) ** 2).sum()
    assert error <= exhaustive(x, levels).sum() * (1.012 if layout == "float16" else 1.05)


def test_rounding_to_log8_compares_the_neighbours():
    """Where a scale falls between two storable ones, the better of them is taken."""
    levels = lloyd_max(4)
    x = groups(300, 32, 4)
    scale, idx = search_scales(x, levels, "log8")
    error = ((x - levels[idx] * scale) ** 2).sum(axis=1)
    for neighbour in (-1, 1):
        other = group_errors(x, levels, scale * np.float32(2.0 ** (neighbour / 16)))
        assert (other >= error * (1 - 1e-5)).mean() > 0.9
        assert other.sum() > error.sum()


@pytest.mark.parametrize("g", [8, 16, 50, 64, 128, 200])
@pytest.mark.parametrize("r", [1, 7])
def test_any_group_size_and_row_count(g, r):
    x = groups(3, g, r)
    scale, idx = search_scales(x, lloyd_max(3), "float16")
    assert scale.shape == (3, 1, r)
    assert idx.shape == x.shape
    assert ((x - lloyd_max(3)[idx] * scale) ** 2).sum() < 0.04 * (x * x).sum()


@pytest.mark.parametrize("layout", ["float16", "log8"])
@pytest.mark.parametrize("table", ["ternary", "3 bits", "8 bits"])
def test_all_zero_groups_get_the_scale_zero(table, layout):
    x = groups(4, 64, 3)
    x[1] = 0
    x[2, :, 1] = 0
    scale, idx = search_scales(x, TABLES[table], layout)
    assert (scale[1] == 0).all()
    assert scale[2, 0, 1] == 0
    assert (scale == 0).sum() == 4
    assert (idx < len(TABLES[table])).all()


@pytest.mark.parametrize("size", [2.0**-80, 2.0**-20, 2.0**30])
def test_powers_of_two_scale_through(size):
    x = groups(10, 64, 3)
    for layout in ("float16", "log8"):
        scale, idx = search_scales(x, lloyd_max(3), layout)
        other, other_idx = search_scales(x * np.float32(size), lloyd_max(3), layout)
        np.testing.assert_array_equal(idx, other_idx)
        np.testing.assert_array_equal(scale * np.float32(size), other)


def test_values_too_small_for_a_reciprocal_become_zeros():
    x = groups(2, 64, 1) * np.float32(1e-38)
    scale, _ = search_scales(x, lloyd_max(3), "float16")
    assert (scale == 0).all()


@pytest.mark.parametrize("table", ["ternary", "2 bits", "4 bits"])
def test_one_large_value_does_not_spoil_the_search(table):
    """Far outside the histogram's bins, where all starting scales clip alike."""
    levels = TABLES[table]
    x = groups(200, 64, 1)
    x[:, 0] = 30
    scale, idx = search_scales(x, levels, "float16")
    error = ((x - levels[idx] * scale) ** 2).sum(axis=1)
    plain = group_errors(x, levels, rms(x))
    assert error.sum() < plain.sum()


def test_a_constant_group_is_exact():
    x = np.full((1, 64, 1), 0.25, np.float32)
    for table in ("ternary", "1 bits", "3 bits"):
        scale, idx = search_scales(x, TABLES[table], "float16")
        np.testing.assert_allclose(TABLES[table][idx] * scale, x, rtol=5e-4)


@pytest.mark.parametrize("layout", ["float16", "log8"])
@pytest.mark.parametrize("table", ["ternary", "2 bits", "4 bits", "6 bits"])
def test_mlx_and_numpy_agree(table, layout):
    x = groups(60, 64, 1)
    x[5] = 0
    levels = TABLES[table]
    scale, idx = search_scales(x, levels, layout)
    mlx_scale, mlx_idx = search_scales(mx.array(x), levels, layout)
    assert mlx_idx.dtype == mx.uint8
    assert (np.array(mlx_scale) == scale).mean() > 0.95
    assert (np.array(mlx_idx) == idx).mean() > 0.95
    error = ((x - levels[idx] * scale) ** 2).sum()
    mlx_error = ((x - levels[np.array(mlx_idx)] * np.array(mlx_scale)) ** 2).sum()
    assert mlx_error == pytest.approx(error, rel=2e-3)


# --------------------------------------------------------------------------------------- storage


@pytest.mark.parametrize("layout", ["float16", "log8"])
@pytest.mark.parametrize("size", [1e-6, 0.03, 1.0, 500.0])
def test_searched_scales_are_stored_without_further_rounding(layout, size):
    x = groups(50, 32, 4) * np.float32(size)
    scale, _ = search_scales(x, lloyd_max(3), layout)
    exponent = table_exponent(float(scale.max()))
    stored = encode_scales(scale, layout, exponent)
    assert stored.dtype == (np.float16 if layout == "float16" else np.uint8)
    np.testing.assert_array_equal(np.ldexp(decode_scales(stored, layout), exponent), scale)


@pytest.mark.parametrize("largest", [1e-20, 3e-5, 0.5, 0.75, 1.0, 1.0001, 2.0, 65504.0, 1e20])
def test_the_largest_scale_lies_above_a_half_and_up_to_one(largest):
    assert 0.5 < largest * 2.0 ** -table_exponent(largest) <= 1


def test_a_zero_tensor_needs_no_exponent():
    assert table_exponent(0.0) == 0


def test_log8_codes():
    table = log8_table()
    assert table.dtype == np.float32
    assert table.shape == (256,)
    assert table[0] == 0
    assert table[240] == 1
    assert table[224] == 0.5
    np.testing.assert_allclose(table[1:], 2.0 ** ((np.arange(1, 256) - 240) / 16), rtol=1e-7)
    codes = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(encode_scales(table, "log8", 0), codes)
    np.testing.assert_array_equal(decode_scales(codes, "log8"), table)
    np.testing.assert_array_equal(np.array(decode_scales(mx.array(codes), "log8")), table)


def test_scales_far_below_the_largest_fade_to_zero():
    tiny = np.float32([1.0, 2.0**-14, 2.0**-20, 2.0**-40, 0])
    log8 = decode_scales(encode_scales(tiny, "log8", 0), "log8")
    np.testing.assert_array_equal(log8, np.float32([1, 2.0**-14, 0, 0, 0]))
    half = decode_scales(encode_scales(tiny, "float16", 0), "float16")
    np.testing.assert_array_equal(half, np.float32([1, 2.0**-14, 2.0**-20, 0, 0]))

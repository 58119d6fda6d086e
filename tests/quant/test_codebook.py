"""Tables for N(0, 1): known values, optimality, and the errors they are known to reach."""

from __future__ import annotations

import math

import numpy as np
import pytest

from turboquant_mlx.errors import QuantizationError
from turboquant_mlx.quant.codebook import boundaries, lloyd_max, ternary

# Mean square error of the optimum quantizer of N(0, 1) with 2**bits levels (Max, 1960, to four
# digits; widely tabulated since).
OPTIMUM = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497, 5: 0.002499}


def cell_moments(levels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mass and mean of every cell under N(0, 1), from the error function."""
    borders = [-math.inf, *(0.5 * (levels[1:] + levels[:-1])), math.inf]
    cdf = np.array([0.5 * math.erfc(-b / math.sqrt(2)) for b in borders])
    pdf = np.array([math.exp(-0.5 * b * b) / math.sqrt(2 * math.pi) for b in borders])
    mass = np.diff(cdf)
    return mass, -np.diff(pdf) / mass


@pytest.mark.parametrize("bits", range(1, 9))
def test_levels_are_ascending_antisymmetric_and_of_the_right_kind(bits):
    levels = lloyd_max(bits)
    assert levels.dtype == np.float32
    assert levels.shape == (2**bits,)
    assert (np.diff(levels) > 0).all()
    np.testing.assert_array_equal(levels, -levels[::-1])


@pytest.mark.parametrize("bits", range(1, 9))
def test_every_level_is_the_mean_of_its_cell(bits):
    levels = lloyd_max(bits).astype(np.float64)
    _, mean = cell_moments(levels)
    assert np.abs(levels - mean).max() < 3e-7  # float32 rounding of the outermost levels


@pytest.mark.parametrize(("bits", "error"), OPTIMUM.items())
def test_error_is_the_tabulated_optimum(bits, error):
    levels = lloyd_max(bits).astype(np.float64)
    mass, mean = cell_moments(levels)
    mse = 1 - 2 * (levels * mean * mass).sum() + (levels**2 * mass).sum()
    assert mse == pytest.approx(error, rel=5e-3)


@pytest.mark.parametrize("bits", range(2, 9))
def test_error_falls_towards_the_asymptotic_law(bits):
    # Panter and Dite (1951): sqrt(3) pi / 2 * 4**-bits, approached from below
    levels = lloyd_max(bits).astype(np.float64)
    mass, mean = cell_moments(levels)
    mse = 1 - 2 * (levels * mean * mass).sum() + (levels**2 * mass).sum()
    share = mse / (math.sqrt(3) * math.pi / 2 * 4.0**-bits)
    assert 1 - 2.1 * 2**-bits < share < 1 - 1.1 * 2**-bits


def test_known_levels():
    np.testing.assert_allclose(lloyd_max(1), [-0.7978846, 0.7978846], rtol=1e-6)
    np.testing.assert_allclose(lloyd_max(2)[2:], [0.4527800, 1.5104176], rtol=1e-6)
    expected = [0.2450942, 0.7560053, 1.3439093, 2.1519457]
    np.testing.assert_allclose(lloyd_max(3)[4:], expected, rtol=1e-6)


def test_ternary_levels():
    levels = ternary()
    assert levels.dtype == np.float32
    np.testing.assert_allclose(levels, [-1.2240064, 0, 1.2240064], rtol=1e-6)


def test_tables_are_shared_and_cannot_be_changed():
    assert lloyd_max(3) is lloyd_max(3)
    with pytest.raises(ValueError):
        lloyd_max(3)[0] = 0


@pytest.mark.parametrize("bits", [0, 9, -1])
def test_other_widths_are_refused(bits):
    with pytest.raises(QuantizationError, match=str(bits)):
        lloyd_max(bits)


def test_boundaries_are_midpoints():
    np.testing.assert_array_equal(boundaries(np.float32([-3, -1, 2])), np.float32([-2, 0.5]))
    assert boundaries(lloyd_max(4))[7] == 0

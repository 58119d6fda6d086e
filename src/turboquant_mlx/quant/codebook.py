"""Tables of reproduction values for rotated weights.

A random rotation makes the entries of a weight nearly normal, so the tables are the
minimum-mean-square quantizers of N(0, 1) (J. Max, 1960; S. P. Lloyd, 1957/1982). Only the
standard library and NumPy are needed. Tables are stored with the weights they decode, so the last
bit of a level may differ between two mathematics libraries without harm.
"""

from __future__ import annotations

import math
from functools import cache
from statistics import NormalDist

import numpy as np

from ..errors import QuantizationError

_SQRT_HALF = math.sqrt(0.5)
_PDF_AT_0 = 1.0 / math.sqrt(2.0 * math.pi)


def _pdf(x: float) -> float:
    return _PDF_AT_0 * math.exp(-0.5 * x * x)


def _upper_tail(x: float) -> float:
    """P(N(0, 1) > x), with full relative precision far out."""
    return 0.5 * math.erfc(x * _SQRT_HALF)


def _freeze(values: np.ndarray) -> np.ndarray:
    values = values.astype(np.float32)
    values.flags.writeable = False
    return values


def _cells(levels: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Borders, density at the borders, mass and mean of every cell; positive half only."""
    borders = np.array([0.0, *(0.5 * (levels[1:] + levels[:-1])), math.inf])
    pdf = np.array([_pdf(b) for b in borders])
    mass = -np.diff(np.array([_upper_tail(b) for b in borders]))
    return borders, pdf, mass, -np.diff(pdf) / mass


def _newton_step(levels: np.ndarray) -> np.ndarray:
    """One Newton step towards "every level is the mean of its cell", positive half only.

    The borders are the midpoints, so the Jacobian is tridiagonal.
    """
    borders, pdf, mass, mean = _cells(levels)
    below = 0.5 * (levels - borders[:-1]) * pdf[:-1] / mass
    below[0] = 0.0  # the border at 0 stays where it is
    above = np.zeros_like(below)
    above[:-1] = 0.5 * (borders[1:-1] - levels[:-1]) * pdf[1:-1] / mass[:-1]
    jacobian = np.diag(1.0 - below - above) - np.diag(below[1:], -1) - np.diag(above[:-1], 1)
    return levels - np.linalg.solve(jacobian, levels - mean)


@cache
def lloyd_max(bits: int) -> np.ndarray:
    """The 2**bits levels of the minimum-mean-square quantizer of N(0, 1).

    Args:
        bits: 1 to 8.

    Returns:
        float32 [2**bits], ascending, exactly antisymmetric, read-only. Converged: every level is
        the mean of its cell to better than 1e-9 before rounding to float32.

    Raises:
        QuantizationError: ``bits`` is outside 1..8.
    """
    if not 1 <= bits <= 8:
        raise QuantizationError(f"no table for {bits} bits (1 to 8 are supported)")
    half = 1 << (bits - 1)
    # The optimum's density of levels tends to the density of N(0, 3) (Panter and Dite, 1951).
    start = NormalDist(0.0, math.sqrt(3.0))
    levels = np.array([start.inv_cdf(0.5 + (i + 0.5) / (2 * half)) for i in range(half)])
    # Lloyd's own iteration first: it cannot diverge and mends the tails, where the start is worst.
    # Alone it would take many thousands of steps at 8 bits.
    for _ in range(200):
        levels = _cells(levels)[3]
    for _ in range(20):
        if np.abs(levels - _cells(levels)[3]).max() < 1e-12:
            break
        levels = _newton_step(levels)
    return _freeze(np.concatenate([-levels[::-1], levels]))


@cache
def ternary() -> np.ndarray:
    """The three levels [-c, 0, c] of the minimum-mean-square ternary quantizer of N(0, 1).

    Returns:
        float32 [3], read-only. c = 1.2240064.
    """
    c = 1.2
    for _ in range(200):
        c = _pdf(0.5 * c) / _upper_tail(0.5 * c)
    return _freeze(np.array([-c, 0.0, c]))


def boundaries(levels: np.ndarray) -> np.ndarray:
    """Decision borders of a table: the midpoints between neighbours.

    Args:
        levels: float32 [n], ascending.

    Returns:
        float32 [n - 1]. A value x belongs to entry ``count(x > borders)``.
    """
    return (0.5 * (levels[1:].astype(np.float64) + levels[:-1])).astype(np.float32)

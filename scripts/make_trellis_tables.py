#!/usr/bin/env python3
"""Train the tables of the trellis codes and print the module that holds them.

    python scripts/make_trellis_tables.py > src/turboquant_mlx/quant/trellis_table.py

A table is trained for N(0, 1) like Lloyd's quantizers: encode a sample, replace every level by the
mean of the values that it stands for, repeat. From a random table that ends in a poor local
minimum (at 3 bits: an error of 0.0233 after 8 rounds, 0.0212 after 200). So fresh samples are
drawn in each round, and noise that fades away is added to the levels, as in simulated annealing
(0.0200). A few minutes for each table; same seed, same table.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from statistics import NormalDist

import numpy as np

from turboquant_mlx.quant.threads import for_each
from turboquant_mlx.quant.viterbi import best_windows, make_trellis

WINDOW = 8
UNIT = 1024
BITS = (2, 3, 4)
LENGTH = 512  # of a stream of the sample
LANES = 256
LARGE = 8  # times LANES streams for the last rounds
COLUMNS = 16

HEADER = '''"""Tables of the trellis codes, made by scripts/make_trellis_tables.py."""

from __future__ import annotations

from functools import cache

import numpy as np

from ..errors import QuantizationError

TRELLIS_WINDOW = 8

# Levels in units of 1/{unit}, indexed by the window.
_LEVELS = {{
{tables}}}

TRELLIS_BITS = tuple(_LEVELS)


@cache
def trellis_table(bits: int) -> np.ndarray:
    """The levels of the trellis code of ``bits`` bits a weight for N(0, 1).

    Args:
        bits: one of TRELLIS_BITS.

    Returns:
        float32 [2**TRELLIS_WINDOW], indexed by the window, in no particular order, read-only.

    Raises:
        QuantizationError: there is none.
    """
    if bits not in _LEVELS:
        raise QuantizationError(f"no trellis table for {{bits}} bits")
    levels = np.array(_LEVELS[bits].split(), np.int32).astype(np.float32) / np.float32({unit})
    levels.flags.writeable = False
    return levels
'''


def first_table(seed: int, window: int) -> np.ndarray:
    """The quantiles of N(0, 1) in random order."""
    normal, size = NormalDist(), 1 << window
    levels = np.array([normal.inv_cdf((i + 0.5) / size) for i in range(size)])
    return np.random.default_rng(seed).permutation(levels).astype(np.float32)


def encode(x: np.ndarray, levels: np.ndarray, bits: int, window: int) -> np.ndarray:
    """Windows of streams x [LENGTH, lanes], LANES at a time on all CPUs."""
    trellis = make_trellis(levels, bits, window)
    windows = np.empty(x.shape, np.int64)

    def work(first: int) -> None:
        lanes = slice(first, first + LANES)
        windows[:, lanes] = best_windows(np.ascontiguousarray(x[:, lanes]), trellis)

    for_each(work, range(0, x.shape[1], LANES))
    return windows


def lloyd(x: np.ndarray, levels: np.ndarray, bits: int, window: int) -> tuple[np.ndarray, float]:
    """One round: the new levels, and the mean square error of the old ones."""
    windows = encode(x, levels, bits, window).ravel()
    error = float(np.square(x.ravel() - levels[windows], dtype=np.float64).mean())
    count = np.bincount(windows, minlength=len(levels))
    total = np.bincount(windows, x.ravel(), len(levels))
    mean = np.where(count > 3, total / np.maximum(count, 1), levels)
    return mean.astype(np.float32), error


def train(bits: int, window: int, seed: int, rounds: int, noise: float) -> np.ndarray:
    """A trained table, float32 [2**window]."""
    rng = np.random.default_rng([seed, bits, window])
    levels = first_table(seed, window)
    began = time.monotonic()
    for i in range(rounds):
        x = rng.standard_normal((LENGTH, LANES), np.float32)
        levels, error = lloyd(x, levels, bits, window)
        heat = max(0.0, 1 - i / (0.9 * rounds)) ** 2 * noise * 2.0 ** (2 - bits)
        levels += np.float32(heat) * rng.standard_normal(len(levels), np.float32)
        if i % 200 == 0:
            print(f"  round {i}: {error:.5f}, {time.monotonic() - began:.0f} s", file=sys.stderr)
    x = rng.standard_normal((LENGTH, LARGE * LANES), np.float32)
    for _ in range(12):
        levels, error = lloyd(x, levels, bits, window)
    return (np.rint(levels * UNIT) / UNIT).astype(np.float32)


def test_error(levels: np.ndarray, bits: int, window: int) -> float:
    """Mean square error on a sample that was not trained on."""
    x = np.random.default_rng(12345).standard_normal((LENGTH, LARGE * LANES), np.float32)
    return lloyd(x, levels, bits, window)[1] / float(np.square(x, dtype=np.float64).mean())


def as_source(bits: int, levels: np.ndarray) -> str:
    """One entry of the dictionary in the module."""
    numbers = [str(int(v)) for v in np.rint(levels * UNIT)]
    rows = [" ".join(numbers[i : i + COLUMNS]) for i in range(0, len(numbers), COLUMNS)]
    return f'    {bits}: """\n' + "".join(f"        {row}\n" for row in rows) + '    """,\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--bits", type=int, nargs="+", default=BITS)
    parser.add_argument("--window", type=int, default=WINDOW)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--noise", type=float, default=0.5)
    args = parser.parse_args()
    tables = ""
    for bits in args.bits:
        levels = train(bits, args.window, args.seed, args.rounds, args.noise)
        error = test_error(levels, bits, args.window)
        ideal = math.log(error) / math.log(0.25)
        print(f"{bits} bits: {error:.5f} ({ideal:.2f} ideal bits)", file=sys.stderr)
        tables += as_source(bits, levels)
    print(HEADER.format(unit=UNIT, tables=tables), end="")


if __name__ == "__main__":
    main()

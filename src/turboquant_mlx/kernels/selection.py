"""How kernels are launched: one table of every number that was chosen by measuring.

``unmeasured default`` says that a number is a reasoned guess.
"""

from __future__ import annotations

from dataclasses import dataclass

from .dialect import Dialect

MATVEC_ROWS = 8
"""Rows of activations up to which a packed weight is multiplied directly; for more it is decoded
first. Unmeasured default."""

ROTATE_ROWS = 64
"""Rows of activations up to which one launch rotates them; MLX's own transform takes more.
Unmeasured default."""

GATHER_ENTRIES = 64
"""(row, expert) pairs up to which experts are multiplied directly. Unmeasured default."""

DECODED_BYTES = 128 * 2**20
"""Bytes of decoded weight at a time where more rows are multiplied. Unmeasured default."""

TABLE_BYTES: dict[Dialect, int] = {"metal": 8 * 2**10, "cuda": 32 * 2**10}
"""Shared memory for the copies of a table. On CUDA as many copies as lanes, or half as many of
pairs, keep lanes out of each other's memory banks; Apple GPUs share 32 KiB between the
threadgroups of a core, so less is taken there. Unmeasured defaults."""


@dataclass(frozen=True)
class Launch:
    """How a matvec is spread over a GPU.

    Attributes:
        outputs: rows of the weight that one warp computes together, a power of two.
        split: warps that share these rows along the input, a power of two.
        warps: warps in a threadgroup, a multiple of ``split``.
    """

    outputs: int
    split: int
    warps: int


_WARPS: dict[Dialect, int] = {"metal": 1024, "cuda": 2048}
"""Warps that keep a large GPU busy. Unmeasured defaults."""


def matvec_launch(
    dialect: Dialect, outputs: int, width: int, rows: int, unit: int, copies: int = 1
) -> Launch:
    """The launch for ``rows`` (1 to 8) activations and ``copies`` weights [outputs, width].

    ``unit`` is the number of weights that a lane takes before its warp may stop.
    """
    steps = -(-width // (32 * unit))
    most = 1  # warps that can share outputs
    while most < 8 and 2 * most <= steps:
        most *= 2
    each = 8 if rows <= 2 else 4  # unmeasured default: what registers hold
    while each > 2 and outputs * copies * most < _WARPS[dialect] // 2 * each:
        each //= 2
    if outputs < 2 * each:
        each = 1
    split = 1
    while split < most and outputs * copies * split < _WARPS[dialect] * each:
        split *= 2
    return Launch(outputs=each, split=split, warps=8)


def table_copies(dialect: Dialect, entry_bytes: int, paired: bool) -> int:
    """Copies of a table whose one copy has so many bytes."""
    copies = 1
    while copies < (16 if paired else 32) and 2 * copies * entry_bytes <= TABLE_BYTES[dialect]:
        copies *= 2
    return copies

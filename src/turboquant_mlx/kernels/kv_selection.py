"""How the kernels of the key-value cache are launched: every number that was chosen by measuring.

``unmeasured default`` says that a number is a reasoned guess.
"""

from __future__ import annotations

from dataclasses import dataclass

from .dialect import Dialect

QUERIES = 64
"""Queries of one head of keys up to which a kernel answers. Unmeasured default."""

RAW_TOKENS = 1024
"""Tokens in 16 bits that the first pass takes beside packed ones: one threadgroup reads them all.
Unmeasured default."""

SHARED_BYTES: dict[Dialect, int] = {"metal": 24 * 2**10, "cuda": 47 * 2**10}
"""Shared memory of a threadgroup of the first pass, of which the tables' copies take what is left.
With as many copies as lanes these never meet in a memory bank; Apple GPUs share 32 KiB between the
threadgroups of a core. Unmeasured defaults."""

COMBINE_SLICES = 4
"""Threads that share the partial results of a dimension in the second pass. Unmeasured default."""

MOST_PARTS = 512
"""Partial results of a query that the second pass adds up."""

GROUPS: dict[Dialect, dict[tuple[int, int], int]] = {
    "metal": {(4, 1): 256},
    "cuda": {(4, 1): 396, (4, 2): 264, (8, 1): 264},
}
"""By warps of a threadgroup and tiles of a warp: threadgroups that keep a large GPU busy. CUDA: the
132 multiprocessors of an H200, measured for (4, 2) and (8, 1), see ``LONG``; otherwise
unmeasured."""

MOST_WARPS = 2112
"""Warps in all where ``GROUPS`` says nothing."""


@dataclass(frozen=True)
class AttendLaunch:
    """How the first pass is spread over a GPU.

    Attributes:
        tensor: whether the matrix units multiply (CUDA alone).
        rows: queries that a threadgroup answers; 8 or 16 with matrix units.
        tiles: tiles of 16 tokens that a warp takes at a time with matrix units.
        warps: warps of a threadgroup.
        splits: parts of the context; 0 for as many as ``GROUPS`` asks for.
    """

    tensor: bool
    rows: int
    tiles: int = 1
    warps: int = 8
    splits: int = 0


LONG = 8192
"""Columns from which on larger threadgroups pay on the matrix units. H200, K3/V4, 8 heads of keys,
microseconds with 4 warps of two tiles and with 8 of one (bench_attention.py --sweep): 4,096 columns
15.0 and 15.6, in a batch of 8 25.4 and 32.4, 32,768 columns 28.0 and 25.4, 131,072 70 and 53."""


def attend_launch(
    tensor: bool, rows: int, width: int, bits: int, long: bool = True
) -> AttendLaunch:
    """The launch for ``rows`` queries of a head of keys.

    Args:
        tensor: whether the matrix units may be used.
        width: values of a head of the wider side.
        bits: of a code of the wider side.
        long: whether there are ``LONG`` columns.
    """
    if tensor:
        # Two products with the same operand share its decoding, if registers hold both sums. Codes
        # of more than 4 bits take more registers, and small threadgroups waste fewer of them.
        each = 16 if rows > 8 and width <= 128 else 8
        if bits > 4:
            return AttendLaunch(True, each, warps=4)
        if long or each > 8 or width > 128:
            return AttendLaunch(True, each, warps=8)
        return AttendLaunch(True, each, tiles=2, warps=4)
    most = 8 if width <= 128 else 4 if width <= 256 else 2
    each = 1
    while each < most and each < rows:
        each *= 2
    return AttendLaunch(False, each, warps=4)


def split_limits(
    dialect: Dialect, launch: AttendLaunch, groups: int, beside: bool = False
) -> tuple[int, int]:
    """Parts into which the columns are cut at most, and the columns of a part at least.

    All parts run at the same time, as those that wait for a place would double the time.

    Args:
        groups: threadgroups that each part takes.
        beside: whether there are ``groups`` more for tokens in 16 bits and sinks. They are short,
            so where parts are few they are left to run last.
    """
    step = launch.warps * (16 * launch.tiles if launch.tensor else 32)
    busy = GROUPS[dialect].get((launch.warps, launch.tiles), MOST_WARPS // launch.warps)
    wanted = launch.splits or max(1, busy // groups)
    if beside and not launch.splits and wanted >= 8:
        wanted -= 1
    return min(wanted, MOST_PARTS - 1), step


def table_copies(
    tensor: bool, key_bits: int, value_bits: int, rest: int, shared: int
) -> tuple[int, int]:
    """Copies of the tables of keys and of values, at most one for each lane.

    Args:
        tensor: whether the tables are those of the matrix units.
        rest: bytes of shared memory that are needed beside the tables.
        shared: bytes of shared memory in all.
    """

    def size(bits: int) -> int:
        if tensor:
            return 4 << (2 * bits if bits <= 4 else bits)
        return 8 << 2 * bits if bits <= 4 else 4 << bits

    one, two = size(key_bits), size(value_bits)
    most = 32 if tensor else 16
    left = shared - rest
    if tensor and key_bits == value_bits:  # one table serves both
        copies = 1
        while copies < most and 2 * copies * one <= left:
            copies *= 2
        return copies, copies
    keys = values = 1
    while True:
        larger = [
            (a, b)
            for a, b in ((2 * keys, values), (keys, 2 * values))
            if max(a, b) <= most and a * one + b * two <= left
        ]
        if not larger:
            return keys, values
        keys, values = min(larger, key=lambda copies: abs(copies[0] - copies[1]))

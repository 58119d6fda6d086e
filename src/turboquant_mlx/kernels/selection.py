"""How kernels are launched: one table of every number that was chosen by measuring.

Each number says what it was measured on; ``unmeasured`` says that it is a reasoned guess.
``scripts/bench_kernels.py --sweep`` measures them on the machine that it runs on and prints the
lines of ``MATVEC_LAUNCHES`` that it would write.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..quant.spec import QuantSpec
from .dialect import Dialect

MATVEC_ROWS = 8
"""Rows of activations up to which a packed weight is multiplied directly; for more it is decoded
first. H200, 14336 x 4096, 3-bit trellis, 8 rows: 30 us directly; decoding takes 46, a product in 16
bits another 30."""

ROTATE_FEW: dict[Dialect, int] = {"metal": 16, "cuda": 256}
"""Rows of activations up to which a threadgroup rotates a block; of more, a warp. H200, width 4096:
64 rows 2.9 us and 4.7, 512 rows 9.2 and 6.2, 4096 rows 57 and 46. Unmeasured on Metal."""

ROTATE_ROWS: dict[Dialect, int] = {"metal": 65535, "cuda": 65535}
"""Rows of activations up to which one launch rotates them; MLX's own transform takes more.
H200: MLX's operations take 8.6 us for 64 rows, 19 for 512, 119 for 4096, thrice as long at all."""

GATHER_PER_EXPERT: dict[Dialect, float] = {"metal": 2.0, "cuda": 8.0}
"""(row, expert) pairs for each expert of a stack up to which experts are multiplied directly, pair
by pair; for more the stack is decoded. H200, 128 experts of 768 x 2048: 8 pairs 10 us and decoded
288, 512 pairs 285 and 783, 1024 pairs 549 and 789. Unmeasured on Metal."""

DECODED_BYTES: dict[Dialect, int] = {"metal": 64 * 2**20, "cuda": 128 * 2**20}
"""Bytes of decoded weight at a time where more rows are multiplied. H200, 14336 x 4096, 512 rows,
by the host's clock: 159 us with 128 MiB (the whole matrix), 196 with 64, 223 with 32; a product in
16 bits takes 108."""

IN_FLIGHT_BYTES: dict[Dialect, int] = {"metal": 64 * 2**20, "cuda": 128 * 2**20}
"""Decoded bytes after which work is handed to the GPU, see ``in_flight``; up to three times as many
are in memory at once. H200, 8B-shaped model of 3 bits, prompt of 512 tokens, with ``DECODED_BYTES``
of 128 MiB 16,200 tokens/s and 1.04 GB beyond the weights at 256 MiB, 16,700 and 0.71 at 128; with
64 of both 8,600 and 0.48 (the key-value cache and what a layer works with are about 0.25 of that).
Unmeasured on Metal: a GPU of a tenth of that speed is not kept waiting by pieces of 64 MiB, and
there memory is what people lack."""

TABLE_BYTES: dict[Dialect, int] = {"metal": 8 * 2**10, "cuda": 32 * 2**10}
"""Shared memory for the copies of a table. On CUDA as many copies as lanes, or fewer of wider
entries, keep lanes out of each other's memory banks; Apple GPUs share 32 KiB between the
threadgroups of a core, so less is taken there. Unmeasured."""

Codec = Literal["scalar", "trellis", "ternary"]
SizeClass = Literal["small", "middle", "wide", "large", "huge"]


@dataclass(frozen=True)
class Launch:
    """How a matvec is spread over a GPU.

    Attributes:
        outputs: rows of the weight that one warp computes together, a power of two. On CUDA 16 or
            more are tiles, see ``TILE_ROWS``, where activation and weight suit.
        split: warps that share these rows along the input, a power of two.
        warps: warps in a threadgroup, a multiple of ``split``.
    """

    outputs: int
    split: int
    warps: int


MATVEC_LAUNCHES: dict[Dialect, dict[tuple[Codec, SizeClass], dict[int, Launch]]] = {
    # NVIDIA H200, MLX 0.32.4 for CUDA 13, float16, 3 bits, microseconds by the GPU's own clock. The
    # numbers are rows of activations up to which a launch counts; what is not here goes by
    # ``launch_by_rule``. Three rows and more go by ``TILE_LAUNCHES`` where they can.
    "cuda": {
        ("trellis", "small"): {1: Launch(4, 2, 8), 4: Launch(4, 2, 8)},  # 5.1, 5.6
        ("scalar", "small"): {1: Launch(4, 2, 8), 4: Launch(4, 2, 8)},  # 3.7, 4.2
        ("trellis", "middle"): {1: Launch(8, 4, 8), 4: Launch(4, 2, 8), 8: Launch(2, 1, 8)},
        # 10.7, 15.0, 24.4
        ("scalar", "middle"): {1: Launch(4, 4, 8), 4: Launch(4, 2, 8), 8: Launch(4, 1, 8)},
        # 6.7, 11.9, 19.8
        ("trellis", "wide"): {1: Launch(4, 4, 8), 4: Launch(4, 2, 8), 8: Launch(2, 1, 8)},
        # 27.2, 35.6, 68.6
        ("scalar", "wide"): {1: Launch(4, 4, 8), 4: Launch(4, 2, 8), 8: Launch(4, 1, 8)},
        # 18.3, 29.5, 55.7
        ("trellis", "large"): {1: Launch(8, 1, 8), 4: Launch(4, 1, 8), 8: Launch(4, 1, 4)},
        # 23.4, 40.4, 63.1
        ("scalar", "large"): {1: Launch(4, 1, 4), 4: Launch(4, 1, 8), 8: Launch(8, 1, 4)},
        # 14.9, 31.1, 53.7
        ("trellis", "huge"): {4: Launch(8, 1, 4), 8: Launch(4, 1, 8)},
        # 147.7, 261.4, 469.2
        ("scalar", "huge"): {8: Launch(8, 1, 4)},  # 87.9 for one row, 389.3
    },
    # Nothing has been measured on Apple silicon.
    "metal": {},
}


TILE_ROWS = 3
"""Rows of activations from which on a warp of CUDA multiplies tiles of sixteen outputs by all of
them at once (``matvec_bodies``, TENSOR_ROWS). Unmeasured."""

TILE_UNIT = 32
"""Weights that a lane of a tile decodes at a time, at most: 32 take 80 registers for a trellis code
and one tile, 16 take 56 but more loads. Unmeasured."""

TILE_LAUNCHES: dict[tuple[Codec, SizeClass], dict[int, Launch]] = {
    # As above, bfloat16, 3 bits and 8 rows. In brackets microseconds of the best launch that takes
    # a row at a time, from another run.
    ("scalar", "small"): {8: Launch(16, 16, 16)},  # 2.6 (5.1)
    ("trellis", "small"): {8: Launch(16, 16, 16)},  # 3.3 (6.6)
    ("scalar", "middle"): {8: Launch(16, 16, 16)},  # 8.4 (19.8)
    ("trellis", "middle"): {8: Launch(32, 8, 8)},  # 10.6 (24.4)
    ("scalar", "wide"): {8: Launch(16, 16, 16)},  # 22.5 (55.7)
    ("trellis", "wide"): {8: Launch(32, 8, 8)},  # 29.2 (68.6)
    ("scalar", "large"): {8: Launch(32, 8, 8)},  # 24.4 (53.7)
    ("trellis", "large"): {8: Launch(32, 4, 16)},  # 29.7 (63.1)
    ("scalar", "huge"): {8: Launch(32, 8, 8)},  # 175.4 (389.3)
    ("trellis", "huge"): {8: Launch(32, 2, 8)},  # 213.2 (469.2)
}
"""Launches of tiles, as ``MATVEC_LAUNCHES``; what is not here goes by ``tile_launch_by_rule``.
Shared memory must hold the partial sums beside the table: outputs times warps is at most 512."""

_TILE_WARPS = 3072
"""Warps of tiles that keep a large GPU busy: each waits for its look-ups most of the time, and
registers hold 24 to 32 of them on a multiprocessor. Unmeasured."""

_MOST_TILE_SPLIT = 16
"""Warps that share a tile along the input at most. Unmeasured."""


def size_class(outputs: int, width: int) -> SizeClass:
    """The class of a launch over ``outputs`` rows of weights, of all its matrices together.

    What is measured for each: 1536 x 576, 4096 x 4096, 4096 x 14336, 14336 x 4096, 128256 x 4096.
    """
    if outputs > 2**16:
        return "huge"
    if outputs > 2**13:
        return "large"
    if outputs < 2**11:
        return "small"
    return "wide" if width > 2**13 else "middle"


def codec_of(spec: QuantSpec) -> Codec:
    """What a weight's decoding costs."""
    if spec.code == "ternary":
        return "ternary"
    return "trellis" if spec.is_trellis else "scalar"


def matvec_launch(
    dialect: Dialect,
    codec: Codec,
    outputs: int,
    width: int,
    rows: int,
    unit: int,
    copies: int = 1,
) -> Launch:
    """The launch for ``rows`` (1 to 8) activations and ``copies`` weights [outputs, width].

    ``unit`` is the number of weights that a lane takes before its warp may stop.
    """
    lines = MATVEC_LAUNCHES[dialect].get((codec, size_class(outputs * copies, width)), {})
    for up_to, launch in sorted(lines.items()):
        if rows <= up_to:
            return _fitted(launch, outputs, width, unit)
    return launch_by_rule(dialect, outputs, width, rows, unit, copies)


def _fitted(launch: Launch, outputs: int, width: int, unit: int) -> Launch:
    """A launch of the table, for a weight that is not the one which was measured."""
    each = launch.outputs
    split = min(launch.split, most_split(width, unit))
    return Launch(1 if outputs < 2 * each else each, split, launch.warps)


def most_outputs(rows: int) -> int:
    """Outputs of a warp whose sums registers hold. Unmeasured."""
    return 8 if rows <= 2 else 4


def most_split(width: int, unit: int) -> int:
    """Warps that can share outputs without one of them idle."""
    steps = -(-width // (32 * unit))
    most = 1
    while most < 8 and 2 * most <= steps:
        most *= 2
    return most


_WARPS: dict[Dialect, int] = {"metal": 1024, "cuda": 2048}
"""Warps that keep a large GPU busy. Unmeasured."""


def launch_by_rule(
    dialect: Dialect, outputs: int, width: int, rows: int, unit: int, copies: int = 1
) -> Launch:
    """The launch where the table has none: enough warps first, many outputs of a warp second."""
    most = most_split(width, unit)
    each = most_outputs(rows)
    while each > 2 and outputs * copies * most < _WARPS[dialect] // 2 * each:
        each //= 2
    if outputs < 2 * each:
        each = 1
    split = 1
    while split < most and outputs * copies * split < _WARPS[dialect] * each:
        split *= 2
    return Launch(outputs=each, split=split, warps=8)


def tile_launch(codec: Codec, outputs: int, width: int, rows: int, step: int) -> Launch:
    """The launch of tiles for ``rows`` activations and a weight [outputs, width].

    ``step`` is the number of weights of an output that a warp takes at a time.
    """
    lines = TILE_LAUNCHES.get((codec, size_class(outputs, width)), {})
    for up_to, launch in sorted(lines.items()):
        if rows <= up_to:
            each = launch.outputs if outputs >= launch.outputs else 16
            split = min(launch.split, most_tile_split(width, step))
            return Launch(each, split, launch.warps)
    return tile_launch_by_rule(codec, outputs, width, step)


def most_tile_split(width: int, step: int) -> int:
    """Warps that can share tiles without one of them idle."""
    most = 1
    while most < _MOST_TILE_SPLIT and 2 * most * step <= width:
        most *= 2
    return most


def tile_launch_by_rule(codec: Codec, outputs: int, width: int, step: int) -> Launch:
    """The launch of tiles where the table has none. Unmeasured.

    Two tiles of a warp share its activations, where there are warps enough. The table of a trellis
    takes all the shared memory that a threadgroup is given, so there more warps share it.
    """
    each = 32 if outputs >= 32 * _TILE_WARPS else 16
    most, split = most_tile_split(width, step), 1
    while split < most and outputs * split < _TILE_WARPS * each:
        split *= 2
    return Launch(each, split, 16 if codec == "trellis" else max(8, split))


def gather_entries(dialect: Dialect, experts: int) -> int:
    """Pairs up to which experts of a stack are multiplied directly; a token's always are."""
    return max(8, int(GATHER_PER_EXPERT[dialect] * experts))


def table_copies(dialect: Dialect, table_bytes: int, most: int) -> int:
    """Copies, at most ``most``, of a table of which one has so many bytes."""
    copies = 1
    while copies < most and 2 * copies * table_bytes <= TABLE_BYTES[dialect]:
        copies *= 2
    return copies

"""How one weight is quantized: a small frozen record, validated where it is made.

No MLX here: the planner and the recipe use it too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ..errors import QuantizationError

Code = Literal["scalar", "ternary"]
ScaleLayout = Literal["float16", "log8"]

SCALAR_BITS = (1, 2, 3, 4, 5, 6, 7, 8)
GROUP_SIZES = (16, 32, 64, 128)
SCALE_BITS: dict[str, int] = {"float16": 16, "log8": 8}
TRITS_PER_WORD = 20
WORD_BITS = 32


@dataclass(frozen=True)
class QuantSpec:
    """Everything that the decoder of one weight must know besides its arrays.

    Attributes:
        code: "scalar" (a table of 2**window_bits values indexed by a bit stream) or "ternary"
            (three values, 20 trits in a 32-bit word).
        bits: bits that each weight adds to the stream, 1 to 8. Ignored for ternary (stored as 2).
        window_bits: bits of the stream that select a table entry; equal to ``bits`` for a plain
            scalar code, larger for a trellis code.
        tile: weights per independent stretch of a row's stream; 0 means the whole row. The window
            of a tile's last weights wraps to the tile's own beginning, so no code crosses a tile.
        group_size: consecutive weights of a row that share one scale.
        scale_layout: how scales are stored, "float16" or "log8".
        rotation_block: length of the Hadamard blocks along the input; 1 means no rotation.
        qjl: whether a 1-bit sketch of the residual is stored as well.
    """

    code: Code = "scalar"
    bits: int = 3
    window_bits: int = 0
    tile: int = 0
    group_size: int = 64
    scale_layout: ScaleLayout = "float16"
    rotation_block: int = 1
    qjl: bool = False

    def __post_init__(self) -> None:
        if self.code not in ("scalar", "ternary"):
            raise QuantizationError(f"unknown code {self.code!r}")
        if self.code == "ternary":
            object.__setattr__(self, "bits", 2)
            object.__setattr__(self, "window_bits", 2)
        if not self.window_bits:
            object.__setattr__(self, "window_bits", self.bits)
        if self.bits not in SCALAR_BITS:
            raise QuantizationError(f"{self.bits} bits are not supported (1 to 8 are)")
        if not self.bits <= self.window_bits <= 16:
            raise QuantizationError(
                f"a window of {self.window_bits} bits does not fit a code of {self.bits} bits"
            )
        if self.tile < 0 or (self.tile * self.bits) % WORD_BITS:
            raise QuantizationError(f"a tile of {self.tile} weights does not fill whole words")
        if self.group_size < 1:
            raise QuantizationError(f"group size {self.group_size} is not positive")
        if self.scale_layout not in SCALE_BITS:
            raise QuantizationError(f"unknown scale layout {self.scale_layout!r}")
        if self.rotation_block < 1:
            raise QuantizationError(f"rotation block {self.rotation_block} is not positive")

    @property
    def is_trellis(self) -> bool:
        """Whether neighbouring weights share bits of the stream."""
        return self.window_bits > self.bits

    @property
    def table_size(self) -> int:
        """Entries of the table of values."""
        return 3 if self.code == "ternary" else 1 << self.window_bits

    def words_per_row(self, width: int) -> int:
        """32-bit words that hold the codes of one row of ``width`` weights."""
        if self.code == "ternary":
            return -(-width // TRITS_PER_WORD)
        return -(-width * self.bits // WORD_BITS)

    def packed_bytes(self, shape: tuple[int, ...]) -> int:
        """Stored bytes of a weight of this shape: codes, scales, table and QJL sketch.

        The input multiplier is not counted: a whole rotation group shares it.
        """
        *lead, width = shape
        rows = 1
        for n in lead:
            rows *= n
        n_bytes = rows * 4 * self.words_per_row(width) + 4 * self.table_size
        n_bytes += rows * (width // self.group_size) * SCALE_BITS[self.scale_layout] // 8
        if self.qjl:
            n_bytes += rows * (4 * -(-width // WORD_BITS) + 2)
        return n_bytes

    def with_(self, **changes) -> QuantSpec:
        """A copy with some fields changed (window_bits follows bits unless given)."""
        if "bits" in changes and "window_bits" not in changes:
            changes["window_bits"] = 0
        return replace(self, **changes)

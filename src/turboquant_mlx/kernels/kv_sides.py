"""What the kernels of the key-value cache are told: how both sides are packed, where tokens are."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from ..quant.rotation import hadamard_matrix


class KVSide(NamedTuple):
    """How the keys or the values of a head are packed.

    Attributes:
        bits: of a code.
        width: values of a head.
        group: values to a scale.
        affine: scale and bias (MLX's own quantization) in place of a byte and a table.
        block: length of the Hadamard blocks; 1 where nothing is rotated.
    """

    bits: int
    width: int
    group: int
    affine: bool
    block: int

    @property
    def base(self) -> int:
        """Order of the block's part that is no power of two."""
        return next(b for b in (1, 12, 20, 28) if _is_power(self.block, b))


def _is_power(block: int, base: int) -> bool:
    power = block // base
    return block % base == 0 and power & (power - 1) == 0


def constants(sides: tuple[KVSide, KVSide], signs: list, levels: list) -> mx.array:
    """What the kernels need to know of the codecs, as one array.

    Args:
        sides: keys, values.
        signs: [width] of +1 and -1 for each.
        levels: [2**bits] for each.
    """
    scaled = [s / math.sqrt(side.block) for side, s in zip(sides, signs, strict=True)]
    parts = [*scaled, *(base_matrix(s.base) for s in sides), *levels]
    return mx.array(np.concatenate([np.asarray(p, np.float32).reshape(-1) for p in parts]))


def base_matrix(base: int) -> np.ndarray:
    """float32 [base, base] of +1 and -1: what a block has beside Sylvester's matrix."""
    return np.sign(hadamard_matrix(base)).astype(np.float32)


def sizes_of(sides: tuple[KVSide, KVSide]) -> list[tuple[str, int]]:
    """Template arguments of kernels that take both sides: widths, bits, groups and blocks."""
    key, value = sides
    return [
        ("D", key.width),
        ("DV", value.width),
        ("KB", key.bits),
        ("VB", value.bits),
        ("KGROUP", key.group),
        ("VGROUP", value.group),
        ("KBASE", key.base),
        ("VBASE", value.base),
        ("KPOWER", key.block // key.base),
        ("VPOWER", value.block // value.base),
    ]


def packed_inputs(
    keys: tuple[mx.array, ...], values: tuple[mx.array, ...], facts: mx.array
) -> tuple[mx.array, ...]:
    """Codes, scales and biases of both sides; ``facts`` in place of biases that there are not."""
    return (*keys, facts)[:3] + (*values, facts)[:3]


class KVRows(NamedTuple):
    """Where the tokens of a batch are.

    Attributes:
        columns: in use.
        padding: columns before each row's first token.
        raw: tokens of each row that are held in 16 bits.
    """

    columns: int
    padding: tuple[int, ...]
    raw: tuple[int, ...]


@lru_cache(maxsize=64)
def meta_of(
    rows: KVRows, splits: int, capacity: int, raw_capacity: int, strides: tuple[int, int, int]
) -> mx.array:
    """The numbers that change while a text grows; one array serves all layers of a step."""
    values = [splits, rows.columns, capacity, raw_capacity, *strides, 0]
    for padding, raw in zip(rows.padding, rows.raw, strict=True):
        values += [padding, raw, min(padding + raw, rows.columns), rows.columns]
    return mx.array(values, dtype=mx.int32)

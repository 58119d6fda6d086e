"""Code the keys or values of one head vector by vector; nothing of one token touches another.

A vector x [width] of a key or value becomes ``y = H (signs * (x - shift))``: ``shift`` is a fixed
mean key (none for values), H an orthonormal block Hadamard matrix with an exact inverse. Each group
of ``group`` entries of y is stored as ``scale * table[code]``: table is the minimum-mean-square
quantizer of N(0, 1), codes are a dense stream of ``bits`` bits in uint32 words (``quant.packing``),
scale is one byte, a float of 5 exponent and 3 mantissa bits (``decode_scale``).

The scale is searched: of the seven neighbouring bytes around the group's RMS the one whose
rounded vector is nearest, error measured after rounding. With 64 or 128 values behind a scale
that is worth a quarter of the error at 4 bits.

The same bits come out however many tokens are coded at once, and on NumPy as on MLX's CPU: the
transform and all sums are additions in a fixed order (halves are added, ``fold``). Coding works
through pieces of ``PIECE`` values, so its workspace does not grow with the input.

The scheme "uniform" is MLX's own affine quantization (``mx.quantize``), not rotated, for
comparison and for those who ask for it.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ..kernels import dispatch, kv_store
from ..kernels.dialect import Dialect
from ..kernels.kv_sides import KVSide
from ..kernels.kv_sides import constants as attend_constants
from ..quant.bfloat16 import widen
from ..quant.codebook import boundaries, lloyd_max
from ..quant.packing import pack_codes, unpack_codes
from ..quant.rotation import hadamard_columns, is_supported_block, random_signs, rotate, unrotate
from .lookup import look_up
from .spec import KVSpec

Array = Any  # np.ndarray or mx.array
Parts = tuple[mx.array, ...]
"""Stored arrays [B, H, T, n] of one side: (codes, scales), or (codes, scales, biases)."""

PIECE = 2**14
"""Values that are coded at a time; each takes about 100 bytes of workspace."""
MLX_PIECE = 2**17
"""The same where every operation is a launch of its own."""

SEED = 42
_TRIALS = np.arange(-3, 4)
_CELLS = 4096
_EXPONENT = (
    127 - 16
) << 3  # byte 0 stands for 0; byte u > 0 for the float of bits (u + this) << 20


@cache
def rotation_block(width: int) -> int:
    """Length of the Hadamard blocks for a head: the longest supported one that divides ``width``.

    Blocks of 20 * 2^k and 28 * 2^k, whose matrices are not symmetric, are used too (head sizes
    80, 112, 160, 224): the inverse is the transpose.
    """
    return max(n for n in range(1, width + 1) if width % n == 0 and is_supported_block(n))


@cache
def signs(width: int, side: str) -> np.ndarray:
    """float32 [width] of +1 and -1: the fixed signs of keys or values, the same in every layer."""
    values = random_signs(width, SEED, f"kv {side}").astype(np.float32)
    values.flags.writeable = False
    return values


@cache
def _grid(bits: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Nearest code and its level for each of _CELLS cells from -span to span, and span.

    A value is in cell ``(v + span) * cells / (2 span)``. A cell that holds a border counts to the
    side of its middle: at most 1/2000 of a standard deviation from the true border.
    """
    levels = lloyd_max(bits)
    borders = boundaries(levels)
    span = float(max(1.25 * borders[-1], 0.5))
    middles = (np.arange(_CELLS) + 0.5) * (2 * span / _CELLS) - span
    codes = np.searchsorted(borders, middles).astype(np.uint8)
    return codes, levels[codes], span


def decode_scale(scales: Array) -> Array:
    """float32 scales of their bytes; NumPy or MLX.

    Byte 0 is 0; byte u is ``2**(u // 8 - 16) * (1 + (u % 8) / 8)``, from 1.7e-5 to 61440.
    """
    xp = np if isinstance(scales, np.ndarray) else mx
    wide = scales.astype(xp.uint32)
    bits = (wide + xp.array(_EXPONENT, dtype=xp.uint32)) << xp.array(20, dtype=xp.uint32)
    return bits.view(xp.float32) * (wide > 0)


def fold(x: Array, axis: int) -> Array:
    """Sum over an axis by adding its halves until one is left, whatever else the shape is."""
    n = x.shape[axis]
    head = (slice(None),) * axis
    while n > 1:
        half = n // 2
        folded = x[(*head, slice(0, half))] + x[(*head, slice(half, 2 * half))]
        if n % 2:  # an odd one joins the first
            xp = np if isinstance(x, np.ndarray) else mx
            first = folded[(*head, slice(0, 1))] + x[(*head, slice(n - 1, n))]
            folded = xp.concatenate([first, folded[(*head, slice(1, half))]], axis=axis)
        x, n = folded, half
    return x


def _search(y: Array, bits: int) -> tuple[Array, Array]:
    """Codes and scale bytes of rotated groups.

    Args:
        y: float32 [groups, group, vectors], NumPy or MLX.

    Returns:
        (uint8 codes of y's shape, uint8 scales [groups, vectors]).
    """
    on_numpy = isinstance(y, np.ndarray)
    xp: Any = np if on_numpy else mx
    codes, levels, span = _grid(bits)
    group = y.shape[1]
    mean_square = fold(y * y, 1)[:, 0] * xp.array(1.0 / group, dtype=xp.float32)
    rms = xp.sqrt(mean_square)
    nearest = (rms.view(xp.uint32) + xp.array(1 << 19, dtype=xp.uint32)) >> xp.array(
        20, dtype=xp.uint32
    )
    byte = nearest.astype(xp.int32) - _EXPONENT
    trials = xp.array(_TRIALS.astype(np.int32))[:, None, None] + byte
    trials = xp.clip(trials, 1, 255)  # [trials, groups, vectors]
    scale = decode_scale(trials)
    inverse = xp.array(1.0, dtype=xp.float32) / scale
    scaled = y[None] * inverse[:, :, None]
    cell = _cell(xp, scaled, span)
    away = scaled - (levels.take(cell) if on_numpy else mx.take(mx.array(levels), cell))
    error = fold(away * away, 2)[:, :, 0] * (scale * scale)
    best = error.argmin(axis=0) if on_numpy else mx.argmin(error, axis=0)
    chosen = xp.take_along_axis(trials, best[None].astype(xp.int32), axis=0)[0]
    exact_zero = rms == 0
    cell = xp.take_along_axis(cell, best[None, :, None].astype(xp.int32), axis=0)[0]
    index = codes.take(cell) if on_numpy else mx.take(mx.array(codes), cell)
    return index, (chosen * ~exact_zero).astype(xp.uint8)


def _cell(xp: Any, scaled: Array, span: float) -> Array:
    """int32 number of the cell of each value; what lies outside belongs to the outermost cells."""
    position = (scaled + xp.array(span, dtype=xp.float32)) * xp.array(
        _CELLS / (2 * span), dtype=xp.float32
    )
    return xp.clip(position, 0, _CELLS - 1).astype(xp.int32)


class SideCodec(NamedTuple):
    """The codec of one side (keys or values) of a cache.

    Attributes:
        side: "key" or "value".
        scheme: "turboquant" or "uniform".
        bits: 1 to 8.
        width: values of a head.
        group: values that share a scale; divides ``width``.
    """

    side: str
    scheme: str
    bits: int
    width: int
    group: int

    @classmethod
    def of(cls, spec: KVSpec, side: str, width: int) -> SideCodec:
        """The codec that ``spec`` asks for, for heads of ``width`` values.

        Raises:
            OptionError: the group size does not divide the head.
        """
        scheme = spec.key_scheme if side == "key" else spec.value_scheme
        bits = spec.key_bits if side == "key" else spec.value_bits
        return cls(side, scheme, bits, width, spec.group_of(scheme, width))

    @property
    def rotated(self) -> bool:
        """Whether vectors are stored rotated."""
        return self.scheme == "turboquant"

    @property
    def words(self) -> int:
        """uint32 words of a vector's codes."""
        return -(-self.width * self.bits // 32)

    def empty(self, batch: int, heads: int, tokens: int, dtype: mx.Dtype) -> Parts:
        """Zeroed storage for so many tokens; ``dtype`` is that of the uniform scheme's scales."""
        groups = self.width // self.group
        lead = (batch, heads, tokens)
        codes = mx.zeros((*lead, self.words), dtype=mx.uint32)
        if self.rotated:
            return codes, mx.zeros((*lead, groups), dtype=mx.uint8)
        return codes, *(mx.zeros((*lead, groups), dtype=dtype) for _ in range(2))

    # -- coding -------------------------------------------------------------------------------

    def encode(self, x: mx.array, shift: mx.array | None = None) -> Parts:
        """Code vectors.

        Args:
            x: [B, H, T, width], floating.
            shift: [B, H, 1, width] taken off first, or None.

        Returns:
            (codes uint32 [B, H, T, words], scales uint8 [B, H, T, width / group]); the uniform
            scheme has scales and biases in x's dtype instead.
        """
        return encode_sides([(self, x, shift)])[0]

    def _encode_numpy(self, x: np.ndarray, shift: np.ndarray | None) -> tuple[Array, Array]:
        batch, heads, tokens, width = x.shape
        codes = np.empty((batch, heads, tokens, self.words), np.uint32)
        scales = np.empty((batch, heads, tokens, width // self.group), np.uint8)
        step = max(1, PIECE // (heads * width))
        for row in range(batch):
            for start in range(0, tokens, step):
                piece = widen(x[row, :, start : start + step])
                if shift is not None:
                    piece = piece - widen(shift[row])
                vectors = (piece * signs(width, self.side)).reshape(-1, width)
                y = hadamard_columns(np.ascontiguousarray(vectors.T), rotation_block(width))
                with np.errstate(invalid="ignore", over="ignore"):
                    index, scale = _search(y.reshape(-1, self.group, len(vectors)), self.bits)
                index = np.ascontiguousarray(index.reshape(width, -1).T)
                lead = piece.shape[:2]
                end = start + lead[1]
                codes[row, :, start:end] = pack_codes(index, self.bits).reshape(*lead, -1)
                scales[row, :, start:end] = scale.T.reshape(*lead, -1)
        return codes, scales

    def _encode_mlx(self, x: mx.array, shift: mx.array | None) -> Parts:
        batch, heads, tokens, width = x.shape
        step = max(1, MLX_PIECE // (batch * heads * width))
        pieces: list[Parts] = []
        for start in range(0, tokens, step):
            piece = x[:, :, start : start + step].astype(mx.float32)
            if shift is not None:
                piece = piece - shift.astype(mx.float32)
            lead = piece.shape[:-1]
            y = rotate(piece, rotation_block(width), signs(width, self.side))
            y = y.reshape(-1, width // self.group, self.group).transpose(1, 2, 0)
            index, scale = _search(y, self.bits)
            index = index.transpose(2, 0, 1).reshape(*lead, width)
            pieces.append((pack_codes(index, self.bits), scale.T.reshape(*lead, -1)))
        if len(pieces) == 1:
            return pieces[0]
        return tuple(mx.concatenate(list(part), axis=2) for part in zip(*pieces, strict=True))

    # -- decoding -----------------------------------------------------------------------------

    def decode_stored(self, parts: Parts) -> mx.array:
        """float32 [..., width] as it is stored: rotated where the codec rotates. Lazy."""
        if not self.rotated:
            codes, scales, biases = parts
            x = mx.dequantize(codes, scales, biases, group_size=self.group, bits=self.bits)
            return x.astype(mx.float32)
        codes, scales = parts
        index = unpack_codes(codes, self.bits, self.width)
        values = mx.take(mx.array(lloyd_max(self.bits)), index)
        groups = values.reshape(*scales.shape, self.group) * decode_scale(scales)[..., None]
        return groups.reshape(values.shape)

    def decode_stored_numpy(self, parts: tuple[np.ndarray, ...]) -> np.ndarray:
        """The same from NumPy arrays; the uniform scheme's are decoded by the caller.

        The result is overwritten by the next call for the same side in the same thread.
        """
        codes, scales = parts
        values = look_up(codes, self.bits, self.width, self.side)
        groups = values.reshape(*scales.shape, self.group)
        groups *= decode_scale(scales)[..., None]
        return values

    def decode(self, parts: Parts, shift: mx.array | None, dtype: mx.Dtype) -> mx.array:
        """[..., width] in ``dtype``: rotated back, ``shift`` [B, H, 1, width] added. Lazy."""
        x = self.unrotate(self.decode_stored(parts))
        if shift is not None:
            x = x + shift.astype(mx.float32)
        return x.astype(dtype)

    def rotate(self, x: Array) -> Array:
        """x [..., width] (float32) into the stored domain, so that products with stored vectors
        are those of the vectors themselves. NumPy or MLX."""
        if not self.rotated:
            return x
        if isinstance(x, np.ndarray):
            return x @ rotation_matrix(self.width, self.side).T
        return rotate(x, rotation_block(self.width), signs(self.width, self.side))

    def unrotate(self, y: Array) -> Array:
        """The exact inverse of ``rotate``."""
        if not self.rotated:
            return y
        if isinstance(y, np.ndarray):
            return y @ rotation_matrix(self.width, self.side)
        return unrotate(y, rotation_block(self.width), signs(self.width, self.side))


def bits_of(x: mx.array) -> mx.array:
    """``x`` as NumPy can read it: bfloat16 as its bits. ``widen`` makes float32 of either."""
    return x.view(mx.uint16) if x.dtype == mx.bfloat16 else x


def encode_sides(sides: list[tuple[SideCodec, mx.array, mx.array | None]]) -> list[Parts]:
    """``SideCodec.encode`` of several sides, with one evaluation for all on a CPU and one launch
    for keys and values together on a GPU."""
    if coded := _encode_pair(sides):
        return coded
    readable: list[tuple[mx.array, ...]] = []
    on_cpu = dispatch.backend() == "cpu"
    if on_cpu:
        # NumPy has no bfloat16; widening to float32 comes later, piece by piece
        for codec, *arrays in sides:
            given = [a for a in arrays if a is not None] if codec.rotated else []
            readable.append(tuple(bits_of(a) for a in given))
        on_cpu = not dispatch.is_traced(*(a for some in readable for a in some))
    out: list[Parts] = []
    for i, (codec, x, shift) in enumerate(sides):
        if not codec.rotated:
            out.append(tuple(mx.quantize(x, group_size=codec.group, bits=codec.bits)))
        elif on_cpu:
            plain = [np.array(a, copy=False) for a in readable[i]]
            codes, scales = codec._encode_numpy(plain[0], plain[1] if len(plain) > 1 else None)
            out.append((mx.array(codes), mx.array(scales)))
        else:
            out.append(codec._encode_mlx(x, shift))
    return out


def _encode_pair(sides: list[tuple[SideCodec, mx.array, mx.array | None]]) -> list[Parts] | None:
    """``encode_sides`` of keys and values by a kernel, or None if it does not take them."""
    if len(sides) != 2 or sides[1][2] is not None:
        return None
    (key, keys, shift), (value, values, _) = sides
    dialect = dispatch.kernels_of_backend(keys.dtype)
    if dialect is None or keys.dtype != values.dtype or keys.shape[:3] != values.shape[:3]:
        return None
    if kv_store.why_no_kernel(kernel_sides(key, value), keys):
        return None
    coded = kernel_encoder(key, value, shift is not None, dialect)(
        keys, values, *(() if shift is None else (shift,))
    )
    return [(coded[0], coded[1]), (coded[2], coded[3])]


@lru_cache(maxsize=64)
def kernel_encoder(
    key: SideCodec, value: SideCodec, shift: bool, dialect: Dialect
) -> kv_store.Encoder:
    """The kernel that codes keys and values; ``kv_store.why_no_kernel`` must have been asked."""
    facts, cells = _store_facts(key, value)
    sides = kernel_sides(key, value)
    return kv_store.encoder(sides, dialect, shift=shift, facts=facts, cells=cells)


@lru_cache(maxsize=64)
def kernel_sides(key: SideCodec, value: SideCodec) -> tuple[KVSide, KVSide]:
    """The codecs of keys and values as kernels know them."""
    one, two = (
        KVSide(c.bits, c.width, c.group, not c.rotated, rotation_block(c.width) if c.rotated else 1)
        for c in (key, value)
    )
    return one, two


@lru_cache(maxsize=64)
def kernel_facts(key: SideCodec, value: SideCodec) -> mx.array:
    """What the kernels that read packed arrays need to know of the codecs."""
    codecs = (key, value)
    return attend_constants(
        kernel_sides(key, value),
        [signs(c.width, c.side) if c.rotated else np.ones(c.width) for c in codecs],
        [lloyd_max(c.bits) if c.rotated else np.zeros(1 << c.bits) for c in codecs],
    )


@lru_cache(maxsize=64)
def _store_facts(key: SideCodec, value: SideCodec) -> tuple[mx.array, tuple[mx.array, mx.array]]:
    codecs = (key, value)
    grids = [_grid(c.bits) for c in codecs]
    facts = kv_store.constants(
        kernel_sides(key, value),
        [signs(c.width, c.side) for c in codecs],
        [lloyd_max(c.bits) for c in codecs],
        (grids[0][2], grids[1][2]),
        _CELLS,
    )
    cells = (mx.array(grids[0][0]), mx.array(grids[1][0]))
    return facts, cells


@cache
def rotation_matrix(width: int, side: str) -> np.ndarray:
    """float32 [width, width]: R with ``y = R x``; its transpose is its inverse."""
    columns = np.diag(signs(width, side))
    matrix = hadamard_columns(np.ascontiguousarray(columns), rotation_block(width))
    matrix.flags.writeable = False
    return matrix

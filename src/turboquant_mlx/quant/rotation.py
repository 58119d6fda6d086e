"""The input rotation: a vector of multipliers, then a block Hadamard transform.

H_n = kron(H_m, S) / sqrt(n) with n = m * 2**k, S the Sylvester matrix of order 2**k and H_m the
matrix of order 1, 12, 20 or 28 that ``mx.hadamard_transform`` uses. H_1, H_12 and S are symmetric,
so those transforms are their own inverse; H_20 and H_28 are not, and their inverse is the
transpose. Only m = 1 and 12 are used for new weights; 20 and 28 occur in files of the predecessor.

``mx.hadamard_transform`` does not check its size (a length of 36 corrupts memory), so everything
here goes through ``check_block`` first.
"""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache
from typing import Any

import numpy as np

from ..errors import QuantizationError

BLOCK_LIMIT = 1024
ROTATIONS = ("hadamard", "blockwise_hadamard", "none")

# mx.hadamard_transform documents powers of two up to 8192 in float32; longer ones are split.
_MAX_POWER = 8192

# Rows of the base matrices in hexadecimal, the first column in the highest bit, 1 for +1.
_BASE_ROWS = {
    12: "bff 2aa ec3 896 fb0 a25 cec 989 c3b 962 f0e a58",
    20: "84336 4238b 211d5 108fa 0866d 7c139 ba29c d914e e88a7 f0653 "
    "35a0f 1ad17 8d49b c685d 6343e 49a10 a0d08 54484 2e042 93021",
    28: "818694c 41c14a6 20e2a13 1071549 0838ae4 041e532 030d299 3d019d2 1e82ca9 8e43654 "
    "c621b2a e210d95 f00a6ca 7807325 5b3201e ac9900f 564c847 ab24463 d590271 6ac8178 "
    "b4640bc 66b70c0 b35b820 d8adc10 6d54e08 37a8704 9ad4382 cd6a181",
}


def _split(n: int) -> tuple[int, int] | None:
    """(m, 2**k) with n = m * 2**k and m in {1, 12, 20, 28}, or None."""
    for m in (1, 12, 20, 28):
        power, rest = divmod(n, m)
        if not rest and power and power & (power - 1) == 0:
            return m, power
    return None


def is_supported_block(n: int) -> bool:
    """Whether a Hadamard transform of length n exists here: n = m * 2**k, m in {1, 12, 20, 28}."""
    return n > 0 and _split(n) is not None


def check_block(width: int, block: int) -> None:
    """Raise QuantizationError unless ``block`` is supported and divides ``width``."""
    if not is_supported_block(block):
        raise QuantizationError(f"a rotation block of {block} is not supported")
    if width % block:
        raise QuantizationError(f"a rotation block of {block} does not divide a width of {width}")


def block_size(width: int, limit: int = BLOCK_LIMIT) -> int:
    """The largest 2**k or 12 * 2**k that divides ``width`` and is at most ``limit``."""
    best = 1
    for m in (1, 12):
        n = m
        while n <= limit and width % n == 0:
            best = max(best, n)
            n *= 2
    return best


def rotation_block(width: int, rotation: str, group_size: int) -> int:
    """Length of the Hadamard blocks for an input of ``width`` values; 1 means no transform.

    Args:
        width: input width of the weight.
        rotation: "hadamard": the largest permitted block; "blockwise_hadamard": the largest one
            that also divides ``group_size``, so a rotation stays inside one scale group and never
            mixes values of different groups; "none": no transform.
        group_size: consecutive weights that share one scale.

    Raises:
        QuantizationError: unknown rotation.
    """
    if rotation == "none":
        return 1
    if rotation == "hadamard":
        return block_size(width)
    if rotation == "blockwise_hadamard":
        return block_size(math.gcd(width, group_size))
    raise QuantizationError(f"unknown rotation {rotation!r} ({', '.join(ROTATIONS)} are known)")


@lru_cache(maxsize=32)
def _base_matrix(m: int, power: int = 1) -> np.ndarray:
    """kron(H_m, Sylvester of order ``power``), entries +-1, float32."""
    matrix = np.ones((1, 1), np.float32)
    if m > 1:
        rows = _BASE_ROWS[m].split()
        bits = [[int(row, 16) >> (m - 1 - j) & 1 for j in range(m)] for row in rows]
        matrix = np.float32(2) * np.array(bits, np.float32) - np.float32(1)
    while power > 1:
        matrix = np.kron(matrix, np.array([[1, 1], [1, -1]], np.float32))
        power //= 2
    matrix.flags.writeable = False
    return matrix


def hadamard_matrix(n: int) -> np.ndarray:
    """The orthonormal matrix H of length n, so that a transformed vector is H @ v.

    Args:
        n: a supported block length.

    Returns:
        float32 [n, n].

    Raises:
        QuantizationError: n is not supported.
    """
    check_block(n, n)
    m, power = _split(n) or (1, 1)
    return _base_matrix(m, power) * np.float32(1.0 / math.sqrt(n))


_GOLDEN = 0x9E3779B97F4A7C15


def random_signs(width: int, seed: int, label: str) -> np.ndarray:
    """Random signs that depend on nothing but the arguments.

    The key is the first 8 bytes, little-endian, of the SHA-256 of ``f"{seed}:{label}"`` in UTF-8.
    Word w of the random stream is SplitMix64's output function of key + (w + 1) * golden ratio,
    modulo 2**64 (Steele, Lea and Flood, 2014); sign i is +1 where bit i % 64 of word i // 64 is 1.

    Args:
        width: number of signs.
        seed: the user's seed.
        label: what the signs are for.

    Returns:
        int8 [width] of +1 and -1.
    """
    digest = hashlib.sha256(f"{seed}:{label}".encode()).digest()
    key = int.from_bytes(digest[:8], "little")
    n_words = -(-width // 64)
    counters = [(key + (w + 1) * _GOLDEN) % 2**64 for w in range(n_words)]
    z = np.array(counters, dtype=np.uint64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    bits = (z[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
    return (bits.reshape(-1)[:width].astype(np.int8) << 1) - np.int8(1)


def _transform(x: Any, block: int, inverse: bool) -> Any:
    """H (or its transpose) on blocks of the last axis of a float32 MLX array."""
    import mlx.core as mx

    shape = x.shape
    check_block(shape[-1], block)
    if block == 1 or x.size == 0:
        return x
    m, power = _split(block) or (1, 1)
    inner = min(power, _MAX_POWER)
    outer = block // inner
    if inner > 1 and power == inner and (m in (1, 12) or not inverse):
        y = mx.hadamard_transform(x.reshape(*shape[:-1], shape[-1] // block, block))
        return y.reshape(shape)
    # H = kron(B, S): S along the fast axis, the small dense B (or B^T) along the slow one.
    y = x.reshape(*shape[:-1], shape[-1] // block, outer, inner)
    if inner > 1:
        y = mx.hadamard_transform(y)
    base = _base_matrix(m, power // inner)
    matrix = mx.array(base.T if inverse else base)
    # CUDA multiplies float32 in TF32 (11 significant bits): the +-1 are exact in it, and so are
    # the leading bits of y; the rest goes separately.
    high = (y.view(mx.uint32) & 0xFFFFE000).view(mx.float32)
    y = (matrix @ high + matrix @ (y - high)) * (1.0 / math.sqrt(outer))
    return y.reshape(shape)


def rotate(x: Any, block: int, multiplier: Any = None) -> Any:
    """H (multiplier * x) along the last axis.

    Args:
        x: mx.array [..., width], floating.
        block: Hadamard block length that divides width; 1 for no transform.
        multiplier: [width] or None.

    Returns:
        mx.array of x's shape and dtype; computed in float32.

    Raises:
        QuantizationError: unsupported block, or one that does not divide the width.
    """
    import mlx.core as mx

    y = x.astype(mx.float32)
    if multiplier is not None:
        y = y * mx.array(multiplier).astype(mx.float32)
    return _transform(y, block, inverse=False).astype(x.dtype)


def unrotate(y: Any, block: int, multiplier: Any = None) -> Any:
    """The exact inverse of ``rotate``: H^T y / multiplier, same arguments and errors."""
    import mlx.core as mx

    x = _transform(y.astype(mx.float32), block, inverse=True)
    if multiplier is not None:
        x = x / mx.array(multiplier).astype(mx.float32)
    return x.astype(y.dtype)


def hadamard_columns(x: np.ndarray, block: int, transpose: bool = False) -> np.ndarray:
    """H (or H^T) on blocks of the first axis of a NumPy array; vectors run along the rest.

    With the transformed axis first, every addition works on contiguous rows, and the result does
    not depend on a BLAS or its number of threads.

    Args:
        x: float32 [width, ...], C-contiguous; **overwritten**.
        block: supported block length that divides width.
        transpose: apply H^T, the inverse.

    Returns:
        float32 of x's shape, maybe x itself.
    """
    check_block(x.shape[0], block)
    if block == 1:
        return x
    m, power = _split(block) or (1, 1)
    shape = x.shape
    n_blocks = shape[0] // block
    row = math.prod(shape[1:])
    x, spare = x.reshape(-1), np.empty(x.size, np.float32)
    half = 1
    while half < power:
        pairs = x.reshape(-1, 2, half * row)
        into = spare.reshape(-1, 2, half * row)
        np.add(pairs[:, 0], pairs[:, 1], out=into[:, 0])
        np.subtract(pairs[:, 0], pairs[:, 1], out=into[:, 1])
        x, spare = spare, x
        half *= 2
    if m > 1:
        source = x.reshape(n_blocks, m, power * row)
        into = spare.reshape(n_blocks, m, power * row)
        base = _base_matrix(m)
        for i, signs in enumerate(base.T if transpose else base):
            target = into[:, i]
            np.multiply(source[:, 0], signs[0], out=target)
            for j in range(1, m):
                (np.add if signs[j] > 0 else np.subtract)(target, source[:, j], out=target)
        x = spare
    x *= np.float32(1.0 / math.sqrt(block))
    return x.reshape(shape)

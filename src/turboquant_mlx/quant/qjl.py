"""A 1-bit sketch of what quantization left over (QJL, Zandieh et al., 2024, applied to weights).

For a residual row r in the stored domain: B = sign(H (sigma * r)) and ||r||, with random signs
sigma and the block transform H of the weight's own rotation. For a Gaussian projection P to m
values, sqrt(pi/2) * ||r|| * <B, P x> / m is an unbiased estimate of <r, x>; a Hadamard transform
with random signs stands in for it, so

    <r, x>  is estimated by  sqrt(pi/2) / sqrt(I) * ||r|| * <B, H (sigma * x)>

and the dense residual that has the same effect is sqrt(pi/2) / sqrt(I) * ||r|| * sigma * (H^T B).

Unbiased is not close: that estimate leaves pi/2 - 1 = 57 % of the residual's energy. In place of
||r|| we store the number v that makes the dense residual the nearest to r, which leaves
1 - 2/pi = 36 % (the constant becomes sqrt(2/pi), the least mean square error). Decoding is the same
for both, so sketches with the true norm, the predecessor's, are read as they were meant.
"""

from __future__ import annotations

import math
from typing import Any

from .packing import unpack_codes
from .rotation import unrotate


def sketch_factor(width: int) -> float:
    """sqrt(pi / 2) / sqrt(width)."""
    return math.sqrt(0.5 * math.pi / width)


def best_norm(sums: Any, width: int) -> Any:
    """The v for which the decoded sketch is nearest to the residual.

    Args:
        sums: NumPy or MLX [...], the sum of |H (sigma * r)| of each row.
        width: input width I.

    Returns:
        of the same shape and type.
    """
    # the dense residual is c * d with d = sigma * (H^T B): |d|^2 = I and <r, d> = sums
    return sums / (width * sketch_factor(width))


def decode_sketch(codes: Any, norms: Any, multiplier: Any, width: int, block: int) -> Any:
    """The dense residual of a sketch, in the stored domain.

    Args:
        codes: uint32 mx.array [..., ceil(width / 32)]; bit 1 means +1, bit 0 means -1.
        norms: mx.array [...], per row, see ``best_norm``.
        multiplier: [width], the signs sigma.
        width: input width.
        block: Hadamard block length, that of the weight's own rotation.

    Returns:
        float32 mx.array [..., width].
    """
    import mlx.core as mx

    signs = unpack_codes(codes, 1, width).astype(mx.float32) * 2.0 - 1.0
    scale = norms.astype(mx.float32)[..., None] * sketch_factor(width)
    return unrotate(signs, block) * (multiplier.astype(mx.float32) * scale)

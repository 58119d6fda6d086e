"""Products with a packed matrix in plain MLX: the reference, and the path of every GPU.

The weight is decoded in bounded blocks of rows, in its stored (rotated) domain and in the dtype
of the activation, and multiplied with MLX's own matrix product. Kernels that read packed words
directly will share these signatures.
"""

from __future__ import annotations

import mlx.core as mx

from ..quant.weight import PackedWeight, dequantize_rows

BLOCK_BYTES = 64 * 2**20
"""Bytes of the activation dtype that decoded rows may take at a time."""


def packed_matmul(x: mx.array, weight: PackedWeight, use_qjl: bool = True) -> mx.array:
    """``x W'^T`` for a rotated activation and a packed 2-D weight.

    Args:
        x: [..., I] in the stored domain (``quant.rotation.rotate`` has been applied).
        weight: packed (O, I).
        use_qjl: whether the residual's sketch, if there is one, counts.

    Returns:
        [..., O] in the dtype of ``x``.
    """
    rows, width = weight.shape
    step = max(1, BLOCK_BYTES // (x.itemsize * width))
    parts = []
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        dense = dequantize_rows(weight, start, stop, use_qjl=use_qjl, dtype=x.dtype)
        parts.append(x @ dense.T)
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)

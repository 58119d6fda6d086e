"""Products with packed experts in plain MLX: the reference, and the path of every GPU.

Few rows: the packed words of just the experts that are named are gathered and decoded, one small
matrix per row. Many rows: the stack is decoded in bounded blocks of experts and handed to
``mx.gather_mm``; rows whose expert lies outside a block are computed and masked away.
"""

from __future__ import annotations

import mlx.core as mx

from ..quant.weight import PackedWeight, dequantize_rows
from .matmul import BLOCK_BYTES

EXPERT_BLOCK_BYTES = 8 * BLOCK_BYTES
"""Bytes of the activation dtype that decoded experts may take at a time."""


def gather_matmul(
    x: mx.array,
    weight: PackedWeight,
    indices: mx.array,
    sorted_indices: bool = False,
    use_qjl: bool = True,
) -> mx.array:
    """``x W'_e^T`` with the expert e of each row, as ``mx.gather_mm`` pairs them.

    Args:
        x: [..., n, I] in the stored domain; leading axes broadcast against ``indices``.
        weight: packed (E, O, I).
        indices: expert numbers.
        sorted_indices: whether ``indices`` ascend (a hint).
        use_qjl: whether the residual's sketch, if there is one, counts.

    Returns:
        [broadcast..., n, O] in the dtype of ``x``.
    """
    experts, rows, width = weight.shape
    expert_bytes = rows * width * x.itemsize
    if indices.size * expert_bytes <= EXPERT_BLOCK_BYTES and indices.size < experts:
        chosen = _decode(weight.experts(indices.reshape(-1)), use_qjl, x.dtype)
        return x @ chosen.reshape(*indices.shape, rows, width).swapaxes(-1, -2)
    # MLX's CPU build has gather_mm for float32 alone
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    dtype = mx.float32 if on_cpu else x.dtype
    step = max(1, EXPERT_BLOCK_BYTES // expert_bytes)
    out = None
    for start in range(0, experts, step):
        stop = min(start + step, experts)
        y = mx.gather_mm(
            x.astype(dtype),
            _decode(weight.rows(start, stop), use_qjl, dtype).swapaxes(-1, -2),
            rhs_indices=mx.clip(indices, start, stop - 1) - start,
            sorted_indices=sorted_indices,
        ).astype(x.dtype)
        if step < experts:
            inside = (indices >= start) & (indices < stop)
            y = mx.where(inside[..., None, None], y, mx.zeros_like(y))
        out = y if out is None else out + y
    assert out is not None
    return out


def _decode(stack: PackedWeight, use_qjl: bool, dtype: mx.Dtype) -> mx.array:
    """A stack of experts [E, O, I] in the stored domain, lazy."""
    experts, rows, _ = stack.shape
    dense = dequantize_rows(stack, 0, experts * rows, use_qjl=use_qjl, dtype=dtype)
    return dense.reshape(stack.shape)

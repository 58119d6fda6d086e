"""Products with packed experts on a GPU, and the reference in plain MLX.

Few rows: a kernel multiplies each by the packed words of its own expert, and no other expert is
read; one launch does so for the gate and up projections, which read the same rows. Many rows: the
stack is decoded in bounded blocks of experts and handed to ``mx.gather_mm``; rows whose expert lies
outside a block are computed and masked away.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from ..quant.weight import PackedWeight, dequantize_rows
from .dialect import Dialect
from .expand import expand
from .in_flight import note_decoded
from .matmul import BLOCK_BYTES, has_sketch, kernel_dialect, sketch_input, sketch_of
from .matvec import gather_matvec, joint_gather
from .selection import gather_entries

EXPERT_BLOCK_BYTES = 8 * BLOCK_BYTES
"""Bytes of the activation dtype that decoded experts may take at a time."""


def gather_matmul(
    x: mx.array,
    weight: PackedWeight,
    indices: mx.array,
    sorted_indices: bool = False,
    use_qjl: bool = True,
    *,
    gradients: bool = False,
) -> mx.array:
    """``x W'_e^T`` with the expert e of each row, as ``mx.gather_mm`` pairs them.

    Args:
        x: [..., n, I] in the stored domain; leading axes broadcast against ``indices``.
        weight: packed (E, O, I).
        indices: expert numbers.
        sorted_indices: whether ``indices`` ascend (a hint).
        use_qjl: whether the residual's sketch, if there is one, counts.
        gradients: whether a gradient by ``x`` may be asked for, see ``matmul.packed_matmul``.

    Returns:
        [broadcast..., n, O] in the dtype of ``x``.
    """
    dialect = kernel_dialect(x, weight)
    if dialect is None:
        return portable_gather(x, weight, indices, sorted_indices, use_qjl)
    if gradients:
        return _differentiable(weight, indices, sorted_indices, use_qjl, dialect)(x)
    return _kernel_gather(x, weight, indices, sorted_indices, use_qjl, dialect)


def are_few(x: mx.array, indices: mx.array, experts: int, dialect: Dialect) -> bool:
    """Whether there are so few pairs of rows and ``experts`` that packed words are multiplied."""
    if x.size == 0 or x.shape[-2] != 1:
        return False
    pairs = math.prod(np.broadcast_shapes(x.shape[:-2], indices.shape))
    return pairs <= gather_entries(dialect, experts)


def joint_gather_matmul(
    x: mx.array, weights: Sequence[PackedWeight], indices: mx.array, dialect: Dialect
) -> list[mx.array]:
    """``gather_matmul`` for two stacks that read the same rows, in one launch; no QJL.

    Args:
        x, indices: as there, such that ``are_few``.
        weights: packed (E, O_i, I) that ``matvec.why_not_jointly`` has nothing against.
        dialect: of the kernel.

    Returns:
        [broadcast..., 1, O_i] of each in the dtype of ``x``, lazy.
    """
    flat, chosen, lead = _entries(x, indices)
    products = joint_gather(flat, weights, chosen, dialect)
    return [y.reshape(*lead, 1, y.shape[-1]) for y in products]


def portable_gather(
    x: mx.array,
    weight: PackedWeight,
    indices: mx.array,
    sorted_indices: bool = False,
    use_qjl: bool = True,
) -> mx.array:
    """``gather_matmul`` in plain MLX: the reference."""
    experts, rows, width = weight.shape
    if indices.size * rows * width * x.itemsize <= EXPERT_BLOCK_BYTES and indices.size < experts:
        chosen = _decode(weight.experts(indices.reshape(-1)), use_qjl, x.dtype)
        return x @ chosen.reshape(*indices.shape, rows, width).swapaxes(-1, -2)
    return _in_blocks(
        x, weight, indices, sorted_indices, lambda part, dtype: _decode(part, use_qjl, dtype)
    )


def _in_blocks(
    x: mx.array,
    weight: PackedWeight,
    indices: mx.array,
    sorted_indices: bool,
    decode: Callable[[PackedWeight, mx.Dtype], mx.array],
) -> mx.array:
    """Blocks of experts are decoded and multiplied by ``mx.gather_mm``."""
    experts, rows, width = weight.shape
    # MLX's CPU build has gather_mm for float32 alone
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    dtype = mx.float32 if on_cpu else x.dtype
    step = max(1, EXPERT_BLOCK_BYTES // (rows * width * x.itemsize))
    out = None
    for start in range(0, experts, step):
        stop = min(start + step, experts)
        dense = decode(weight.rows(start, stop), dtype)
        y = mx.gather_mm(
            x.astype(dtype),
            dense.swapaxes(-1, -2),
            rhs_indices=mx.clip(indices, start, stop - 1) - start,
            sorted_indices=sorted_indices,
        ).astype(x.dtype)
        n_bytes = dense.nbytes
        del dense  # the graph alone holds it, until it has been used
        note_decoded(y, n_bytes)
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


def _kernel_gather(
    x: mx.array,
    weight: PackedWeight,
    indices: mx.array,
    sorted_indices: bool,
    use_qjl: bool,
    dialect: Dialect,
) -> mx.array:
    with_sketch = has_sketch(weight, use_qjl)
    if not are_few(x, indices, weight.shape[0], dialect):
        return decoded_gather(x, weight, indices, sorted_indices, with_sketch, dialect)
    flat, chosen, lead = _entries(x, indices)
    if with_sketch:
        y = gather_matvec(flat, weight, chosen, dialect, dtype=mx.float32)
        y = y + gather_matvec(
            sketch_input(flat, weight, dialect),
            sketch_of(weight),
            chosen,
            dialect,
            dtype=mx.float32,
        )
        y = y.astype(x.dtype)
    else:
        y = gather_matvec(flat, weight, chosen, dialect)
    return y.reshape(*lead, 1, y.shape[-1])


def decoded_gather(
    x: mx.array,
    weight: PackedWeight,
    indices: mx.array,
    sorted_indices: bool,
    with_sketch: bool,
    dialect: Dialect,
) -> mx.array:
    """``gather_matmul`` for many rows: blocks of experts are decoded by a kernel."""

    def decode(part: PackedWeight, dtype: mx.Dtype) -> mx.array:
        if with_sketch:
            return _decode(part, True, dtype)
        return expand(part.flat(), dtype, dialect).reshape(part.shape)

    return _in_blocks(x, weight, indices, sorted_indices, decode)


def _entries(x: mx.array, indices: mx.array) -> tuple[mx.array, mx.array, tuple[int, ...]]:
    """Rows [n, I] and experts [entries] as ``gather_matvec`` pairs them, and the leading shape."""
    lead = np.broadcast_shapes(x.shape[:-2], indices.shape)
    if indices.shape != lead:
        indices = mx.broadcast_to(indices, lead)
    # mlx-lm's decode: the k experts of a token share its activation
    if x.shape[:-2] not in (lead, (*lead[:-1], 1)):
        x = mx.broadcast_to(x, (*lead, *x.shape[-2:]))
    return x.reshape(-1, x.shape[-1]), indices.reshape(-1), lead


def _differentiable(weight, indices, sorted_indices, use_qjl, dialect):
    """The product as a function of ``x`` that has a vector-Jacobian product."""

    @mx.custom_function
    def product(x: mx.array) -> mx.array:
        return _kernel_gather(x, weight, indices, sorted_indices, use_qjl, dialect)

    @product.vjp
    def product_vjp(x, cotangent, _):
        def same(v: mx.array) -> mx.array:
            return portable_gather(v, weight, indices, sorted_indices, use_qjl)

        return mx.vjp(same, [x], [cotangent])[1][0]

    return product

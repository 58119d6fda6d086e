"""Products with a packed matrix on a GPU, and the reference in plain MLX.

A few activations are multiplied by a kernel that reads packed words (``matvec``). For more, the
weight is decoded in bounded blocks of rows, in its stored (rotated) domain and in the dtype of the
activation, and multiplied with MLX's own matrix product; a kernel decodes where there is one.

The QJL sketch of a residual is one more packed weight, of one bit: its product is added.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import mlx.core as mx

from ..quant.qjl import sketch_factor
from ..quant.spec import QuantSpec
from ..quant.weight import PackedWeight, dequantize_rows
from .dialect import Dialect
from .dispatch import kernels_of_backend
from .expand import expand
from .in_flight import note_decoded
from .matvec import matvec
from .rotate import rotate_rows
from .selection import DECODED_BYTES, MATVEC_ROWS
from .unpack import why_no_kernel

BLOCK_BYTES = 64 * 2**20
"""Bytes of the activation dtype that rows decoded by plain MLX may take at a time."""


def packed_matmul(
    x: mx.array, weight: PackedWeight, use_qjl: bool = True, *, gradients: bool = False
) -> mx.array:
    """``x W'^T`` for a rotated activation and a packed 2-D weight.

    Args:
        x: [..., I] in the stored domain (``quant.rotation.rotate`` has been applied).
        weight: packed (O, I).
        use_qjl: whether the residual's sketch, if there is one, counts.
        gradients: whether a gradient by ``x`` may be asked for; kernels have none of their own,
            and to give them one costs some microseconds a call.

    Returns:
        [..., O] in the dtype of ``x``.
    """
    dialect = kernel_dialect(x, weight)
    if dialect is None:
        return portable_matmul(x, weight, use_qjl)
    if gradients:
        return _differentiable(weight, use_qjl, dialect)(x)
    return _kernel_matmul(x, weight, use_qjl, dialect)


def kernel_dialect(x: mx.array, weight: PackedWeight) -> Dialect | None:
    """The dialect of the kernels that can multiply these, or None for the portable way."""
    dialect = kernels_of_backend(x.dtype)
    return None if dialect is None or x.size == 0 or why_no_kernel(weight) else dialect


def portable_matmul(x: mx.array, weight: PackedWeight, use_qjl: bool = True) -> mx.array:
    """``packed_matmul`` in plain MLX: the reference."""
    rows, width = weight.shape
    step = max(1, BLOCK_BYTES // (x.itemsize * width))
    parts = []
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        dense = dequantize_rows(weight, start, stop, use_qjl=use_qjl, dtype=x.dtype)
        parts.append(x @ dense.T)
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)


def sketch_of(weight: PackedWeight) -> PackedWeight:
    """The QJL sketch as a weight: times ``H (sigma * x)`` it is what the residual adds."""
    assert weight.qjl_codes is not None and weight.qjl_norms is not None
    width = weight.shape[-1]
    factor = sketch_factor(width)
    return replace(
        weight,
        spec=QuantSpec(bits=1, group_size=width, rotation_block=weight.spec.rotation_block),
        codes=weight.qjl_codes,
        scales=weight.qjl_norms[..., None],
        table=mx.array([-factor, factor]),
        qjl_codes=None,
        qjl_norms=None,
        qjl_multiplier=None,
    )


def sketch_input(x: mx.array, weight: PackedWeight, dialect: Dialect) -> mx.array:
    """What the sketch multiplies."""
    assert weight.qjl_multiplier is not None
    return rotate_rows(x, weight.spec.rotation_block, weight.qjl_multiplier, dialect)


def has_sketch(weight: PackedWeight, use_qjl: bool) -> bool:
    return use_qjl and weight.qjl_codes is not None


def _kernel_matmul(x: mx.array, weight: PackedWeight, use_qjl: bool, dialect: Dialect) -> mx.array:
    with_sketch = has_sketch(weight, use_qjl)
    if x.size <= MATVEC_ROWS * weight.shape[-1]:
        if not with_sketch:
            return matvec(x, weight, dialect)
        y = matvec(x, weight, dialect, dtype=mx.float32)
        signs = sketch_input(x, weight, dialect)
        sketch = matvec(signs, sketch_of(weight), dialect, dtype=mx.float32)
        return (y + sketch).astype(x.dtype)
    y = _expand_and_multiply(x, weight, dialect)
    if with_sketch:
        signs = sketch_input(x, weight, dialect)
        y = y + _expand_and_multiply(signs, sketch_of(weight), dialect)
    return y


def _expand_and_multiply(x: mx.array, weight: PackedWeight, dialect: Dialect) -> mx.array:
    parts = []
    for dense, _, _ in dense_blocks(weight, x.dtype, dialect):
        parts.append(x @ dense.T)
        n_bytes = dense.nbytes
        del dense  # the graph alone holds it, until it has been used
        note_decoded(parts[-1], n_bytes)
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)


def dense_blocks(
    weight: PackedWeight, dtype: mx.Dtype, dialect: Dialect
) -> Iterator[tuple[mx.array, int, int]]:
    """Blocks of decoded rows with their first row and their end."""
    rows, width = weight.shape
    step = max(1, DECODED_BYTES[dialect] // (dtype.size * width))
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        block = weight if stop - start == rows else weight.rows(start, stop)
        yield expand(block, dtype, dialect), start, stop


def _differentiable(weight: PackedWeight, use_qjl: bool, dialect: Dialect):
    """The product as a function of ``x`` that has a vector-Jacobian product."""

    @mx.custom_function
    def product(x: mx.array) -> mx.array:
        return _kernel_matmul(x, weight, use_qjl, dialect)

    @product.vjp
    def product_vjp(x, cotangent, _):
        if has_sketch(weight, use_qjl):
            return mx.vjp(lambda v: portable_matmul(v, weight, True), [x], [cotangent])[1][0]
        total = None
        for dense, start, stop in dense_blocks(weight, cotangent.dtype, dialect):
            part = cotangent[..., start:stop] @ dense
            total = part if total is None else total + part
        assert total is not None
        return total.astype(x.dtype)

    return product

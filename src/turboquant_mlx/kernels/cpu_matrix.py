"""Products with a big constant matrix on the CPU: numpy's BLAS instead of MLX's.

MLX's CPU wheel links the reference BLAS, and its quantized product is slower still for 16-bit
activations, so every large matrix of one of our models goes through here on the CPU. A matrix is
described by a function that produces float32 rows of it. Either all rows are expanded at the first
use and kept (``keep=True``: 4 bytes a weight, fastest), or a bounded block of rows is expanded,
used and dropped on each call (for models whose float32 form would not fit).

Gradients pass through: the product is an ``mx.custom_function`` with its own vector-Jacobian
product. Inside ``mx.compile`` or ``mx.vmap`` nothing here can run; callers test
``dispatch.is_traced`` and take the portable path.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np

from ..quant.bfloat16 import widen
from ..quant.threads import usable_cpus
from .blas import one_thread, pieces_of, share
from .dispatch import is_differentiated

BLOCK_BYTES = 4 * 2**20
"""Float32 bytes of the rows that a thread expands at a time."""

SHARED_PRODUCT = 8 * 2**20
"""Multiplications from which on a product is worth sharing between threads."""


def as_numpy(x: mx.array) -> np.ndarray:
    """A float32 view (or copy, for other dtypes) of an evaluated array.

    No MLX operation is used where that can be helped: each costs a turn of MLX's thread.
    """
    if x.dtype == mx.float32:
        return np.array(x, copy=False)
    if x.dtype == mx.bfloat16:
        try:
            bits = np.frombuffer(x, np.uint16)  # type: ignore[call-overload]
            return widen(bits).reshape(x.shape)
        except (BufferError, ValueError):  # not contiguous, or empty
            pass
    return np.array(x.astype(mx.float32), copy=False)


def as_readable(x: mx.array) -> mx.array:
    """``x`` in a form that ``bfloat16.widen`` takes from NumPy, still lazy."""
    return x.view(mx.uint16) if x.dtype == mx.bfloat16 else x.astype(mx.float32)


class CpuMatrix:
    """A float32 matrix W [rows, columns] that multiplies activations as ``x W^T``.

    Args:
        shape: (rows, columns).
        expand: ``expand(start, stop)`` returns rows [start, stop) as a float32 array.
        keep: whether the expanded matrix is kept between calls.
        free: whether ``expand`` costs nothing (a view of memory that exists anyway), so that the
            matrix needs neither keeping nor cutting into blocks.
        any_thread: whether ``expand`` may be called from several threads at once (MLX operations
            may not).
    """

    def __init__(
        self,
        shape: tuple[int, int],
        expand: Callable[[int, int], np.ndarray],
        keep: bool = True,
        free: bool = False,
        any_thread: bool = True,
    ):
        self.shape = shape
        self.keep = keep and not free
        self._free = free
        self._any_thread = any_thread
        self._expand = expand
        self._dense: np.ndarray | None = None
        self._lock = threading.Lock()
        self._product = self._differentiable_product()

    @property
    def resident_bytes(self) -> int:
        """Bytes of the expanded matrix that are held now."""
        return 0 if self._dense is None else self._dense.nbytes

    def multiply(self, x: np.ndarray) -> np.ndarray:
        """``x W^T`` for float32 x [n, columns]."""
        rows, columns = self.shape
        dense = self._kept()
        if dense is not None and x.shape[0] * rows * columns < SHARED_PRODUCT:
            with one_thread():
                return x @ dense.T
        out = np.empty((x.shape[0], rows), np.float32)

        def work(start: int, stop: int) -> None:
            block = self._expand(start, stop) if dense is None else dense[start:stop]
            np.matmul(x, block.T, out=out[:, start:stop])

        if dense is None:
            self._for_blocks(work)
        else:
            share(work, pieces_of(rows, -(-rows // (2 * usable_cpus()))))
        return out

    def multiply_transposed(self, y: np.ndarray) -> np.ndarray:
        """``y W`` for float32 y [n, rows]: what a gradient needs."""
        out = np.zeros((y.shape[0], self.shape[1]), np.float32)
        dense = self._kept()
        for start, stop in pieces_of(self.shape[0], self._block_rows()):
            block = self._expand(start, stop) if dense is None else dense[start:stop]
            out += y[:, start:stop] @ block
        return out

    def release(self) -> None:
        """Let go of the matrix and of what it is made from, for good; it cannot be used again.

        The product refers back to the matrix, so without this both would live until the next
        garbage collection.
        """
        del self._expand, self._dense

    def __call__(self, x: mx.array, dtype: mx.Dtype | None = None) -> mx.array:
        """``x W^T`` over the last axis of an evaluated ``x``, by default in the dtype of ``x``."""
        return self.parts(x, [0, self.shape[0]], dtype)[0]

    def parts(
        self, x: mx.array, bounds: Sequence[int], dtype: mx.Dtype | None = None
    ) -> list[mx.array]:
        """The product by rows bounds[i] to bounds[i + 1] of W, for all i; see ``__call__``."""
        dtype, lead = dtype or x.dtype, x.shape[:-1]
        if is_differentiated(x):
            y = self._product(x).astype(dtype)
        else:
            values = self.multiply(as_numpy(x).reshape(-1, self.shape[1]))
            if len(values) == 1:
                # arrays that have their values, in their final form: for a single token each MLX
                # operation on them would cost as much as a small product
                return [
                    mx.array(values[:, start:stop].reshape(*lead, stop - start), dtype=dtype)
                    for start, stop in pairwise(bounds)
                ]
            y = mx.array(values.reshape(*lead, self.shape[0]), dtype=dtype)
        return [y[..., start:stop] for start, stop in pairwise(bounds)]

    def _kept(self) -> np.ndarray | None:
        """The whole matrix, expanded now if it was not; None if it is not to be kept."""
        if not self.keep:
            return self._expand(0, self.shape[0]) if self._free else None
        with self._lock:
            if self._dense is None:
                # one row of activations meets a matrix stored by columns up to twice as fast; not
                # one that is wider than high
                order: Any = "F" if self.shape[0] >= self.shape[1] else "C"
                dense = np.empty(self.shape, np.float32, order)

                def work(start: int, stop: int) -> None:
                    dense[start:stop] = self._expand(start, stop)

                self._for_blocks(work)
                self._dense = dense
        return self._dense

    def _for_blocks(self, work: Callable[[int, int], None]) -> None:
        """Call ``work`` for blocks of rows of bounded size."""
        pieces = pieces_of(self.shape[0], self._block_rows())
        if self._any_thread:
            share(work, pieces)
            return
        with one_thread():
            for piece in pieces:
                work(*piece)

    def _block_rows(self) -> int:
        return max(1, BLOCK_BYTES // (4 * self.shape[1]))

    def _differentiable_product(self) -> Callable[[mx.array], Any]:
        """``x W^T`` as a linear function of ``x``, of which each derivative is one, too.

        MLX does not see what NumPy computes: without a rule it would take it for a constant.
        """
        rows, columns = self.shape
        product: Any = mx.custom_function(_linear(self.multiply, columns, rows))
        transposed: Any = mx.custom_function(_linear(self.multiply_transposed, rows, columns))
        _set_derivatives(product, transposed)
        _set_derivatives(transposed, product)
        return product


def _set_derivatives(linear: Any, adjoint: Any) -> None:
    """Tell MLX the derivatives of a linear function, both of them linear functions again."""
    linear.vjp(lambda x, cotangent, _: adjoint(cotangent).astype(x.dtype))
    linear.jvp(lambda _, tangent: linear(tangent))


def _linear(
    multiply: Callable[[np.ndarray], np.ndarray], width: int, outputs: int
) -> Callable[[mx.array], mx.array]:
    """A function of MLX arrays [..., width] that computes in NumPy; it keeps the dtype."""

    def apply(x: mx.array) -> mx.array:
        y = multiply(as_numpy(x).reshape(-1, width))
        return mx.array(y).astype(x.dtype).reshape(*x.shape[:-1], outputs)

    return apply


def expert_product(
    x: mx.array, indices: mx.array, matrix_of: Callable[[int], CpuMatrix], rows: int
) -> mx.array:
    """Multiply each row by the matrix of its own expert, touching only the experts named.

    The CPU twin of ``mx.gather_mm`` (which is float32 only there).

    Args:
        x: [..., n, columns]; the leading axes broadcast against ``indices``.
        indices: integer array of expert numbers.
        matrix_of: returns the matrix of one expert.
        rows: outputs of each expert.

    Returns:
        [broadcast..., n, rows] in the dtype of ``x``.
    """
    chosen = np.array(indices)
    values = as_numpy(x)
    lead = np.broadcast_shapes(values.shape[:-2], chosen.shape)
    n, columns = values.shape[-2:]
    values = np.broadcast_to(values, (*lead, n, columns)).reshape(-1, n, columns)
    chosen = np.broadcast_to(chosen, lead).reshape(-1)
    out = np.empty((chosen.size, n, rows), np.float32)
    for expert in np.unique(chosen):
        members = np.flatnonzero(chosen == expert)
        y = matrix_of(int(expert)).multiply(values[members].reshape(-1, columns))
        out[members] = y.reshape(-1, n, rows)
    return mx.array(out.reshape(*lead, n, rows)).astype(x.dtype)

"""CPU twins of stock layers without a matrix, for generating one token at a time.

MLX's CPU back-end makes a normalization or a rotary embedding out of nine to twenty operations, and
each wakes its thread: for a single token that takes ten times as long as computing. The twins do
the same in NumPy, where the product that follows needs the value at once anyway, or in three
operations. Everything else, gradients and transformations among it, goes to the stock class.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np

from ..kernels.cpu_matrix import as_numpy
from ..kernels.dispatch import backend, is_differentiated, is_traced


class CpuNormMixin:
    """For ``nn.RMSNorm``."""

    def __call__(self: Any, x: mx.array) -> mx.array:
        weight = self.weight
        few = x.size == x.shape[-1]
        if not few or backend() != "cpu" or is_differentiated(x, weight) or is_traced(x, weight):
            return super().__call__(x)  # type: ignore[misc]
        row = as_numpy(x).reshape(-1)
        factor = 1 / np.sqrt(np.dot(row, row) / np.float32(row.size) + np.float32(self.eps))
        normal = row * factor * as_numpy(weight)
        return mx.array(normal.reshape(x.shape), dtype=mx.result_type(x, weight))


class CpuRopeMixin:
    """For ``nn.RoPE``: at one position it is a product with a small matrix."""

    def __call__(self: Any, x: mx.array, offset: Any = 0) -> mx.array:
        if x.shape[-2] != 1 or not isinstance(offset, int) or backend() != "cpu":
            return super().__call__(x, offset)  # type: ignore[misc]
        settings = (self.dims, self.traditional, self.base, self.scale)
        turn = position_matrix(x.shape[-1], *settings, offset)
        return (x.astype(mx.float32) @ turn).astype(x.dtype)


@lru_cache(maxsize=16)
def position_matrix(
    width: int, dims: int, traditional: bool, base: float, scale: float, offset: int
) -> mx.array:
    """What ``mx.fast.rope`` multiplies a row at one position by, float32 [width, width].

    All layers of a model ask for the same one, one after the other.
    """
    half = dims // 2
    frequencies = np.exp(np.arange(half) * -np.log(base) / half).astype(np.float32)
    angles = np.float32(offset * scale) * frequencies
    pairs = np.arange(dims).reshape((half, 2) if traditional else (2, half))
    first, second = pairs.T if traditional else pairs
    matrix = np.eye(width, dtype=np.float32)
    matrix[first, first] = matrix[second, second] = np.cos(angles)
    matrix[first, second] = np.sin(angles)
    matrix[second, first] = -np.sin(angles)
    return mx.array(matrix)

"""The input rotation of a few activations, ``H (m * x)``, in one launch.

In plain MLX it takes a widening, a product, the transform and a narrowing; while one token is
generated each of these costs more to launch than to run.

H_n = kron(B, S) / sqrt(n), n = b * 2^k, S the Sylvester matrix of order 2^k and B that of order
b = 1 or 12, see ``quant.rotation``. Thread map: one threadgroup for each block of n values (at most
4096, 16 KiB of shared memory). S takes two doublings between barriers; at the end every thread
multiplies twelve values by B where b = 12. All in float32, rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from ..quant.rotation import hadamard_matrix
from .dialect import Dialect, Kernel
from .dispatch import kernels_of_backend
from .matvec import check_width
from .selection import ROTATE_ROWS

_SIGNS = np.sign(hadamard_matrix(12)).astype(int)

_TWELVE = "\n".join(
    f"      y[base + {a}u * P + i] = Y(norm * ("
    + " ".join(f"{'+' if sign > 0 else '-'} v[{j}]" for j, sign in enumerate(row))
    + "));"
    for a, row in enumerate(_SIGNS)
)

_BODY = (
    """
  constexpr uint N = BLOCK, P = POWER;
  TQ_SHARED(float, line, BLOCK);
  const uint start = tq_bx * N;
  const uint base = tq_by * uint(multiplier_shape[0]) + start;
  const float norm = NORM / 16777216.0f;
  for (uint i = tq_tid; i < N; i += uint(THREADS)) {
    line[i] = float(x[base + i]) * float(multiplier[start + i]);
  }
  TQ_SYNC();
  TQ_UNROLL for (uint half_of = 1u; half_of < P; half_of *= 4u) {
    if (2u * half_of < P) {
      for (uint j = tq_tid; j < N / 4u; j += uint(THREADS)) {
        const uint i = (j / half_of) * (4u * half_of) + j % half_of;
        const float a = line[i] + line[i + half_of];
        const float b = line[i] - line[i + half_of];
        const float c = line[i + 2u * half_of] + line[i + 3u * half_of];
        const float d = line[i + 2u * half_of] - line[i + 3u * half_of];
        line[i] = a + c;
        line[i + half_of] = b + d;
        line[i + 2u * half_of] = a - c;
        line[i + 3u * half_of] = b - d;
      }
    } else {
      for (uint j = tq_tid; j < N / 2u; j += uint(THREADS)) {
        const uint i = (j / half_of) * (2u * half_of) + j % half_of;
        const float a = line[i];
        const float b = line[i + half_of];
        line[i] = a + b;
        line[i + half_of] = a - b;
      }
    }
    TQ_SYNC();
  }
  if (N == P) {
    for (uint i = tq_tid; i < N; i += uint(THREADS)) y[base + i] = Y(norm * line[i]);
  } else {
    for (uint i = tq_tid; i < P; i += uint(THREADS)) {
      float v[12];
      TQ_UNROLL for (int j = 0; j < 12; ++j) v[j] = line[(uint(j) * P + i) % N];
"""
    + _TWELVE
    + """
    }
  }
"""
)

ROTATE = Kernel("turboquant_rotate", ("x", "multiplier"), ("y",), _BODY)

LONGEST_BLOCK = 4096


@lru_cache(maxsize=64)
def why_no_rotation(block: int) -> str:
    """What keeps the kernel from blocks of this length; "" if it takes them."""
    base = 12 if block % 12 == 0 else 1
    power = block // base
    if power & (power - 1) or not 1 < block <= LONGEST_BLOCK:
        return f"blocks of {block} values"
    return ""


class Group(Protocol):
    """Layers that read the same input, as ``layers.rotation_group.RotationGroup``."""

    block: int

    @property
    def multiplier(self) -> mx.array: ...

    def read(self, x: mx.array, *, rotated: bool, dtype: mx.Dtype) -> mx.array: ...

    def once(self, x: mx.array, kind: Any, make: Callable[[], Any]) -> Any: ...


def rotated_input(group: Group, x: mx.array, *, gradients: bool = False) -> mx.array:
    """The input of a group's layers, rotated once for all of them, by a kernel where there is one.

    Args:
        group: the layers.
        x: [..., I], floating.
        gradients: whether a gradient by ``x`` may be asked for; the kernel has none.

    Returns:
        [..., I] in the dtype of ``x``; computed in float32.
    """
    dialect = kernels_of_backend(x.dtype)
    few = dialect is not None and 0 < x.size <= ROTATE_ROWS[dialect] * x.shape[-1]
    if dialect is None or gradients or not few or why_no_rotation(group.block):
        return group.read(x, rotated=True, dtype=x.dtype)
    return group.once(
        x, (True, x.dtype), lambda: rotate_few(x, group.block, group.multiplier, dialect)
    )


@lru_cache(maxsize=64)
def _template(block: int, dtype: mx.Dtype) -> tuple[int, list]:
    power = block // 12 if block % 12 == 0 else block
    threads = max(32, min(256, block // 4 // 32 * 32))
    template = [
        ("Y", dtype),
        ("BLOCK", block),
        ("POWER", power),
        ("THREADS", threads),
        # 1 / sqrt(n) times 2**24: template arguments are integers
        ("NORM", round(2**24 / math.sqrt(block))),
    ]
    return threads, template


def rotate_few(x: mx.array, block: int, multiplier: mx.array, dialect: Dialect) -> mx.array:
    """``rotate`` in one launch.

    Args:
        x: [..., I], floating.
        block: such that ``why_no_rotation`` has nothing against it.
        multiplier: [I].
        dialect: of the kernel.

    Returns:
        [..., I] in the dtype of ``x``, lazy.
    """
    (width,) = multiplier.shape
    check_width(x, width)
    threads, template = _template(block, x.dtype)
    (y,) = ROTATE.launch(
        dialect,
        [x, multiplier],
        template=template,
        groups=(width // block, x.size // width),
        threads=threads,
        shapes=[x.shape],
        dtypes=[x.dtype],
    )
    return y

"""The input rotation of activations, ``H (m * x)``, in one launch.

In plain MLX it takes a widening, a product, the transform and a narrowing. While one token is
generated each of these costs more to launch than to run; for many rows of 16 bits they move seven
times the bytes.

H_n = kron(B, S) / sqrt(n), n = b * 2^k, S the Sylvester matrix of order 2^k and B that of order
b = 1 or 12, see ``quant.rotation``. All in float32, rounded once. There are two thread maps:

* ``rotate_few``: one threadgroup for each block of n values (at most 4096, 16 KiB of shared
  memory). S takes two doublings between barriers; at the end every thread multiplies twelve values
  by B where b = 12.
* ``rotate_many``: one warp for each block, with no shared memory and no barrier. A lane holds every
  32nd value, n / 32 of them: the upper doublings of S and B stay within a lane, the lowest five
  are exchanges between lanes. For 32 <= 2^k and n <= 1024.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from ..quant.rotation import hadamard_matrix, rotate
from .dialect import Dialect, Kernel
from .dispatch import kernels_of_backend
from .matvec import check_width
from .selection import ROTATE_FEW, ROTATE_ROWS

_SIGNS = np.sign(hadamard_matrix(12)).astype(int)


def _times_twelve(to: str, values: str) -> str:
    """Twelve statements: ``to``, in which A is the number of a value, gets a row of B."""
    return "\n".join(
        f"      {to.replace('A', str(a))} = Y(norm * ("
        + " ".join(f"{'+' if sign > 0 else '-'} {values}[{j}]" for j, sign in enumerate(row))
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
    + _times_twelve("y[base + Au * P + i]", "v")
    + """
    }
  }
"""
)

_BODY_OF_WARPS = (
    """
  constexpr int N = BLOCK / 32, P = POWER / 32;  // values of a lane, and those that S mixes
  const uint width = uint(multiplier_shape[0]);
  const uint blocks = width / uint(BLOCK);
  const uint task = tq_bx * uint(WARPS) + tq_warp;
  const uint row = task / blocks;
  if (row < uint(x_shape[0])) {
    const uint start = task % blocks * uint(BLOCK) + tq_lane;
    const uint base = row * width + start;
    const float norm = NORM / 16777216.0f;
    float v[N];
    TQ_UNROLL for (int i = 0; i < N; ++i) {
      v[i] = float(x[base + uint(32 * i)]) * float(multiplier[start + uint(32 * i)]);
    }
    TQ_UNROLL for (int s = 0; s < 5; ++s) {
      const int half_of = 1 << s;
      if (half_of < P) {
        TQ_UNROLL for (int j = 0; j < N / 2; ++j) {
          const int i = (j / half_of) * (2 * half_of) + j % half_of;
          const int k = i + half_of < N ? i + half_of : 0;  // of a branch that is not taken
          const float a = v[i], b = v[k];
          v[i] = a + b;
          v[k] = a - b;
        }
      }
    }
    TQ_UNROLL for (int s = 0; s < 5; ++s) {
      const float sign = (tq_lane & (1u << s)) != 0u ? -1.0f : 1.0f;
      TQ_UNROLL for (int i = 0; i < N; ++i) {
        const float other = TQ_SHUFFLE_XOR(v[i], 1u << s);
        v[i] = other + sign * v[i];
      }
    }
    if (N == P) {
      TQ_UNROLL for (int i = 0; i < N; ++i) y[base + uint(32 * i)] = Y(norm * v[i]);
    } else {
      TQ_UNROLL for (int i = 0; i < P; ++i) {
        float t[12];
        TQ_UNROLL for (int j = 0; j < 12; ++j) t[j] = v[(j * P + i) % N];
"""
    + _times_twelve("  y[base + uint(32 * (A * P + i))]", "t")
    + """
      }
    }
  }
"""
)

ROTATE = Kernel("turboquant_rotate", ("x", "multiplier"), ("y",), _BODY)
ROTATE_WARPS = Kernel("turboquant_rotate_warps", ("x", "multiplier"), ("y",), _BODY_OF_WARPS)

LONGEST_BLOCK = 4096
WARPS = 4
"""Of a threadgroup in ``rotate_many``, which have nothing to do with each other."""


@lru_cache(maxsize=64)
def why_no_rotation(block: int) -> str:
    """What keeps the kernel from blocks of this length; "" if it takes them."""
    base = 12 if block % 12 == 0 else 1
    power = block // base
    if power & (power - 1) or not 1 < block <= LONGEST_BLOCK:
        return f"blocks of {block} values"
    return ""


@lru_cache(maxsize=64)
def suits_warps(block: int) -> bool:
    """Whether ``rotate_many`` takes blocks of this length."""
    power = block // 12 if block % 12 == 0 else block
    return not why_no_rotation(block) and power >= 32 and block <= 1024


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
    if dialect is None or gradients:
        return group.read(x, rotated=True, dtype=x.dtype)
    return group.once(
        x, (True, x.dtype), lambda: rotate_rows(x, group.block, group.multiplier, dialect)
    )


def rotate_rows(x: mx.array, block: int, multiplier: mx.array, dialect: Dialect) -> mx.array:
    """``quant.rotation.rotate`` by the program that suits the number of rows; without gradient.

    Args:
        x: [..., I]; float16, bfloat16 or float32.
        block: of the transform.
        multiplier: [I].
        dialect: of the kernels.
    """
    rows = x.size // x.shape[-1]
    if not 0 < rows <= ROTATE_ROWS[dialect] or why_no_rotation(block):
        return rotate(x, block, multiplier)
    if rows > ROTATE_FEW[dialect] and suits_warps(block):
        return rotate_many(x, block, multiplier, dialect)
    return rotate_few(x, block, multiplier, dialect)


def _sizes(block: int, dtype: mx.Dtype) -> list:
    return [
        ("Y", dtype),
        ("BLOCK", block),
        ("POWER", block // 12 if block % 12 == 0 else block),
        # 1 / sqrt(n) times 2**24: template arguments are integers
        ("NORM", round(2**24 / math.sqrt(block))),
    ]


@lru_cache(maxsize=64)
def _template(block: int, dtype: mx.Dtype) -> tuple[int, list]:
    threads = max(32, min(256, block // 4 // 32 * 32))
    return threads, [*_sizes(block, dtype), ("THREADS", threads)]


@lru_cache(maxsize=64)
def _template_of_warps(block: int, dtype: mx.Dtype) -> list:
    return [*_sizes(block, dtype), ("WARPS", WARPS)]


def rotate_few(x: mx.array, block: int, multiplier: mx.array, dialect: Dialect) -> mx.array:
    """``rotate`` in one launch, quickly for few rows.

    Args:
        x: [..., I], floating, of fewer than 65536 rows.
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


def rotate_many(x: mx.array, block: int, multiplier: mx.array, dialect: Dialect) -> mx.array:
    """``rotate`` in one launch, quickly for many rows.

    Args:
        x: [..., I], floating, of fewer than 2**32 values.
        block: such that ``suits_warps``.
        multiplier: [I].
        dialect: of the kernel.

    Returns:
        [..., I] in the dtype of ``x``, lazy.
    """
    (width,) = multiplier.shape
    check_width(x, width)
    tasks = x.size // block
    (y,) = ROTATE_WARPS.launch(
        dialect,
        [x.reshape(-1, width), multiplier],
        template=_template_of_warps(block, x.dtype),
        groups=(-(-tasks // WARPS), 1),
        threads=32 * WARPS,
        shapes=[x.shape],
        dtypes=[x.dtype],
    )
    return y

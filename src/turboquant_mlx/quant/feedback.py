"""Error feedback: round a weight so that its output on given inputs changes least.

Rounding W' to Q changes the output for inputs z by (W' - Q) z, whose mean square over the inputs
is tr((W' - Q) H (W' - Q)^T) with H = E[z z^T]. Rounding to the nearest level minimises that only
for H = I. Error feedback (GPTQ: Frantar et al., 2023; the same as LDLQ in QuIP: Chee et al., 2023)
rounds the columns one after the other and lets the columns still to come make up for the error
made so far: with H^-1 = U^T U, U upper triangular, the error (x_j - q_j) / U_jj of column j takes
its multiple U_jk from every later column k. A block of columns that is coded at once (the trellis)
feeds forward through the triangular factor of the block instead of a number.

Here z is the balanced and rotated input and W' the stored domain. Its rows are independent, so
they are spread over threads; the scale of a group is searched when the group's turn comes, on
weights that have taken up all earlier errors. Everything is NumPy on the CPU, also where the model
runs on a GPU: the factor needs float64, and the columns are many short steps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import QuantizationError
from .codebook import boundaries
from .encode import LARGEST, Job, _load_columns
from .packed import PackedWeight
from .rotation import hadamard_columns
from .scales import reciprocal, search_scales
from .spec import QuantSpec
from .threads import for_each
from .weight import quantize_weight

DAMPING = 0.01
"""Share of the mean of its diagonal that is added to a Hessian's diagonal."""

PIECE_ROWS = 384
"""Rows that go through the columns together: so many that each short step is worth its call."""

SMALL_BLOCK = 16
"""Columns between which errors go one by one; to those further on they go as a product."""

# Multiplications per matrix product: so few that OpenBLAS does not start threads of its own, which
# would fight with ours.
_PRODUCT_SIZE = 1 << 18

Factors = Callable[[int], np.ndarray]
"""Number of a stack's matrix (0 for a plain one) -> its ``inverse_factor``."""


def inverse_factor(hessian: np.ndarray, damping: float = DAMPING) -> np.ndarray:
    """The upper triangular U with U^T U = (H + damping * mean(diag H) * I)^-1.

    Args:
        hessian: float64 [I, I], symmetric and positive semidefinite; not changed. Its size does
            not matter, so sums over inputs serve as well as means.
        damping: more keeps later columns from following few or untypical inputs too closely.

    Returns:
        float32 [I, I], scaled so that the mean of its diagonal is 1.

    Raises:
        QuantizationError: the matrix has values that are not finite, or no energy at all.
    """
    mean = float(np.trace(hessian)) / len(hessian)
    if not (np.isfinite(mean) and mean > 0 and np.isfinite(hessian).all()):
        raise QuantizationError("these inputs have no usable second moments")
    reversed_ = hessian[::-1, ::-1] / mean
    reversed_[np.diag_indices_from(reversed_)] += damping
    # H = R R^T with R upper triangular is the plain factor of H with both axes reversed; U = R^-1
    root = np.linalg.cholesky(reversed_)
    upper = np.linalg.inv(root)[::-1, ::-1]
    upper /= np.diag(upper).mean()
    return np.triu(upper).astype(np.float32)


def quantize_weight_with_feedback(
    weight: mx.array, spec: QuantSpec, factors: Factors, **options: Any
) -> PackedWeight:
    """``quantize_weight`` with error feedback.

    Args:
        weight: [O, I] or [E, O, I]; float32, float16 or bfloat16.
        spec: the code, without a QJL sketch.
        factors: called once for each matrix of a stack in order, so that one factor is in memory
            at a time.
        options: of ``quantize_weight``.

    Raises:
        QuantizationError: as ``quantize_weight``.
    """
    if spec.qjl:
        raise QuantizationError("a QJL sketch and error feedback exclude each other")
    matrices = weight.shape[0] if weight.ndim == 3 else 1
    encode = partial(encode_feedback, matrices=matrices, factors=factors)
    return quantize_weight(weight, spec, encode=encode, **options)


def encode_feedback(
    job: Job,
    weight: mx.array,
    threads: int | None = None,
    *,
    matrices: int,
    factors: Factors,
) -> None:
    """Quantize the rows of a weight [rows, I] into the job's arrays, like ``encode_numpy``.

    Args:
        job: what to do.
        weight: the matrices of a stack on top of each other.
        threads: never changes the result.
        matrices: how many.
        factors: see ``quantize_weight_with_feedback``.
    """
    if weight.dtype == mx.bfloat16:  # which NumPy does not know
        weight = weight.view(mx.uint16)
    mx.eval(weight)
    source = np.array(weight, copy=False)
    rows = source.shape[0] // matrices
    count = -(-rows // PIECE_ROWS)
    for number in range(matrices):
        factor = factors(number)
        first = number * rows

        def work(i: int, first: int = first, factor: np.ndarray = factor) -> None:
            piece = slice(first + rows * i // count, first + rows * (i + 1) // count)
            _encode_rows(job, source, piece, factor)

        for_each(work, range(count), threads)


def _encode_rows(job: Job, source: np.ndarray, rows: slice, factor: np.ndarray) -> None:
    x = _load_columns(source, rows, slice(0, job.width))
    with np.errstate(over="ignore", invalid="ignore"):  # reported just below
        x *= job.inverse_multiplier[:, None]
        x = hadamard_columns(x, job.spec.rotation_block)
    # What was not finite before the rotation is not so now.
    if not (np.abs(x) < LARGEST).all():
        raise job.bad_values()
    scales, idx = feed_forward(x, factor, job.levels, job.spec)
    job.scales[rows] = scales.T
    job.codes[rows] = job.pack(np.ascontiguousarray(idx.T))


def feed_forward(
    x: np.ndarray, factor: np.ndarray, levels: np.ndarray, spec: QuantSpec
) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of some rows, which run along the last axis here.

    Args:
        x: float32 [I, rows] of the stored domain, **overwritten**.
        factor: of ``inverse_factor``, [I, I].
        levels: the code's table.
        spec: a plain code.

    Returns:
        float32 [I / g, rows] scales, multiples of what ``encode_scales`` stores exactly, and uint8
        [I, rows] indices.
    """
    width, n = x.shape
    g = spec.group_size
    borders = boundaries(levels)
    scales = np.empty((width // g, n), np.float32)
    idx = np.empty((width, n), np.uint8)
    errors = np.empty((g, n), np.float32)
    for group in range(width // g):
        start, stop = group * g, group * g + g
        found, _ = search_scales(x[None, start:stop], levels, spec.scale_layout)
        scale = found[0, 0]
        scales[group] = scale
        inverse = reciprocal(np, scale)
        for first in range(start, stop, SMALL_BLOCK):
            last = min(first + SMALL_BLOCK, stop)
            for j in range(first, last):
                index = np.searchsorted(borders, x[j] * inverse)
                idx[j] = index
                error = errors[j - start]
                np.subtract(x[j], levels[index] * scale, out=error)
                error /= factor[j, j]
                if j + 1 < last:
                    x[j + 1 : last] -= factor[j, j + 1 : last, None] * error
            _feed(x[last:stop], factor[first:last, last:stop], errors[first - start : last - start])
        _feed(x[stop:], factor[start:stop, stop:], errors)
    return scales, idx


def _feed(x: np.ndarray, factor: np.ndarray, errors: np.ndarray) -> None:
    """x [k, rows] -= factor [b, k]^T errors [b, rows]."""
    k, n = x.shape
    step = max(1, _PRODUCT_SIZE // errors.size)
    whole = k - k % step
    multiples = np.ascontiguousarray(factor.T)
    if whole:
        pieces = x[:whole].reshape(-1, step, n)
        pieces -= multiples[:whole].reshape(-1, step, len(errors)) @ errors
    if whole < k:
        x[whole:] -= multiples[whole:] @ errors

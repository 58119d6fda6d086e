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
from .scales import power_of_two, reciprocal, search_scales, stored_candidates
from .spec import QuantSpec
from .threads import for_each
from .trellis import searches
from .viterbi import LANES, make_trellis, stretch_codes
from .weight import quantize_weight

LEAST_DAMPING = 0.01
SAMPLING_DAMPING = 3.2
"""What is added to a Hessian's diagonal, as a share of its mean: the first at least, the second
times width / inputs. From few inputs, correlations come out stronger than they are. On layers of a
real model, 576 and 1536 wide, with 5,000 inputs and the error measured on others, half to twice as
much is equally good if all inputs are from one source, and twice as much if they are not. With the
first alone the error of the wider layer is no lower than without feedback."""

PIECE_ROWS = 384
"""Rows that go through the columns together: so many that each short step is worth its call."""

SCALAR_BLOCK = 16
"""Columns between which errors go one by one; to those further on they go as a product."""

TRELLIS_BLOCK, TRELLIS_AHEAD = 32, 16
"""Columns of a trellis code that are coded at once, and columns after them that the search looks
at. Shorter ones feed more errors forward and find worse streams; both together are worse."""

# Multiplications per matrix product: so few that OpenBLAS does not start threads of its own, which
# would fight with ours.
_PRODUCT_SIZE = 1 << 18

# Up to this size a matrix is inverted as a whole.
_SMALL_MATRIX = 256

# Codes at the beginning of a row that the windows at its end reach into.
_OPENING = 3

Factors = Callable[[int], np.ndarray]
"""Number of a stack's matrix (0 for a plain one) -> its ``inverse_factor``."""


def damping_of(width: int, inputs: float) -> float:
    """The damping for a Hessian from so many inputs."""
    return max(LEAST_DAMPING, SAMPLING_DAMPING * width / inputs)


def inverse_factor(hessian: np.ndarray, damping: float = LEAST_DAMPING) -> np.ndarray:
    """The upper triangular U with U^T U = (H + damping * mean(diag H) * I)^-1.

    Args:
        hessian: float64 [I, I], symmetric and positive semidefinite; not changed. Its size does
            not matter, so sums over inputs serve as well as means.
        damping: see ``damping_of``.

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
    upper = _inverse(root)[::-1, ::-1]
    upper /= np.diag(upper).mean()
    return np.triu(upper).astype(np.float32)


def _inverse(lower: np.ndarray) -> np.ndarray:
    """The inverse of a lower triangular matrix, at a sixth of the cost of a general one."""
    n = len(lower)
    if n <= _SMALL_MATRIX:
        return np.linalg.inv(lower)
    middle = n // 2
    result = np.zeros_like(lower)
    first = result[:middle, :middle] = _inverse(lower[:middle, :middle])
    last = result[middle:, middle:] = _inverse(lower[middle:, middle:])
    result[middle:, :middle] = -(last @ (lower[middle:, :middle] @ first))
    return result


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
    count = -(-rows // (LANES["numpy"] if job.spec.is_trellis else PIECE_ROWS))
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
    """Indices and scales of some rows, which run along the last axis here.

    Args:
        x: float32 [I, rows] of the stored domain, **overwritten**.
        factor: of ``inverse_factor``, [I, I].
        levels: the code's table.
        spec: a code whose tile, if it has one, is a whole row.

    Returns:
        float32 [I / g, rows] scales, multiples of what ``encode_scales`` stores exactly, and uint8
        [I, rows] indices into the table.
    """
    g = spec.group_size
    coder = (_TrellisCoder if spec.is_trellis else _ScalarCoder)(x, levels, spec)
    errors = np.empty((g, x.shape[1]), np.float32)
    for start in range(0, len(x), g):
        stop = start + g
        near = min(stop + coder.ahead, len(x))
        coder.start_group(start)
        for first in range(start, stop, coder.block):
            last = min(first + coder.block, stop)
            block = errors[first - start : last - start]
            coder.code(factor[first:last, first:last], first, block)
            _feed(x[last:near], factor[first:last, last:near], block)
        _feed(x[near:], factor[start:stop, near:], errors)
    return coder.scales, coder.idx


class _ScalarCoder:
    """Plain codes, column by column."""

    block, ahead = SCALAR_BLOCK, 0

    def __init__(self, x: np.ndarray, levels: np.ndarray, spec: QuantSpec):
        self.x, self.levels, self.spec = x, levels, spec
        self.borders = boundaries(levels)
        self.scales = np.empty((len(x) // spec.group_size, x.shape[1]), np.float32)
        self.idx = np.empty(x.shape, np.uint8)

    def start_group(self, start: int) -> None:
        """Choose the scales of the group from column ``start``."""
        g = self.spec.group_size
        group = self.x[None, start : start + g]
        self.scale = search_scales(group, self.levels, self.spec.scale_layout)[0][0, 0]
        self.scales[start // g] = self.scale
        self.inverse = reciprocal(np, self.scale)

    def code(self, factor: np.ndarray, first: int, errors: np.ndarray) -> None:
        """Code a block of columns.

        Args:
            factor: [b, b], the block's own part of the factor.
            first: its first column.
            errors: [b, rows], takes what later columns have to make up for, in units of the
                factor's rows.
        """
        x = self.x[first : first + len(errors)]
        for j, error in enumerate(errors):
            index = np.searchsorted(self.borders, x[j] * self.inverse)
            self.idx[first + j] = index
            np.subtract(x[j], self.levels[index] * self.scale, out=error)
            error /= factor[j, j]
            if j + 1 < len(errors):
                x[j + 1 :] -= factor[j, j + 1 :, None] * error


class _TrellisCoder:
    """Trellis codes: a block at a time, with a look at some columns more.

    The stream goes on from block to block. What a block's last codes mean for the next windows is
    judged by those columns as they are now; the last block has to end in the state in which the
    first began, as the stream is circular.
    """

    block, ahead = TRELLIS_BLOCK, TRELLIS_AHEAD

    def __init__(self, x: np.ndarray, levels: np.ndarray, spec: QuantSpec):
        self.x, self.levels, self.spec = x, levels, spec
        self.trellis = make_trellis(levels, spec.bits, spec.window_bits)
        self.scales = np.empty((len(x) // spec.group_size, x.shape[1]), np.float32)
        self.idx = np.empty(x.shape, np.uint8)
        self.state: np.ndarray | None = None
        self.first: np.ndarray | None = None

    def start_group(self, start: int) -> None:
        """Choose the scales of the group from column ``start``."""
        spec, g = self.spec, self.spec.group_size
        group = self.x[start : start + g]
        unit, inverse = power_of_two(np, np.abs(group).max(axis=0))
        group = group * inverse
        scale = np.sqrt(np.square(group).mean(axis=0))
        if searches(spec) > 1:  # a trial shows how the levels that are used fit
            (scale, *_) = stored_candidates(np, scale, spec.scale_layout)
            seen = self.x[start : start + g + _OPENING] * (inverse * reciprocal(np, scale))
            codes = stretch_codes(seen, self.trellis, self.state, None)
            sure = len(seen) - _OPENING  # the last windows want codes that are not there
            q = self.levels[self._windows(codes, codes[:0])[:sure]]
            group = group[:sure]
            fit = np.maximum((group * q).sum(axis=0), 0) * reciprocal(np, (q * q).sum(axis=0))
            scale, *others = stored_candidates(np, fit, spec.scale_layout)
            for other in others:
                scale = np.where(np.abs(other - fit) < np.abs(scale - fit), other, scale)
        else:
            (scale, *_) = stored_candidates(np, scale, spec.scale_layout)
        self.scale = scale * unit
        self.scales[start // g] = self.scale
        # beyond the group, as its scale will be about
        after = self.x[start + g : start + g + -(-self.ahead // g) * g]
        sizes = np.sqrt(np.square(after.reshape(-1, g, after.shape[1])).mean(axis=1))
        self.inverse = reciprocal(np, np.concatenate([self.scale[None], sizes]))

    def code(self, factor: np.ndarray, first: int, errors: np.ndarray) -> None:
        """As for plain codes."""
        width, size = len(self.x), len(errors)
        last = first + size
        closes = last == width
        seen = self.x[first : last + self.ahead]
        group = (np.arange(len(seen)) + first % self.spec.group_size) // self.spec.group_size
        end = self.first if closes else None
        codes = stretch_codes(seen * self.inverse[group], self.trellis, self.state, end)
        if first == 0:
            self.first = self._state(self._windows(codes, codes[:0])[0])
            self.opening = codes[:_OPENING].copy()
        windows = self._windows(codes, self.opening if closes else codes[:0])
        self.idx[first:last] = windows[:size]
        if not closes:
            self.state = self._state(windows[size])
        wrong = self.x[first:last] - self.levels[windows[:size]] * self.scale
        np.matmul(np.linalg.inv(factor).T, wrong, out=errors)

    def _state(self, window: np.ndarray) -> np.ndarray:
        return window.astype(np.intp) & (self.trellis.states - 1)

    def _windows(self, codes: np.ndarray, following: np.ndarray) -> np.ndarray:
        """Windows of codes [n, rows], the last of them only where enough codes follow."""
        k, window = self.spec.bits, self.spec.window_bits
        n = len(codes)
        steps = -(-window // k)
        stream = np.zeros((n + steps - 1, codes.shape[1]), np.uint8)
        stream[:n] = codes
        stream[n:] = 0 if len(following) == 0 else following[: steps - 1]
        found = stream[:n].copy()
        for step in range(1, steps):
            found |= stream[step : step + n] << np.uint8(step * k)
        return found


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

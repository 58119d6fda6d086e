"""The work of quantizing rows: on threads with NumPy, or in blocks with MLX."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import QuantizationError
from .bfloat16 import widen
from .helpers import are_worth_starting
from .packed import block_rows
from .packing import pack_codes, pack_trits
from .qjl import best_norm
from .rotation import hadamard_columns, rotate
from .scales import search_scales
from .spec import QuantSpec
from .threads import for_each, usable_cpus
from .trellis import search_trellis

TASK_ROWS = 128  # rows of one piece of work: long enough to vectorise over
LARGEST = 1e30  # in the stored domain: squares, scales and tables stay far from overflow
CHUNK_VALUES = 1 << 17  # weights that one thread holds in float32 at a time
ROWS_VALUES = 1 << 19  # the same for codes that need whole rows


@dataclass
class Sketch:
    """The QJL part of a job."""

    multiplier: np.ndarray  # float32 [I]
    codes: np.ndarray  # uint32 [rows, ceil(I / 32)], filled in place
    norms: np.ndarray  # float32 [rows], filled in place


@dataclass
class Job:
    """One weight on its way: what to do with its rows, and the arrays that take the result."""

    spec: QuantSpec
    name: str
    width: int
    levels: np.ndarray  # float32 table
    inverse_multiplier: np.ndarray  # float32 [I]
    codes: np.ndarray  # uint32 [rows, words], filled in place
    scales: np.ndarray  # float32 [rows, I / group_size], filled in place
    sketch: Sketch | None = None

    def search(self, groups: Any) -> tuple[Any, Any]:
        """Scales [n, 1, r] and table indices [n, g, r] of groups [n, g, r], NumPy or MLX.

        For a trellis code the n groups must be those of whole rows.
        """
        if self.spec.is_trellis:
            return search_trellis(groups, self.levels, self.spec)
        return search_scales(groups, self.levels, self.spec.scale_layout)

    def pack(self, idx: Any) -> Any:
        """Pack table indices, NumPy or MLX."""
        if self.spec.code == "ternary":
            return pack_trits(idx)
        if self.spec.is_trellis:  # the rest of a window are the codes that follow
            idx = idx & ((1 << self.spec.bits) - 1)
        return pack_codes(idx, self.spec.bits)

    def bad_values(self) -> QuantizationError:
        return QuantizationError(f"{self.name} has values that are not finite or exceed 1e30")


# ------------------------------------------------------------------------- NumPy on CPU threads


def encode_numpy(job: Job, weight: mx.array, threads: int | None = None) -> None:
    """Quantize the rows of a weight [rows, I] into the job's arrays."""
    if weight.dtype == mx.bfloat16:  # which NumPy does not know
        weight = weight.view(mx.uint16)
    mx.eval(weight)
    source = np.array(weight, copy=False)
    if job.spec.is_trellis and threads is None and not are_worth_starting(source.size):
        threads = 1  # without a process each, threads are slower than none
    pieces = _pieces(job, source.shape[0], threads or usable_cpus())
    for_each(lambda i: _encode_rows(job, source, pieces[i]), range(len(pieces)), threads)


def _pieces(job: Job, n_rows: int, threads: int) -> list[slice]:
    """Rows that are encoded together.

    A row's codes do not depend on them. The search for a trellis code makes many small steps, which
    pay for many rows at once, but a small weight should still keep all threads busy.
    """
    if not job.spec.is_trellis:
        return [slice(i, min(i + TASK_ROWS, n_rows)) for i in range(0, n_rows, TASK_ROWS)]
    most = max(1, min(2 * TASK_ROWS, ROWS_VALUES // job.width))
    count = -(-n_rows // most)
    if count % threads:
        count = max(count, min(count + threads - count % threads, n_rows // 64))
    return [slice(n_rows * i // count, n_rows * (i + 1) // count) for i in range(count)]


def _load_columns(source: np.ndarray, rows: slice, columns: slice) -> np.ndarray:
    """float32 [columns, rows]: a piece of the weight, transposed."""
    # a copy in any case: the caller works in place
    return widen(np.array(source[rows, columns].T, order="C"))


def chunks(width: int, unit: int, rows: int) -> Iterator[slice]:
    """Column ranges in multiples of ``unit`` that hold about CHUNK_VALUES values in ``rows``."""
    step = unit * max(1, CHUNK_VALUES // (unit * rows))
    for start in range(0, width, step):
        yield slice(start, min(start + step, width))


def _encode_rows(job: Job, source: np.ndarray, rows: slice) -> None:
    """Quantize some rows; vectors run along the rows."""
    spec, g, sketch = job.spec, job.spec.group_size, job.sketch
    n = rows.stop - rows.start
    unit = job.width if spec.is_trellis else math.lcm(spec.rotation_block, g)
    idx = np.empty((n, job.width), np.uint8)
    signs = np.empty((n, job.width if sketch else 0), np.uint8)
    sums = np.zeros(n, np.float64)
    for columns in chunks(job.width, unit, n):
        x = _load_columns(source, rows, columns)
        with np.errstate(over="ignore", invalid="ignore"):  # reported just below
            x *= job.inverse_multiplier[columns, None]
            x = hadamard_columns(x, spec.rotation_block)
        # What was not finite before the rotation is not so now.
        if not (np.abs(x) < LARGEST).all():
            raise job.bad_values()
        groups = x.reshape(-1, g, n)
        scale, best = job.search(groups)
        job.scales[rows, columns.start // g : columns.stop // g] = scale[:, 0].T
        idx[:, columns] = best.reshape(-1, n).T
        if sketch:
            residual = (groups - job.levels.take(best) * scale).reshape(-1, n)
            residual *= sketch.multiplier[columns, None]
            projected = hadamard_columns(residual, spec.rotation_block)
            sums += np.abs(projected).sum(axis=0, dtype=np.float64)
            signs[:, columns] = (projected >= 0).T
    job.codes[rows] = job.pack(idx)
    if sketch:
        sketch.codes[rows] = pack_codes(signs, 1)
        sketch.norms[rows] = best_norm(sums, job.width)


# ------------------------------------------------------------------------------- MLX on a GPU


def encode_mlx(job: Job, weight: mx.array, threads: int | None = None) -> None:
    """The same as ``encode_numpy`` in MLX operations, block by block.

    About fifteen arrays of a block's size are alive at once, hence small blocks.
    """
    spec, g, width, sketch = job.spec, job.spec.group_size, job.width, job.sketch
    inverse, levels = mx.array(job.inverse_multiplier), mx.array(job.levels)
    step = max(1, block_rows(width) // 4)
    for start in range(0, weight.shape[0], step):
        rows = slice(start, min(start + step, weight.shape[0]))
        n = rows.stop - rows.start
        x = rotate(weight[rows].astype(mx.float32), spec.rotation_block, inverse)
        # Checked before the search, which would turn a NaN into an index outside its table.
        if not (mx.abs(x) < LARGEST).all().item():
            raise job.bad_values()
        if spec.is_trellis:  # rows last: they are searched side by side
            scale, idx = job.search(x.T.reshape(-1, g, n))
            scale, idx = scale.reshape(-1, n).T, idx.reshape(width, n).T
        else:
            scale, idx = job.search(x.reshape(-1, g, 1))
        groups, idx = x.reshape(-1, g, 1), idx.reshape(-1, g, 1)
        scale = scale.reshape(-1, 1, 1)
        scales, codes = scale.reshape(n, width // g), job.pack(idx.reshape(n, width))
        mx.eval(scales, codes)
        job.scales[rows] = np.array(scales, copy=False)
        job.codes[rows] = np.array(codes, copy=False)
        if sketch:
            residual = (groups - levels[idx] * scale).reshape(n, width)
            projected = rotate(residual, spec.rotation_block, sketch.multiplier)
            norms = best_norm(mx.abs(projected).sum(axis=-1), width)
            sketch.codes[rows] = np.array(pack_codes(projected >= 0, 1), copy=False)
            sketch.norms[rows] = np.array(norms, copy=False)

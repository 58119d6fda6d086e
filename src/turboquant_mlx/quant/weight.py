"""Quantize and decode one weight matrix, or a stack of them (experts).

With W [O, I], an input multiplier m [I] and the block transform H, the stored domain is
W' = W diag(1/m) H^T, so that W x = W' (H (m * x)). W' is coded in groups along its rows.

The work goes in blocks of rows, so memory stays bounded however large the tensor is, and a block's
result depends on nothing but its rows: neither the number of threads nor their order can change a
byte. On the CPU blocks are spread over threads and computed by NumPy, elsewhere by MLX.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import QuantizationError
from .codebook import lloyd_max, ternary
from .packing import pack_codes, pack_trits, unpack_codes, unpack_trits
from .qjl import decode_sketch
from .rotation import check_block, hadamard_columns, random_signs, rotate, unrotate
from .scales import decode_scales, encode_scales, search_scales, table_exponent
from .spec import QuantSpec

BLOCK_BYTES = 64 << 20  # float32 working set of one block on a GPU, and of one decoded block
_TASK_ROWS = 64  # rows of one task of a thread: long enough to vectorise over
_CHUNK_VALUES = 1 << 15  # weights that one thread holds in float32 at a time (fits its cache)

ArrayLike = Any  # mx.array or np.ndarray
_FLOATS = (mx.float32, mx.float16, mx.bfloat16)


@dataclass
class PackedWeight:
    """One quantized weight.

    Attributes:
        spec: how to read it.
        shape: (O, I), or (E, O, I) for a stack.
        codes: uint32 [..., O, words].
        scales: float16 or uint8 [..., O, I / group_size].
        table: float32 [2**window_bits], or [3] for ternary; times the scale, the value of a code.
        multiplier: float16 [I], m above.
        qjl_codes: uint32 [..., O, ceil(I / 32)], None without QJL.
        qjl_norms: float16 [..., O], None without QJL.
        qjl_multiplier: float16 [I], None without QJL.
    """

    spec: QuantSpec
    shape: tuple[int, ...]
    codes: mx.array
    scales: mx.array
    table: mx.array
    multiplier: mx.array
    qjl_codes: mx.array | None = None
    qjl_norms: mx.array | None = None
    qjl_multiplier: mx.array | None = None

    def arrays(self) -> dict[str, mx.array]:
        """The arrays that are present, by attribute name."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: a for name, a in found.items() if isinstance(a, mx.array)}

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, multipliers included."""
        return sum(a.nbytes for a in self.arrays().values())

    def rows(self, start: int, stop: int) -> PackedWeight:
        """The rows start..stop-1 of a matrix (experts of a stack) as a weight of their own."""
        return self._with_rows(lambda a: a[start:stop])

    def expert(self, index: int) -> PackedWeight:
        """One matrix of a stack."""
        return self._with_rows(lambda a: a[index])

    def flat(self) -> PackedWeight:
        """A stack as one tall matrix."""
        rows = math.prod(self.shape[:-1])
        return self._with_rows(lambda a: a.reshape(rows, *a.shape[len(self.shape) - 1 :]))

    def _with_rows(self, choose: Callable[[mx.array], mx.array]) -> PackedWeight:
        """The same weight with the arrays that have rows changed; the rest is shared."""
        changes = {
            name: choose(a)
            for name, a in self.arrays().items()
            if name in ("codes", "scales", "qjl_codes", "qjl_norms")
        }
        shape = (*changes["codes"].shape[:-1], self.shape[-1])
        return replace(self, shape=shape, **changes)


def code_levels(spec: QuantSpec) -> np.ndarray:
    """The table of a plain code for N(0, 1): float32 [2**bits], or [3] for ternary."""
    return ternary() if spec.code == "ternary" else lloyd_max(spec.bits)


@dataclass
class _Job:
    """One weight on its way: inputs as rows, outputs filled in place."""

    spec: QuantSpec
    name: str
    width: int
    levels: np.ndarray
    inverse_multiplier: np.ndarray  # float32 [I]
    codes: np.ndarray
    scales: np.ndarray  # float32 [rows, I / g]
    qjl_multiplier: np.ndarray | None = None  # float32 [I]
    qjl_codes: np.ndarray | None = None
    qjl_norms: np.ndarray | None = None  # float32 [rows]

    def pack(self, idx: Any) -> Any:
        return pack_trits(idx) if self.spec.code == "ternary" else pack_codes(idx, self.spec.bits)

    def fail_not_finite(self) -> QuantizationError:
        return QuantizationError(f"{self.name} has values that are not finite")


def quantize_weight(
    weight: mx.array,
    spec: QuantSpec,
    *,
    multiplier: ArrayLike | None = None,
    qjl_multiplier: ArrayLike | None = None,
    seed: int = 42,
    label: str = "weight",
    name: str | None = None,
    threads: int | None = None,
    backend: str | None = None,
) -> PackedWeight:
    """Quantize one weight.

    Args:
        weight: [O, I] or [E, O, I]; float32, float16 or bfloat16.
        spec: the code. Trellis codes (window_bits > bits) have an encoder of their own.
        multiplier: [I], no zeros; stored as float16. Default: ``random_signs(I, seed, label)``.
        qjl_multiplier: [I] of +-1. Default: ``random_signs(I, seed, label + ".qjl")``.
        seed: of the random signs.
        label: of the random signs; weights that read the same input share it.
        name: the tensor's name in errors, default ``label``.
        threads: CPU threads, default all that the process may use. Never changes the result.
        backend: "numpy" or "mlx"; default NumPy on the CPU, MLX elsewhere.

    Returns:
        The packed weight, evaluated.

    Raises:
        QuantizationError: a shape, dtype, width, rotation block or multiplier that does not fit,
            or values that are not finite.
    """
    name = label if name is None else name
    _check(weight, spec, name)
    width = weight.shape[-1]
    rows = math.prod(weight.shape[:-1])
    m = _vector(multiplier, width, seed, label, name)
    sigma = None
    if spec.qjl:
        sigma = _vector(qjl_multiplier, width, seed, label + ".qjl", name)
    job = _Job(
        spec=spec,
        name=name,
        width=width,
        levels=code_levels(spec),
        inverse_multiplier=np.float32(1) / m.astype(np.float32),
        codes=np.empty((rows, spec.words_per_row(width)), np.uint32),
        scales=np.empty((rows, width // spec.group_size), np.float32),
    )
    if sigma is not None:
        job.qjl_multiplier = sigma.astype(np.float32)
        job.qjl_codes = np.empty((rows, -(-width // 32)), np.uint32)
        job.qjl_norms = np.empty(rows, np.float32)

    if backend is None:
        backend = "numpy" if mx.default_device().type == mx.DeviceType.cpu else "mlx"
    run = {"numpy": _run_numpy, "mlx": _run_mlx}[backend]
    run(job, weight.reshape(rows, width), threads)

    exponent = table_exponent(float(job.scales.max(initial=0.0)))
    lead = weight.shape[:-1]
    packed = PackedWeight(
        spec=spec,
        shape=tuple(weight.shape),
        codes=mx.array(job.codes.reshape(*lead, -1)),
        scales=mx.array(encode_scales(job.scales, spec.scale_layout, exponent).reshape(*lead, -1)),
        table=mx.array(np.ldexp(job.levels, exponent)),
        multiplier=mx.array(m),
    )
    if sigma is not None and job.qjl_codes is not None and job.qjl_norms is not None:
        if not np.all(job.qjl_norms < 65504.0):
            raise QuantizationError(f"{name} has residuals too large for a QJL norm in float16")
        packed.qjl_codes = mx.array(job.qjl_codes.reshape(*lead, -1))
        packed.qjl_norms = mx.array(job.qjl_norms.astype(np.float16).reshape(lead))
        packed.qjl_multiplier = mx.array(sigma)
    return packed


def _check(weight: mx.array, spec: QuantSpec, name: str) -> None:
    if weight.ndim not in (2, 3):
        raise QuantizationError(f"{name} has {weight.ndim} dimensions, not 2 or 3")
    if weight.dtype not in _FLOATS:
        raise QuantizationError(f"{name} is {weight.dtype}, not a 16- or 32-bit float")
    if 0 in weight.shape:
        raise QuantizationError(f"{name} is empty: {tuple(weight.shape)}")
    if weight.shape[-1] % spec.group_size:
        raise QuantizationError(
            f"{name} is {weight.shape[-1]} wide, not a multiple of the group size {spec.group_size}"
        )
    if spec.window_bits != spec.bits:
        raise QuantizationError(f"{name}: a plain code has no {spec.window_bits}-bit window")
    try:
        check_block(weight.shape[-1], spec.rotation_block)
    except QuantizationError as e:
        raise QuantizationError(f"{name}: {e.message}") from None


def _vector(given: ArrayLike | None, width: int, seed: int, label: str, name: str) -> np.ndarray:
    """A multiplier as float16, checked."""
    if given is None:
        return random_signs(width, seed, label).astype(np.float16)
    if isinstance(given, mx.array):
        given = np.array(given.astype(mx.float32))
    with np.errstate(over="ignore"):
        vector = np.asarray(given).astype(np.float16)
    if vector.shape != (width,):
        raise QuantizationError(
            f"{name}: the multiplier has shape {vector.shape}, the weight is {width} wide"
        )
    if not (np.isfinite(vector).all() and vector.all()):
        raise QuantizationError(f"{name}: the multiplier has zeros or values beyond float16")
    return vector


# ------------------------------------------------------------------------- NumPy on CPU threads


def _as_numpy(weight: mx.array) -> np.ndarray:
    """The same memory as a NumPy array; bfloat16 as its bits in uint16."""
    if weight.dtype == mx.bfloat16:
        weight = weight.view(mx.uint16)
    mx.eval(weight)
    return np.array(weight, copy=False)


def _usable_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _run_numpy(job: _Job, weight: mx.array, threads: int | None) -> None:
    source = _as_numpy(weight)
    starts = range(0, source.shape[0], _TASK_ROWS)
    workers = min(threads or _usable_cpus(), len(starts))
    if workers == 1:
        for start in starts:
            _quantize_rows(job, source, start)
        return
    waiting: deque[Future[None]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        try:
            for start in starts:
                if len(waiting) >= 2 * workers:
                    waiting.popleft().result()
                waiting.append(pool.submit(_quantize_rows, job, source, start))
            while waiting:
                waiting.popleft().result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _load_columns(source: np.ndarray, rows: slice, columns: slice) -> np.ndarray:
    """float32 [columns, rows]: a piece of the weight, transposed."""
    piece = np.ascontiguousarray(source[rows, columns].T)
    if piece.dtype == np.uint16:
        return (piece.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return piece.astype(np.float32)


def _chunks(job: _Job, rows: int) -> Iterator[slice]:
    """Column ranges that hold whole rotation blocks and groups."""
    unit = math.lcm(job.spec.rotation_block, job.spec.group_size)
    step = unit * max(1, _CHUNK_VALUES // (unit * rows))
    for start in range(0, job.width, step):
        yield slice(start, min(start + step, job.width))


def _quantize_rows(job: _Job, source: np.ndarray, start: int) -> None:
    """Quantize up to _TASK_ROWS rows from ``start``; vectors run along the rows."""
    spec, g = job.spec, job.spec.group_size
    rows = slice(start, min(start + _TASK_ROWS, source.shape[0]))
    n = rows.stop - rows.start
    idx = np.empty((n, job.width), np.uint8)
    signs = np.empty((n, job.width), np.uint8) if spec.qjl else None
    squares = np.zeros(n, np.float64)
    for columns in _chunks(job, n):
        x = _load_columns(source, rows, columns)
        if not np.isfinite(x).all():
            raise job.fail_not_finite()
        x *= job.inverse_multiplier[columns, None]
        x = hadamard_columns(x, spec.rotation_block)
        groups = x.reshape(-1, g, n)
        scale, best = search_scales(groups, job.levels, spec.scale_layout)
        if not np.isfinite(scale).all():
            raise job.fail_not_finite()
        job.scales[rows, columns.start // g : columns.stop // g] = scale[:, 0].T
        idx[:, columns] = best.reshape(-1, n).T
        if signs is not None and job.qjl_multiplier is not None:
            residual = (groups - job.levels.take(best) * scale).reshape(-1, n)
            squares += np.square(residual, dtype=np.float64).sum(axis=0)
            residual *= job.qjl_multiplier[columns, None]
            residual = hadamard_columns(residual, spec.rotation_block)
            signs[:, columns] = (residual >= 0).T
    job.codes[rows] = job.pack(idx)
    if signs is not None and job.qjl_codes is not None and job.qjl_norms is not None:
        job.qjl_codes[rows] = pack_codes(signs, 1)
        job.qjl_norms[rows] = np.sqrt(squares)


# --------------------------------------------------------------------------- MLX on a GPU


def _run_mlx(job: _Job, weight: mx.array, threads: int | None) -> None:
    spec, g, width = job.spec, job.spec.group_size, job.width
    inverse = mx.array(job.inverse_multiplier)
    levels = mx.array(job.levels)
    step = block_rows(width)
    for start in range(0, weight.shape[0], step):
        rows = slice(start, min(start + step, weight.shape[0]))
        n = rows.stop - rows.start
        x = weight[rows].astype(mx.float32)
        finite = mx.isfinite(x).all()
        x = rotate(x, spec.rotation_block, inverse)
        groups = x.reshape(-1, g, 1)
        scale, idx = search_scales(groups, job.levels, spec.scale_layout)
        finite = finite & mx.isfinite(scale).all()
        outputs = {
            "scales": scale.reshape(n, width // g),
            "codes": job.pack(idx.reshape(n, width)),
        }
        if job.qjl_multiplier is not None:
            residual = (groups - levels[idx] * scale).reshape(n, width)
            outputs["qjl_norms"] = mx.sqrt((residual * residual).sum(axis=-1))
            sketch = rotate(residual, spec.rotation_block, job.qjl_multiplier)
            outputs["qjl_codes"] = pack_codes(sketch >= 0, 1)
        mx.eval(finite, *outputs.values())
        if not finite.item():
            raise job.fail_not_finite()
        for name, values in outputs.items():
            getattr(job, name)[rows] = np.array(values, copy=False)


# ------------------------------------------------------------------------------- decoding


def block_rows(width: int) -> int:
    """Rows whose float32 values fill BLOCK_BYTES."""
    return max(1, BLOCK_BYTES // (4 * width))


def decode_indices(codes: ArrayLike, spec: QuantSpec, width: int) -> ArrayLike:
    """Table indices [..., width] of packed rows; NumPy or MLX."""
    if spec.code == "ternary":
        return unpack_trits(codes, width)
    return unpack_codes(codes, spec.bits, width, spec.window_bits, spec.tile)


def dequantize_rows(
    packed: PackedWeight,
    start: int,
    stop: int,
    *,
    rotated: bool = True,
    use_qjl: bool = False,
    dtype: mx.Dtype = mx.float32,
) -> mx.array:
    """Decode the rows start..stop-1, by default just what a product with W' needs.

    Args:
        packed: the weight; the rows of a stack count through all its matrices.
        start: first row.
        stop: end of the rows.
        rotated: stay in the stored domain W' instead of going back to W.
        use_qjl: add the sketch's residual where there is one.
        dtype: of the result; the computation is in float32.

    Returns:
        mx.array [stop - start, I], lazy.
    """
    if len(packed.shape) > 2:
        packed = packed.flat()
    spec, width = packed.spec, packed.shape[-1]
    indices = decode_indices(packed.codes[start:stop], spec, width)
    scale = decode_scales(packed.scales[start:stop], spec.scale_layout)
    groups = packed.table[indices].reshape(*scale.shape, spec.group_size) * scale[..., None]
    w = groups.reshape(indices.shape)
    if use_qjl and packed.qjl_codes is not None and packed.qjl_norms is not None:
        codes, norms = packed.qjl_codes[start:stop], packed.qjl_norms[start:stop]
        w = w + decode_sketch(codes, norms, packed.qjl_multiplier, width, spec.rotation_block)
    if not rotated:
        w = unrotate(w, spec.rotation_block) * packed.multiplier.astype(mx.float32)
    return w.astype(dtype)


def dequantize_weight(
    packed: PackedWeight,
    *,
    rotated: bool = False,
    use_qjl: bool = True,
    dtype: mx.Dtype = mx.float32,
) -> mx.array:
    """Decode a whole weight, by default as close to the original as it gets.

    Weights larger than BLOCK_BYTES are decoded and evaluated block by block, so that only the
    result is ever held as a whole.

    Args:
        packed: the weight.
        rotated: stay in the stored domain W' instead of going back to W.
        use_qjl: add the sketch's residual where there is one.
        dtype: of the result; the computation is in float32.

    Returns:
        mx.array of the weight's shape.
    """
    total = math.prod(packed.shape[:-1])
    step = block_rows(packed.shape[-1])
    blocks = []
    for start in range(0, total, step):
        stop = min(start + step, total)
        block = dequantize_rows(packed, start, stop, rotated=rotated, use_qjl=use_qjl, dtype=dtype)
        if step < total:
            mx.eval(block)
        blocks.append(block)
    whole = blocks[0] if len(blocks) == 1 else mx.concatenate(blocks, axis=0)
    return whole.reshape(packed.shape)

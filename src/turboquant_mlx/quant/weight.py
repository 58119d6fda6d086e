"""Quantize and decode one weight matrix, or a stack of them (experts).

With W [O, I], an input multiplier m [I] and the block transform H, the stored domain is
W' = W diag(1/m) H^T, so that W x = W' (H (m * x)). W' is coded in groups along its rows.

The work goes in blocks of rows, so memory stays bounded however large the tensor is, and a block's
result depends on nothing but its rows: neither the number of threads nor their order can change a
byte. On the CPU blocks are spread over threads and computed by NumPy, elsewhere by MLX.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import QuantizationError
from .codebook import lloyd_max, ternary
from .decode import (
    default_backend,
    dequantize_numpy,
    dequantize_rows,
    dequantize_weight,
)
from .encode import Job, Sketch, encode_mlx, encode_numpy
from .packed import PackedWeight
from .rotation import check_block, random_signs
from .scales import encode_scales, table_exponent
from .spec import QuantSpec
from .trellis import check_trellis
from .trellis_table import trellis_table

__all__ = [
    "PackedWeight",
    "code_levels",
    "dequantize_numpy",
    "dequantize_rows",
    "dequantize_weight",
    "quantize_weight",
]

ArrayLike = Any  # mx.array or np.ndarray
_FLOATS = (mx.float32, mx.float16, mx.bfloat16)
Encoder = Callable[[Job, mx.array, int | None], None]
_ENCODERS: dict[str, Encoder] = {"numpy": encode_numpy, "mlx": encode_mlx}


def code_levels(spec: QuantSpec) -> np.ndarray:
    """The table of a code for N(0, 1): float32 [2**window_bits], or [3] for ternary."""
    if spec.is_trellis:
        return trellis_table(spec.bits)
    return ternary() if spec.code == "ternary" else lloyd_max(spec.bits)


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
    encode: Encoder | None = None,
) -> PackedWeight:
    """Quantize one weight.

    Args:
        weight: [O, I] or [E, O, I]; float32, float16 or bfloat16.
        spec: the code; of trellis codes (window_bits > bits) those that ``check_trellis`` knows.
        multiplier: [I], no zeros; stored as float16. Default: ``random_signs(I, seed, label)``.
        qjl_multiplier: [I] of +-1. Default: ``random_signs(I, seed, label + ".qjl")``.
        seed: of the random signs.
        label: of the random signs; weights that read the same input share it.
        name: the tensor's name in errors, default ``label``.
        threads: CPU threads, default all that the process may use. Never changes the result.
        backend: "numpy" or "mlx"; default NumPy on the CPU, MLX elsewhere.
        encode: what chooses codes and scales instead, given the job, the weight [rows, I] and the
            number of threads.

    Returns:
        The packed weight, evaluated.

    Raises:
        QuantizationError: a shape, dtype, width, rotation block or multiplier that does not fit,
            or values that are not finite or exceed 1e30.
    """
    name = label if name is None else name
    _check(weight, spec, name)
    width = weight.shape[-1]
    rows = math.prod(weight.shape[:-1])
    m = _vector(multiplier, width, seed, label, name)
    job = Job(
        spec=spec,
        name=name,
        width=width,
        levels=code_levels(spec),
        inverse_multiplier=np.float32(1) / m.astype(np.float32),
        codes=np.empty((rows, spec.words_per_row(width)), np.uint32),
        scales=np.empty((rows, width // spec.group_size), np.float32),
    )
    if spec.qjl:
        sigma = _vector(qjl_multiplier, width, seed, label + ".qjl", name)
        job.sketch = Sketch(
            multiplier=sigma.astype(np.float32),
            codes=np.empty((rows, -(-width // 32)), np.uint32),
            norms=np.empty(rows, np.float32),
        )
    encode = encode or _ENCODERS[backend or default_backend()]
    encode(job, weight.reshape(rows, width), threads)

    exponent = table_exponent(float(job.scales.max()))
    scales = encode_scales(job.scales, spec.scale_layout, exponent)
    lead = weight.shape[:-1]
    packed = PackedWeight(
        spec=spec,
        shape=tuple(weight.shape),
        codes=mx.array(job.codes.reshape(*lead, -1)),
        scales=mx.array(scales.reshape(*lead, -1)),
        table=mx.array(np.ldexp(job.levels, exponent)),
        multiplier=mx.array(m),
    )
    if job.sketch:
        if not (job.sketch.norms < 65504.0).all():
            raise QuantizationError(f"{name} has residuals too large for a QJL norm in float16")
        packed.qjl_codes = mx.array(job.sketch.codes.reshape(*lead, -1))
        packed.qjl_norms = mx.array(job.sketch.norms.astype(np.float16).reshape(lead))
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
    try:
        if spec.is_trellis:
            check_trellis(spec, weight.shape[-1])
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

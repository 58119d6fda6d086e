"""Decode packed weights.

``dequantize_rows`` is plain MLX and lazy: it can be traced, compiled and run anywhere.
``dequantize_weight`` decodes a whole weight at once and uses NumPy on the CPU, several times
faster there.
"""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np

from .encode import TASK_ROWS, chunks
from .lookup import RowDecoder
from .packed import PackedWeight, block_rows
from .packing import unpack_codes, unpack_trits
from .qjl import decode_sketch, sketch_factor
from .rotation import hadamard_columns, unrotate
from .scales import decode_scales
from .spec import QuantSpec
from .threads import for_each


def decode_indices(codes: Any, spec: QuantSpec, width: int) -> Any:
    """Table indices uint8 or uint16 [..., width] of packed rows; NumPy or MLX."""
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
    threads: int | None = None,
    backend: str | None = None,
) -> mx.array:
    """Decode a whole weight, by default as close to the original as it gets.

    Weights larger than BLOCK_BYTES are decoded and evaluated in blocks, so no intermediate result
    is ever held as a whole.

    Args:
        packed: the weight.
        rotated: stay in the stored domain W' instead of going back to W.
        use_qjl: add the sketch's residual where there is one.
        dtype: of the result; the computation is in float32.
        threads: CPU threads, default all that the process may use. Never changes the result.
        backend: "numpy" or "mlx"; default NumPy on the CPU, MLX elsewhere.

    Returns:
        mx.array of the weight's shape.
    """
    on_numpy = (backend or default_backend()) == "numpy"
    total = math.prod(packed.shape[:-1])
    step = block_rows(packed.shape[-1])
    blocks = []
    for start in range(0, total, step):
        stop = min(start + step, total)
        if on_numpy:
            values = dequantize_numpy(
                packed, start, stop, rotated=rotated, use_qjl=use_qjl, threads=threads
            )
            block = mx.array(values).astype(dtype)
        else:
            block = dequantize_rows(
                packed, start, stop, rotated=rotated, use_qjl=use_qjl, dtype=dtype
            )
        if step < total:
            mx.eval(block)
        blocks.append(block)
    whole = blocks[0] if len(blocks) == 1 else mx.concatenate(blocks, axis=0)
    return whole.reshape(packed.shape)


def default_backend() -> str:
    """ "numpy" on the CPU, "mlx" on a GPU."""
    return "numpy" if mx.default_device().type == mx.DeviceType.cpu else "mlx"


def dequantize_numpy(
    packed: PackedWeight,
    start: int,
    stop: int,
    *,
    rotated: bool = False,
    use_qjl: bool = True,
    threads: int | None = None,
) -> np.ndarray:
    """``dequantize_rows`` in NumPy on CPU threads.

    Args:
        packed: the weight; the rows of a stack count through all its matrices.
        start: first row.
        stop: end of the rows.
        rotated: stay in the stored domain W' instead of going back to W.
        use_qjl: add the sketch's residual where there is one.
        threads: CPU threads, default all that the process may use.

    Returns:
        float32 [stop - start, I].
    """
    decoder = NumpyDecoder(packed, rotated=rotated, use_qjl=use_qjl)
    out = np.empty((stop - start, packed.shape[-1]), np.float32)

    def work(first: int) -> None:
        last = min(first + TASK_ROWS, stop)
        out[first - start : last - start] = decoder(first, last)

    for_each(work, range(start, stop, TASK_ROWS), threads)
    return out


class NumpyDecoder:
    """Decodes rows of one packed weight in NumPy; may be called from several threads at once.

    Args:
        packed: the weight; the rows of a stack count through all its matrices. Its arrays are
            evaluated here and viewed, not copied.
        rotated: stay in the stored domain W' instead of going back to W.
        use_qjl: add the sketch's residual where there is one.
    """

    def __init__(self, packed: PackedWeight, *, rotated: bool, use_qjl: bool):
        if len(packed.shape) > 2:
            packed = packed.flat()
        arrays = packed.arrays()
        mx.eval(*arrays.values())
        self._spec = packed.spec
        self._rotated = rotated
        self._decoder = RowDecoder(packed)
        self._others = {
            name: np.array(array, copy=False)
            for name, array in arrays.items()
            if name == "multiplier" or (use_qjl and name.startswith("qjl"))
        }

    def __call__(self, start: int, stop: int) -> np.ndarray:
        """float32 [stop - start, I]: rows start..stop-1."""
        values = self._decoder(start, stop)
        _finish_rows(self._spec, self._others, slice(start, stop), values, self._rotated)
        return values


def _finish_rows(
    spec: QuantSpec, a: dict[str, np.ndarray], rows: slice, values: np.ndarray, rotated: bool
) -> None:
    """Add the sketch where there is one and leave the stored domain, in place."""
    n, width = values.shape
    block = spec.rotation_block
    sketch = None
    if "qjl_codes" in a:
        norms = a["qjl_norms"][rows].astype(np.float32) * np.float32(sketch_factor(width))
        sketch = unpack_codes(a["qjl_codes"][rows], 1, width).astype(np.float32)
        sketch = (2 * sketch - 1) * norms[:, None]
    if rotated and sketch is None:
        return
    for columns in chunks(width, block, n):
        x = np.ascontiguousarray(values[:, columns].T)
        if sketch is not None:
            residual = np.ascontiguousarray(sketch[:, columns].T)
            residual = hadamard_columns(residual, block, transpose=True)
            x += residual * a["qjl_multiplier"][columns, None].astype(np.float32)
        if not rotated:
            x = hadamard_columns(x, block, transpose=True)
            x *= a["multiplier"][columns, None].astype(np.float32)
        values[:, columns] = x.T

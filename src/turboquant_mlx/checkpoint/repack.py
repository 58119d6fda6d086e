"""The tensors of a predecessor folder in our layout; ``predecessor`` says what they are."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from ..errors import CheckpointError
from ..quant.spec import WORD_BITS
from .predecessor import AFFINE, HINT, SPECULATOR_PREFIX
from .schema import Manifest, ModuleEntry, expected_tensors

BLOCK_BYTES = 4 * 2**20
"""Packed words that are put into the dense layout at once."""


def repack(weights: dict[str, mx.array], manifest: Manifest) -> dict[str, mx.array]:
    """Turn the tensors of a predecessor folder into those of our format.

    Args:
        weights: every tensor of the folder, by name, lazily loaded or not. The dictionary is
            emptied on the way, so that a packed tensor is given up as soon as it is repacked.
        manifest: what ``manifest_from_headers`` made of the same folder.

    Returns:
        Our tensors (``schema.expected_tensors``) of every module of the manifest, and all others
        as they were. ``tq_speculator.*`` is left out. Codes that need another layout are
        evaluated here, in blocks of ``BLOCK_BYTES``; everything else stays as lazy as it came.

    Raises:
        CheckpointError: a tensor of a module is missing, surplus or does not have the shape that
            the manifest says; or scales that are not float16 cannot be stored as float16 exactly.
    """
    out: dict[str, mx.array] = {}
    for path, entry in manifest.modules.items():
        found = _affine_arrays(weights, path) if entry.is_affine else _arrays(weights, entry)
        if f"{path}.bias" in weights or entry.bias:
            found["bias"] = _take(weights, f"{path}.bias")
        wanted = expected_tensors(entry)
        for suffix, array in found.items():
            if suffix not in wanted:
                raise CheckpointError(f"tensor {path}.{suffix} belongs to nothing", hint=HINT)
            if array.shape != wanted[suffix].shape:
                raise CheckpointError(
                    f"tensor {path}.{suffix} is {list(array.shape)} after repacking, not "
                    f"{list(wanted[suffix].shape)}",
                    hint=HINT,
                )
            out[f"{path}.{suffix}"] = array
    for name in list(weights):
        array = weights.pop(name)
        if name.startswith(SPECULATOR_PREFIX):
            continue
        if name.rpartition(".")[0] in manifest.modules:
            raise CheckpointError(f"tensor {name} belongs to nothing", hint=HINT)
        out[name] = array
    return out


def dense_codes(words: mx.array, bits: int, width: int) -> mx.array:
    """Move codes from whole codes per word into one dense stream per row.

    Args:
        words: uint32 [..., ceil(width / (32 // bits))]. Code k of a word is at bit k * bits; the
            bits of a word above its last code are ignored.
        bits: 1 to 8.
        width: codes in a row.

    Returns:
        uint32 [..., ceil(width * bits / 32)], code i of a row at bits [i * bits, (i + 1) * bits)
        counted from the row's first word. The same array where both layouts agree (1, 2, 4 and
        8 bits). Evaluated.
    """
    if WORD_BITS % bits == 0:
        return words
    rows = words.reshape(-1, words.shape[-1])
    step = max(1, BLOCK_BYTES // (4 * words.shape[-1]))
    blocks = []
    for start in range(0, rows.shape[0], step):
        blocks.append(_dense_block(rows[start : start + step], bits, width))
        mx.eval(blocks[-1])
    dense = blocks[0] if len(blocks) == 1 else mx.concatenate(blocks)
    dense = dense.reshape(*words.shape[:-1], dense.shape[-1])
    mx.eval(dense)
    return dense


def _take(weights: dict[str, mx.array], name: str) -> mx.array:
    if name not in weights:
        raise CheckpointError(f"tensor {name} is missing", hint=HINT)
    return weights.pop(name)


def _affine_arrays(weights: dict[str, mx.array], path: str) -> dict[str, mx.array]:
    return {suffix: _take(weights, f"{path}.{suffix}") for suffix in AFFINE}


def _arrays(weights: dict[str, mx.array], entry: ModuleEntry) -> dict[str, mx.array]:
    """Our arrays of one module, taken out of ``weights``."""
    path, spec = entry.path, entry.spec
    codes = _take(weights, f"{path}.weight")
    if spec.code == "scalar":
        words = -(-entry.width // (WORD_BITS // spec.bits))
        if codes.shape[-1] != words:
            raise CheckpointError(
                f"tensor {path}.weight has {codes.shape[-1]} words in a row, not {words}",
                hint=HINT,
            )
        codes = dense_codes(codes, spec.bits, entry.width)
    scales, exponent = _float16_scales(_take(weights, f"{path}.scales"), f"{path}.scales")
    table = _take(weights, f"{path}.codebook").astype(mx.float32)
    found = {
        "codes": codes,
        "scales": scales,
        "table": table * 2.0**exponent if exponent else table,
        "multiplier": _take(weights, f"{path}.signs").astype(mx.float16),
    }
    if spec.qjl:
        found["qjl_codes"] = _take(weights, f"{path}.qjl_packed")
        found["qjl_norms"] = _take(weights, f"{path}.qjl_norms").astype(mx.float16)
        found["qjl_multiplier"] = _take(weights, f"{path}.qjl_signs").astype(mx.float16)
    return found


def _float16_scales(scales: mx.array, name: str) -> tuple[mx.array, int]:
    """Scales as float16, and the exponent e of the power of two that the table must take over.

    scales = 2**e * float16 scales, exactly. Wider types have a wider range than float16 needs,
    but only within one tensor does the range matter.
    """
    if scales.dtype == mx.float16:
        return scales, 0
    wide = scales.astype(mx.float32)
    largest = mx.abs(wide).max().item()
    if not np.isfinite(largest):
        raise CheckpointError(f"tensor {name} holds values that are not finite")
    exponent = int(np.frexp(largest)[1])
    # Two steps: 2**-exponent alone may be beyond float32 where the product is not.
    half = exponent // 2
    narrow = (wide * 2.0**-half * 2.0 ** (half - exponent)).astype(mx.float16)
    back = narrow.astype(mx.float32) * 2.0 ** (exponent - half) * 2.0**half
    if not mx.array_equal(back, wide).item():
        raise CheckpointError(f"tensor {name} cannot be stored as float16 without a loss")
    return narrow, exponent


def _dense_block(words: mx.array, bits: int, width: int) -> mx.array:
    """Dense stream of rows whose words hold fewer than 32 bits of codes (not evaluated).

    With u unused bits in a word, word j of the stream starts u * j bits into word j of the
    source and ends in the next one, until after 32 / u source words both start anew together.
    """
    used = WORD_BITS // bits * bits
    unused = WORD_BITS - used
    period = WORD_BITS // unused
    rows, n_words = words.shape
    padded = mx.pad(words & mx.array((1 << used) - 1, mx.uint32), [(0, 0), (0, -n_words % period)])
    source = padded.reshape(rows, -1, period)
    offset = mx.arange(period - 1, dtype=mx.uint32) * unused
    stream = (source[..., :-1] >> offset) | (source[..., 1:] << (used - offset))
    return mx.contiguous(stream.reshape(rows, -1)[:, : -(-width * bits // WORD_BITS)])

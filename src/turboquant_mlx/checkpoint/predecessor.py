"""Reading folders that the predecessor package (turboquant-mlx-full, up to 0.30.0) wrote.

Such a folder has ``quantization.mode == "turboquant"`` in config.json and neither a version nor a
manifest: what each module is follows from which tensors it has and from their shapes.
``manifest_from_headers`` works that out from the safetensors headers alone, ``repack.repack`` turns
the tensors into ours. After both, nothing else in this package knows that the folder was not ours.

Per module P of width I, with b bits, in their files and in ours:

    P.weight      uint32, 32 // b codes in a word     -> P.codes, a dense stream (3 bits cost 3.0)
                  or 20 trits in a word                  P.codes, unchanged
    P.scales      float16 (bfloat16, float32)         -> P.scales, float16
    P.codebook    float16 or float32 [2**b] or [3]    -> P.table, float32
    P.signs       [I], +-1                            -> P.multiplier, float16
    P.qjl_packed, P.qjl_norms, P.qjl_signs            -> P.qjl_codes, P.qjl_norms, P.qjl_multiplier
    P.bias and every other tensor                     -> unchanged

Decoded weights are exactly theirs. Each module has signs of its own, so each leads its own
rotation group. ``tq_speculator.*`` (a kept multi-token-prediction head) is counted and dropped.

Their reader fills what is missing with random numbers. This one raises a ``CheckpointError``
naming the tensor. (Whether whole modules or files are absent is not for this module to see:
``source.inspect_folder`` holds the files against the index, strict loading the modules against
the model.)

MLX-free: the planner reads headers too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import numpy as np

from ..errors import CheckpointError, QuantizationError, UnsupportedModelError
from ..quant.spec import TRITS_PER_WORD, WORD_BITS, QuantSpec
from .schema import (
    AFFINE_GROUP_SIZES,
    FLOAT_DTYPES,
    HADAMARD_FACTORS,
    Kind,
    Manifest,
    ModuleEntry,
    MtpInfo,
    has_manifest,
)

MODE = "turboquant"
CREATED_BY = "predecessor format"
ROTATIONS = ("hadamard", "blockwise_hadamard", "none")
SPECULATOR_PREFIX = "tq_speculator."
SPECULATOR_FILE = "model-mtp.safetensors"
AFFINE_BITS = (2, 3, 4, 5, 6, 8)

_CONFIG_KEYS = ("quantization", "quantization_config")
_REQUIRED = ("weight", "scales", "codebook", "signs")
_QJL = ("qjl_packed", "qjl_norms", "qjl_signs")
_MARKS = ("codebook", "signs", *_QJL)
AFFINE = ("weight", "scales", "biases")
# How mlx-lm's models call their embeddings; "embed_out" and "embedding_projection" are linear.
_EMBEDDING_NAME = re.compile(r"wte|wpe|embed|embed_in|embed_tokens\w*|\w*embeddings?(_table)?")
HINT = "the folder is incomplete or damaged; download it or convert the model again"


class TensorHeader(Protocol):
    """What is needed of a tensor's header: ``headers.TensorInfo`` has it."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


def is_predecessor(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a folder in the predecessor's format."""
    if has_manifest(config):
        return False
    blocks = (config.get(key) for key in _CONFIG_KEYS)
    return any(isinstance(block, Mapping) and block.get("mode") == MODE for block in blocks)


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config without its quantization, so that the model's plain class is built from it."""
    return {key: value for key, value in config.items() if key not in _CONFIG_KEYS}


def rotation_block(width: int) -> int:
    """Length of the predecessor's Hadamard blocks for inputs of a width.

    The largest 2**k, 12 * 2**k, 20 * 2**k or 28 * 2**k that divides the width, of any size.
    """
    quotients = [(m, width // m) for m in HADAMARD_FACTORS if width % m == 0]
    return max(m * (quotient & -quotient) for m, quotient in quotients)


def manifest_from_headers(
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorHeader],
    *,
    read_tensor: Callable[[str], Any] | None = None,
    width_of: Callable[[str], int | None] | None = None,
) -> Manifest:
    """The manifest that a predecessor folder would have, if it had one.

    Args:
        config: the whole content of config.json.
        tensors: every tensor of the folder, name -> type and shape.
        read_tensor: gives a tensor's values (anything ``np.asarray`` takes). Called for ``signs``
            only, and only if the config says that there is no rotation: old releases stored
            rotated weights all the same, and negative signs are how one can tell. Without it the
            config is believed, which is good enough for sizes but not for decoding.
        width_of: input width of a module of the model, or None where it is unknown. Only affine
            modules need it, if more than one pair of bits and group size fits their shapes and
            the config's ``affine_extras`` does not decide.

    Returns:
        A manifest with one entry per quantized module. Every module leads its own rotation group.
        ``mtp`` counts the ``tq_speculator.*`` tensors that ``repack`` drops.

        The kind is told from the shapes: a stack of three dimensions is a "switch" kind, an
        affine matrix an "affine_embedding" if its name says so. A caller with the model at hand
        knows better what sort of layer an affine module is.

    Raises:
        CheckpointError: a tensor of a module is missing, surplus, or of a type or shape that does
            not fit the others; or the config contradicts itself. The message names it.
        UnsupportedModelError: QJL together with rotation "none".
    """
    block = _quantization(config)
    rotated = _is_rotated(block)
    by_module: dict[str, dict[str, TensorHeader]] = {}
    speculator = 0
    for name, info in tensors.items():
        if name.startswith(SPECULATOR_PREFIX):
            speculator += 1
            continue
        path, _, suffix = name.rpartition(".")
        by_module.setdefault(path, {})[suffix] = info

    modules: dict[str, ModuleEntry] = {}
    for path, parts in by_module.items():
        if any(mark in parts for mark in _MARKS):
            modules[path] = _turboquant_entry(path, parts, rotated, read_tensor)
        elif "scales" in parts or "biases" in parts:
            modules[path] = _affine_entry(path, parts, _affine_hint(block), width_of)
        elif "weight" in parts and parts["weight"].dtype == "U32":
            raise CheckpointError(
                f"tensor {path}.weight is packed, but its scales and codebook are missing",
                hint=HINT,
            )
    return Manifest(
        modules=modules,
        options={key: value for key, value in block.items() if key not in ("codebook", "mode")},
        created_by=CREATED_BY,
        mtp=MtpInfo(SPECULATOR_FILE, speculator) if speculator else None,
    )


# ---- what the headers say ---------------------------------------------------------------------


def _quantization(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The quantization block of a config; its two copies must not disagree where it matters."""
    blocks = [config[key] for key in _CONFIG_KEYS if isinstance(config.get(key), Mapping)]
    blocks = [block for block in blocks if block.get("mode") == MODE]
    if not blocks:
        raise CheckpointError(f"config.json has no quantization block of mode {MODE!r}")
    for key in ("rotation", "affine_extras"):
        if any(block.get(key) != blocks[0].get(key) for block in blocks):
            raise CheckpointError(
                f"config.json: quantization and quantization_config disagree on {key!r}"
            )
    return blocks[0]


def _is_rotated(block: Mapping[str, Any]) -> bool:
    rotation = block.get("rotation", "hadamard")
    if rotation not in ROTATIONS:
        raise CheckpointError(f"config.json: unknown rotation {rotation!r}")
    return rotation != "none"


def _affine_hint(block: Mapping[str, Any]) -> tuple[int, int] | None:
    extras = block.get("affine_extras")
    if extras is None:
        return None
    if not isinstance(extras, Mapping) or not {"bits", "group_size"} <= set(extras):
        raise CheckpointError("config.json: affine_extras does not say bits and group_size")
    return extras["bits"], extras["group_size"]


def _turboquant_entry(
    path: str,
    parts: Mapping[str, TensorHeader],
    rotated: bool,
    read_tensor: Callable[[str], Any] | None,
) -> ModuleEntry:
    qjl = any(suffix in parts for suffix in _QJL)
    _check_names(path, parts, (*_REQUIRED, *_QJL) if qjl else _REQUIRED)
    rows = parts["weight"].shape[:-1]
    if len(rows) not in (1, 2):
        raise CheckpointError(
            f"tensor {path}.weight has {len(rows) + 1} dimensions, neither a matrix nor a stack"
        )
    (width,) = _vector(path, "signs", parts)
    (levels,) = _vector(path, "codebook", parts)
    groups = parts["scales"].shape[-1] if parts["scales"].shape else 0
    if groups < 1 or width % groups:
        raise CheckpointError(
            f"tensor {path}.scales has {groups} groups, which do not divide the width {width}",
            hint=HINT,
        )
    bits = levels.bit_length() - 1
    ternary = levels == 3
    if not ternary and (levels != 1 << bits or not 1 <= bits <= 8):
        raise CheckpointError(f"tensor {path}.codebook has {levels} entries: no such code")
    per_word = TRITS_PER_WORD if ternary else WORD_BITS // bits
    _check(path, "weight", parts, ("U32",), (*rows, -(-width // per_word)))
    _check(path, "scales", parts, FLOAT_DTYPES, (*rows, groups))
    if qjl:
        _check(path, "qjl_packed", parts, ("U32",), (*rows, -(-width // WORD_BITS)))
        _check(path, "qjl_norms", parts, FLOAT_DTYPES, rows)
        _check(path, "qjl_signs", parts, FLOAT_DTYPES, (width,))
    if "bias" in parts:
        _check(path, "bias", parts, FLOAT_DTYPES, rows)
    if not rotated and read_tensor is not None:
        rotated = bool((np.asarray(read_tensor(f"{path}.signs")) < 0).any())
    if qjl and not rotated and rotation_block(width) > 1:
        # There the sketch is rotated and the weight is not; our layers rotate both or neither.
        raise UnsupportedModelError(
            f"module {path}: a QJL sketch of a weight that is not rotated is not supported",
            hint="convert the model again with our own converter",
        )
    try:
        spec = QuantSpec(
            code="ternary" if ternary else "scalar",
            bits=2 if ternary else bits,
            group_size=width // groups,
            rotation_block=rotation_block(width) if rotated else 1,
            qjl=qjl,
        )
    except QuantizationError as error:
        raise CheckpointError(f"module {path}: {error.message}") from None
    kind: Kind = "linear" if len(rows) == 1 else "switch"
    return ModuleEntry.from_spec(path, kind, (*rows, width), spec, bias="bias" in parts)


def _affine_entry(
    path: str,
    parts: Mapping[str, TensorHeader],
    hint: tuple[int, int] | None,
    width_of: Callable[[str], int | None] | None,
) -> ModuleEntry:
    _check_names(path, parts, AFFINE)
    rows = parts["weight"].shape[:-1]
    words = parts["weight"].shape[-1] if parts["weight"].shape else 0
    groups = parts["scales"].shape[-1] if parts["scales"].shape else 0
    if len(rows) not in (1, 2):
        raise CheckpointError(f"tensor {path}.weight is neither a matrix nor a stack of them")
    _check(path, "weight", parts, ("U32",), (*rows, words))
    _check(path, "scales", parts, FLOAT_DTYPES, (*rows, groups))
    _check(path, "biases", parts, FLOAT_DTYPES, (*rows, groups))
    if "bias" in parts:
        _check(path, "bias", parts, FLOAT_DTYPES, rows)
    # words * 32 = width * bits and width = groups * group_size: only bits * group_size is certain.
    fits = [
        (bits, size)
        for bits in AFFINE_BITS
        for size in AFFINE_GROUP_SIZES
        if words and groups * size * bits == words * WORD_BITS
    ]
    known = width_of(path) if width_of is not None else None
    if known is not None:
        fits = [(bits, size) for bits, size in fits if groups * size == known]
    if len(fits) > 1 and hint in fits:
        fits = [hint]
    if not fits:
        raise CheckpointError(
            f"tensors {path}.weight {list(parts['weight'].shape)} and {path}.scales "
            f"{list(parts['scales'].shape)} fit no affine quantization",
            hint=HINT,
        )
    if len(fits) > 1:
        pairs = " or ".join(f"{bits} bits of group size {size}" for bits, size in fits)
        raise CheckpointError(f"module {path}: its shapes fit {pairs}, and nothing says which")
    bits, size = fits[0]
    return ModuleEntry(
        path=path,
        kind=_affine_kind(path, len(rows), "bias" in parts),
        shape=(*rows, groups * size),
        bits=bits,
        group_size=size,
        bias="bias" in parts,
    )


def _affine_kind(path: str, rank: int, has_bias: bool) -> Kind:
    if rank == 2:
        return "affine_switch"
    if not has_bias and _EMBEDDING_NAME.fullmatch(path.rpartition(".")[2]):
        return "affine_embedding"
    return "affine_linear"


def _check_names(path: str, parts: Iterable[str], wanted: tuple[str, ...]) -> None:
    present = set(parts)
    missing = [f"{path}.{suffix}" for suffix in wanted if suffix not in present]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        noun = "tensor" if len(missing) == 1 else "tensors"
        raise CheckpointError(f"{noun} {', '.join(missing)} {verb} missing", hint=HINT)
    for suffix in parts:
        if suffix not in wanted and suffix != "bias":
            raise CheckpointError(f"tensor {path}.{suffix} belongs to nothing", hint=HINT)


def _vector(path: str, suffix: str, parts: Mapping[str, TensorHeader]) -> tuple[int]:
    shape = parts[suffix].shape
    if len(shape) != 1 or not shape[0]:
        raise CheckpointError(f"tensor {path}.{suffix} is {list(shape)}, not a vector", hint=HINT)
    _check(path, suffix, parts, FLOAT_DTYPES, shape)
    return (shape[0],)


def _check(
    path: str,
    suffix: str,
    parts: Mapping[str, TensorHeader],
    dtypes: tuple[str, ...],
    shape: tuple[int, ...],
) -> None:
    info = parts[suffix]
    if info.dtype not in dtypes:
        raise CheckpointError(f"tensor {path}.{suffix} is {info.dtype}, not {' or '.join(dtypes)}")
    if tuple(info.shape) != tuple(shape):
        raise CheckpointError(
            f"tensor {path}.{suffix} is {list(info.shape)}, the other tensors of its module ask "
            f"for {list(shape)}",
            hint=HINT,
        )

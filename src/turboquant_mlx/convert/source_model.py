"""The model to convert: built by mlx-lm, its weights still on disk, its modules listed."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm import utils as mlx_lm_utils

from ..checkpoint.config import read_json_object
from ..checkpoint.config_check import check_config
from ..checkpoint.loader import (
    KIMI_TYPES,
    call_mlx_lm,
    is_turboquant,
    load_tokenizer,
    normalized_config,
)
from ..checkpoint.model_class import SOURCE_MODEL_FILE, is_model_file
from ..checkpoint.source import Folder, has_tokenizer, inspect_folder, resolve
from ..errors import CheckpointError, TurboQuantError, UnsupportedModelError
from .recipe import ModuleInfo

SAFETENSORS_DTYPES = {
    mx.float32: "F32",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.uint8: "U8",
    mx.uint16: "U16",
    mx.uint32: "U32",
    mx.uint64: "U64",
    mx.int8: "I8",
    mx.int16: "I16",
    mx.int32: "I32",
    mx.int64: "I64",
    mx.bool_: "BOOL",
}

PLAIN_DTYPES = frozenset({"F16", "BF16", "F32", "F64"})

# Parts of a checkpoint that a text model has no use for, by a component of the tensor's name.
OTHER_MODALITIES = {
    "vision": ("vision_tower", "vision_model", "visual", "vision_encoder", "vision_embed_tokens"),
    "projector": ("multi_modal_projector", "mm_projector", "embed_vision", "patch_embed"),
    "audio": ("audio_tower", "audio_model", "embed_audio", "audio_encoder"),
}
BUFFERS = ("inv_freq", "masked_bias", "rotary_emb")
_MTP = re.compile(r"mtp(_\w+)?")

# mlx-lm's classes that multiply by the array of a tied embedding instead of asking the embedding
# to. MLX's affine embedding has packed codes in that place.
READ_EMBEDDING_DIRECTLY = frozenset({"llama4_text", "minicpm", "seed_oss"})


@dataclass
class SourceModel:
    """A source checkpoint opened for conversion.

    Attributes:
        folder: its checked files.
        config: normalised config.json, without any quantization of the source's own.
        model: the mlx-lm model, every weight lazy and floating point.
        source_precision: None, or what the source was quantized as ("mxfp4", "affine", ...).
        notes: what normalising and dequantizing had to say.
        tokenizer: the model's, in mlx-lm's wrapper.
        build_again: makes another instance of ``model``, as lazy as this one.
    """

    folder: Folder
    config: dict[str, Any]
    model: nn.Module
    source_precision: str | None
    notes: list[str]
    tokenizer: Any
    build_again: Callable[[], nn.Module]


def open_source(hf_path: str | Path, *, trust_remote_code: bool = False) -> SourceModel:
    """Find, check and build the model to convert; nothing large is read.

    Args:
        hf_path: a local folder or a hub repository.
        trust_remote_code: let code that comes with the source run.

    Raises:
        ModelNotFoundError, UnsupportedModelError, CheckpointError: each names what is wrong.
    """
    path = resolve(hf_path)
    folder = inspect_folder(path)
    if is_turboquant(folder.config):
        raise UnsupportedModelError(
            f"{hf_path} is already a TurboQuant model",
            hint="convert the 16-bit model that it was made from",
        )
    if not has_tokenizer(path):
        raise CheckpointError(
            f"{path} has no tokenizer", hint="copy the tokenizer's files into it first"
        )
    config, notes = normalized_config(folder)
    _describe_modelopt(path, config)
    _check_description(path, config)
    if (path / "generation_config.json").is_file():
        read_json_object(path / "generation_config.json")
    model_file = config.get("model_file")
    if model_file is not None and not is_model_file(model_file):
        raise UnsupportedModelError(
            f"{path}: model_file {model_file!r} is not a Python file in the folder itself"
        )
    is_local_kimi = config["model_type"] in KIMI_TYPES and Path(hf_path).is_dir()
    return build_source(
        folder,
        config,
        notes,
        lambda: load_tokenizer(path, config, trust_remote_code=trust_remote_code or is_local_kimi),
        trust_remote_code=trust_remote_code,
    )


def build_source(
    folder: Folder,
    config: dict[str, Any],
    notes: list[str],
    make_tokenizer: Callable[[], Any],
    *,
    trust_remote_code: bool,
) -> SourceModel:
    """Build the model of a folder whose config has been read, and check that it can be converted.

    Args:
        folder: the source.
        config: as ``normalized_config`` gives it.
        notes: what was said of it.
        make_tokenizer: called once the model stands.
        trust_remote_code: let code that comes with the source run.

    Raises:
        UnsupportedModelError, CheckpointError: each names what is wrong.
    """
    _check_description(folder.path, config)
    try:
        # again: some keys have got the names only now that the converted folder's check knows
        check_config(config, len(folder.tensors))
    except CheckpointError as error:
        raise CheckpointError(f"{folder.path}: {error.message}", error.hint) from None
    precision = _source_precision(config)
    build = partial(_build, folder, deepcopy(config), precision, trust_remote_code)
    model, loaded = build()
    # later than the model: this library reads the config too, and faults in it are not its own
    tokenizer = make_tokenizer()
    if precision is not None and all(t.dtype in PLAIN_DTYPES for t in folder.tensors.values()):
        notes = [
            *notes,
            f"the config speaks of a quantization ({precision}), the weights are plain",
        ]
    elif precision is not None:
        notes = [*notes, f"the source is quantized ({precision}); its weights are expanded first"]
        build = partial(_build_expanded, folder, build)
        _dequantize(folder, model)
    _check_floating(folder, model, precision)
    # the last one is a key of our own format, which a source has no say in
    for key in ("quantization", "quantization_config", "_name_or_path", SOURCE_MODEL_FILE):
        loaded.pop(key, None)
    return SourceModel(folder, loaded, model, precision, notes, tokenizer, lambda: build()[0])


def _describe_modelopt(path: Path, config: dict[str, Any]) -> None:
    """NVIDIA's exporter describes its quantization in a file of its own; move it to ``config``."""
    file = path / "hf_quant_config.json"
    if file.is_file() and _source_precision(config) is None:
        config["quantization_config"] = {"quant_method": "modelopt", **read_json_object(file)}


def _check_description(path: Path, config: dict[str, Any]) -> None:
    """Refuse a config that a converted folder could not be loaded with."""
    if not isinstance(config.get("text_config") or {}, dict):
        raise CheckpointError(f"{path}: config.json: text_config is not an object")


def _source_precision(config: dict[str, Any]) -> str | None:
    block = config.get("quantization") or config.get("quantization_config")
    block = block or (config.get("text_config") or {}).get("quantization_config")
    if not isinstance(block, dict) or not block:
        return None
    return str(block.get("quant_method") or block.get("mode") or "affine")


def _build(
    folder: Folder, config: dict[str, Any], precision: str | None, trust_remote_code: bool
) -> tuple[nn.Module, dict[str, Any]]:
    try:
        return call_mlx_lm(
            folder,
            model_config=config,
            get_model_classes=mlx_lm_utils._get_classes,
            trust_remote_code=trust_remote_code,
        )
    except TurboQuantError as error:
        if precision is None or error.hint is not None:
            raise  # nothing to do with how the weights are stored
        raise UnsupportedModelError(
            f"{folder.path} is quantized ({precision}) in a way that mlx-lm cannot expand: "
            + error.message.removeprefix(f"{folder.path}: "),
            hint="convert the 16-bit model that it was made from",
        ) from error


def _build_expanded(
    folder: Folder, build: Callable[[], tuple[nn.Module, dict[str, Any]]]
) -> tuple[nn.Module, dict[str, Any]]:
    model, loaded = build()
    _dequantize(folder, model)
    return model, loaded


def _dequantize(folder: Folder, model: nn.Module) -> None:
    """Replace the source's quantized layers by ordinary ones, their weights lazy."""
    for path, module in model.named_modules():
        if module.get("global_scale") is not None:
            raise UnsupportedModelError(
                f"{folder.path}: {path} has a global scale, which mlx-lm does not expand",
                hint="convert the 16-bit model that it was made from",
            )
    mlx_lm_utils.dequantize_model(model)


def _check_floating(folder: Folder, model: nn.Module, precision: str | None) -> None:
    """Refuse a model that holds whole numbers where a layer needs floating point.

    An unquantized model may hold them elsewhere (tables of indices); in a quantized one they are
    the remains of what could not be expanded.
    """
    for name, value in tree_flatten(model.parameters()):
        if mx.issubdtype(value.dtype, mx.floating):
            continue
        if precision is not None or name.endswith(".weight"):
            kind = SAFETENSORS_DTYPES.get(value.dtype, str(value.dtype).rpartition(".")[-1])
            raise UnsupportedModelError(
                f"{folder.path}: {name} is {kind}, which mlx-lm cannot turn into floating point",
                hint="convert the 16-bit model that this one was made from",
            )


def list_modules(model: nn.Module) -> list[ModuleInfo]:
    """Every module that holds parameters of its own, in the order of the model.

    Besides what the model's own ``quant_predicate`` refuses, ``predicate`` is False for embeddings
    that must stay a plain array (``embeddings_read_directly``) and for towers of other modalities
    that a text model keeps.
    """
    predicate = getattr(model, "quant_predicate", None)
    excluded = set(embeddings_read_directly(model))
    infos = []
    for path, module in _with_parameters(model):
        own = [value for value in module.values() if isinstance(value, mx.array)]
        weight: Any = module.get("weight")
        main: mx.array = weight if isinstance(weight, mx.array) else own[0]
        opinion = None if predicate is None else _ask(predicate, path, module)
        if path in excluded or modality_of(path) is not None:
            opinion = False
        infos.append(
            ModuleInfo(
                path=path,
                kind=_kind(module),
                shape=tuple(main.shape),
                dtype=SAFETENSORS_DTYPES[main.dtype],
                has_bias="bias" in module,
                predicate=opinion,
                num_parameters=sum(v.size for v in own),
            )
        )
    return infos


def embeddings_read_directly(model: nn.Module) -> list[str]:
    """Paths of tied embeddings whose array the model's code multiplies by itself."""
    classes = {type(module).__module__.rpartition(".")[2] for module in model.modules()}
    if not classes & READ_EMBEDDING_DIRECTLY:
        return []
    paths = {path.rpartition(".")[2]: path for path, _ in model.named_modules()}
    if "lm_head" in paths or "output" in paths:
        return []
    return [path for path, module in model.named_modules() if isinstance(module, nn.Embedding)]


def _with_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules with parameters of their own, in the order in which the model lists them."""
    seen: dict[str, None] = {}
    for name, _ in tree_flatten(model.parameters()):
        seen.setdefault(name.rpartition(".")[0])
    modules = dict(model.named_modules())
    for path in seen:
        if path in modules:
            yield path, modules[path]


def _kind(module: nn.Module) -> Any:
    kind = type(module)
    if kind is nn.Linear:
        return "linear"
    if kind is nn.Embedding:
        return "embedding"
    if kind.__name__ in ("SwitchLinear", "MultiLinear"):
        return "switch" if kind.__name__ == "SwitchLinear" else "multi_linear"
    return "conv" if kind.__name__.startswith("Conv") else "other"


def _ask(predicate: Any, path: str, module: nn.Module) -> bool | dict | None:
    """The model's own opinion on quantizing a module; None where it has none."""
    if not hasattr(module, "to_quantized"):
        return None
    answer = predicate(path, module)
    return answer if isinstance(answer, (bool, dict)) else bool(answer)


def dropped_tensors(source: SourceModel, *, kept: Collection[str] = ()) -> list[dict[str, Any]]:
    """What the text model does not take over from the source, grouped by reason.

    Args:
        source: the opened source.
        kept: tensors that the conversion copies although the model does not use them.

    Returns:
        [{"reason", "tensors", "bytes"}]. Parts of other modalities, multi-token-prediction heads
        and buffers are found by name; whatever else the model type's own loading step discards
        (a head that is tied, for example) shows as a difference of sizes where the source is not
        quantized.
    """
    folder = source.folder
    parameters = tree_flatten(source.model.parameters())
    used = {_drop_reason(name) for name, _ in parameters}
    groups: dict[str, list[str]] = {}
    mtp = frozenset(mtp_tensors(folder))
    for name in folder.tensors:
        reason = "mtp" if name in mtp else _drop_reason(name)
        if reason is not None and reason not in used:
            groups.setdefault(reason, []).append(name)
    named = {name for names in groups.values() for name in names}
    groups = {
        reason: missing
        for reason, names in groups.items()
        if (missing := [name for name in names if name not in kept])
    }
    dropped = [
        {
            "reason": reason,
            "tensors": len(names),
            "bytes": sum(folder.tensors[name].nbytes for name in names),
        }
        for reason, names in groups.items()
    ]
    if source.source_precision is None:
        total = sum(_count(t.shape) for n, t in folder.tensors.items() if n not in named)
        surplus = total - sum(value.size for _, value in parameters)
        if surplus > 0:
            dropped.append(
                {
                    "reason": "not used by this model type (for example a tied head)",
                    "tensors": None,
                    "bytes": None,
                    "parameters": surplus,
                }
            )
    return dropped


def mtp_tensors(folder: Folder) -> list[str]:
    """Names of the source's multi-token-prediction head: ``mtp.*``, or whole extra layers.

    Tensors below a component like ``mtp`` or ``mtp_layers``, and those of the layers that
    ``num_nextn_predict_layers`` adds behind the last one.
    """
    text_config = folder.config.get("text_config") or folder.config
    layers, extra = (
        text_config.get(key) for key in ("num_hidden_layers", "num_nextn_predict_layers")
    )
    further: tuple[str, ...] = ()
    if isinstance(layers, int) and isinstance(extra, int):
        further = tuple(f"model.layers.{layers + i}." for i in range(extra))
    return [
        name
        for name in folder.tensors
        if name.startswith(further) or any(_MTP.fullmatch(part) for part in name.split(".")[:-1])
    ]


def _drop_reason(name: str) -> str | None:
    path, _, last = name.rpartition(".")
    if (modality := modality_of(path)) is not None:
        return modality
    return "buffer" if any(part in BUFFERS for part in (*path.split("."), last)) else None


def modality_of(path: str) -> str | None:
    """The other modality that a module belongs to, or None for text."""
    parts = path.split(".")
    for modality, marks in OTHER_MODALITIES.items():
        if any(part in marks for part in parts):
            return modality
    return None


def _count(shape: tuple[int, ...]) -> int:
    n = 1
    for size in shape:
        n *= size
    return n

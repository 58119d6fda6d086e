"""The model to convert: built by mlx-lm, its weights still on disk, its modules listed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm import utils as mlx_lm_utils

from ..checkpoint.config import normalize_config
from ..checkpoint.loader import KIMI_TYPES, call_mlx_lm, is_turboquant, load_tokenizer
from ..checkpoint.source import Folder, has_tokenizer, inspect_folder, resolve
from ..errors import CheckpointError, UnsupportedModelError
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

# Parts of a checkpoint that a text model has no use for, by a component of the tensor's name.
OTHER_MODALITIES = {
    "vision": ("vision_tower", "vision_model", "visual", "vision_encoder", "vision_embed_tokens"),
    "projector": ("multi_modal_projector", "mm_projector", "embed_vision", "patch_embed"),
    "audio": ("audio_tower", "audio_model", "embed_audio", "audio_encoder"),
}
BUFFERS = ("inv_freq", "masked_bias", "rotary_emb")


@dataclass
class SourceModel:
    """A source checkpoint opened for conversion.

    Attributes:
        folder: its checked files.
        config: normalised config.json, without any quantization of the source's own.
        model: the mlx-lm model, every weight lazy and floating point.
        source_precision: None, or what the source was quantized as ("mxfp4", "affine", ...).
        notes: what normalising and dequantizing had to say.
    """

    folder: Folder
    config: dict[str, Any]
    model: nn.Module
    source_precision: str | None
    notes: list[str]


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
    config, notes = normalize_config(folder.config)
    is_local_kimi = config["model_type"] in KIMI_TYPES and Path(hf_path).is_dir()
    load_tokenizer(path, config, trust_remote_code=trust_remote_code or is_local_kimi)
    precision = _source_precision(config)
    model, loaded = _build(folder, config, precision, trust_remote_code)
    if precision is not None:
        notes = [*notes, f"the source is quantized ({precision}); its weights are expanded first"]
        _dequantize(folder, model)
    for key in ("quantization", "quantization_config", "_name_or_path"):
        loaded.pop(key, None)
    return SourceModel(folder, loaded, model, precision, notes)


def _source_precision(config: dict[str, Any]) -> str | None:
    block = config.get("quantization") or config.get("quantization_config")
    block = block or (config.get("text_config") or {}).get("quantization_config")
    if not isinstance(block, dict):
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
    except CheckpointError as error:
        if precision is None:
            raise
        raise UnsupportedModelError(
            f"{folder.path} is quantized ({precision}) in a way that mlx-lm cannot expand: "
            f"{error.message}",
            hint="convert the 16-bit model that it was made from",
        ) from error


def _dequantize(folder: Folder, model: nn.Module) -> None:
    """Replace the source's quantized layers by ordinary ones, their weights lazy."""
    for path, module in model.named_modules():
        if module.get("global_scale") is not None:
            raise UnsupportedModelError(
                f"{folder.path}: {path} has a global scale, which mlx-lm does not expand",
                hint="convert the 16-bit model that it was made from",
            )
    mlx_lm_utils.dequantize_model(model)
    for name, value in tree_flatten(model.parameters()):
        if not mx.issubdtype(value.dtype, mx.floating):
            raise UnsupportedModelError(
                f"{folder.path}: {name} is {SAFETENSORS_DTYPES[value.dtype]} after expanding; "
                "mlx-lm cannot turn this source back into floating point",
                hint="convert the 16-bit model that it was made from",
            )


def list_modules(model: nn.Module) -> list[ModuleInfo]:
    """Every module that holds parameters of its own, in the order of the model."""
    predicate = getattr(model, "quant_predicate", None)
    infos = []
    for path, module in _with_parameters(model):
        own = [value for value in module.values() if isinstance(value, mx.array)]
        weight: Any = module.get("weight")
        main: mx.array = weight if isinstance(weight, mx.array) else own[0]
        infos.append(
            ModuleInfo(
                path=path,
                kind=_kind(module),
                shape=tuple(main.shape),
                dtype=SAFETENSORS_DTYPES[main.dtype],
                has_bias="bias" in module,
                predicate=None if predicate is None else _ask(predicate, path, module),
                num_parameters=sum(v.size for v in own),
            )
        )
    return infos


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


def dropped_tensors(source: SourceModel) -> list[dict[str, Any]]:
    """What the text model does not take over from the source, grouped by reason.

    Returns:
        [{"reason", "tensors", "bytes"}]. Parts of other modalities, multi-token-prediction heads
        and buffers are found by name; whatever else the model type's own loading step discards
        (a head that is tied, for example) shows as a difference of sizes where the source is not
        quantized.
    """
    folder = source.folder
    groups: dict[str, list[str]] = {}
    mtp = frozenset(mtp_tensors(folder))
    for name in folder.tensors:
        reason = "mtp" if name in mtp else _drop_reason(name)
        if reason is not None:
            groups.setdefault(reason, []).append(name)
    dropped = [
        {
            "reason": reason,
            "tensors": len(names),
            "bytes": sum(folder.tensors[name].nbytes for name in names),
        }
        for reason, names in groups.items()
    ]
    if source.source_precision is None:
        kept = sum(v.size for _, v in tree_flatten(source.model.parameters()))
        named = {name for names in groups.values() for name in names}
        total = sum(_count(t.shape) for n, t in folder.tensors.items() if n not in named)
        if total > kept:
            dropped.append(
                {
                    "reason": "not used by this model type (for example a tied head)",
                    "tensors": None,
                    "bytes": None,
                    "parameters": total - kept,
                }
            )
    return dropped


def has_other_modalities(dropped: list[dict[str, Any]]) -> bool:
    """Whether the source sees or hears, which its text part alone does not."""
    return any(group["reason"] in OTHER_MODALITIES for group in dropped)


def mtp_tensors(folder: Folder) -> list[str]:
    """Names of the source's multi-token-prediction head: ``mtp.*``, or whole extra layers."""
    text_config = folder.config.get("text_config") or folder.config
    layers, extra = (
        text_config.get(key) for key in ("num_hidden_layers", "num_nextn_predict_layers")
    )
    prefixes: tuple[str, ...] = ("mtp.", "model.mtp.", "language_model.mtp.")
    if isinstance(layers, int) and isinstance(extra, int):
        prefixes += tuple(f"model.layers.{layers + i}." for i in range(extra))
    return [name for name in folder.tensors if name.startswith(prefixes)]


def _drop_reason(name: str) -> str | None:
    parts = name.split(".")
    for reason, marks in OTHER_MODALITIES.items():
        if any(part in marks for part in parts[:-1]):
            return reason
    return "buffer" if any(part in BUFFERS for part in parts) else None


def _count(shape: tuple[int, ...]) -> int:
    n = 1
    for size in shape:
        n *= size
    return n

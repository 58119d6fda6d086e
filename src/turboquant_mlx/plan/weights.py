"""What the weights of a model take: stored, loaded, resident, and read for each token.

From names, types and shapes of the tensors and from config.json. No MLX here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..checkpoint.config_check import check_config
from ..checkpoint.headers import DTYPE_BITS, TensorInfo
from ..checkpoint.schema import (
    FLOAT_DTYPES,
    MODEL_FILE,
    Manifest,
    expected_tensors,
    has_manifest,
)
from ..convert.roles import layer_of, role_of
from ..errors import CheckpointError
from ..kvcache.geometry import describe, text_config
from .headers import ModelFiles
from .machine import GB

UNASSIGNED = "(shared out by --target-bpw)"
"""Stands for the bytes of a planned conversion that a target leaves beyond whole bits."""

_PLAIN = ("BF16", "F16", "F32", "F64")
_FP8 = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
_NGRAM = re.compile(r"(^|[._])(n_?gram|ple)([._]|$)|ngram_embed")
# Towers for pictures and sound, and what joins them to the language model.
_SENSES = re.compile(
    r"(^|\.)(vision_tower|vision_model|visual|vision_embedder|vision_adapter|vision_projection"
    r"|multi_modal_projector|mm_projector|patch_merge_mlp|audio_tower|embed_audio|embed_vision)\."
)
# Types of which mlx-lm loads the language model and leaves the towers out. mlx-vlm loads both.
TEXT_ONLY = frozenset({
    "gemma3", "gemma3n", "gemma4", "gemma4_unified", "kimi_k25", "kimi_k3", "kimi_vl", "lfm2-vl",
    "llama4", "llava", "minimax_m3_vl", "mistral3", "muse_glimmer", "pixtral", "qwen2_vl",
    "qwen2_5_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe",
})  # fmt: skip
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_PER_TOKEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_top_k",
    "moe_k",
    "top_k_experts",
)
_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_transformer_layers")


@dataclass(frozen=True)
class Weights:
    """Sizes in bytes unless said otherwise.

    Attributes:
        precision: how the weights are stored, in words.
        quantization: config's own name of it ("turboquant", "affine", "mxfp4" ...), or None.
        bits, group_size: of the quantization as a whole, None where there is none or several.
        total: all tensors as stored.
        loaded: all tensors as they lie in memory after loading.
        basis: how ``loaded`` follows from ``total``.
        senses: towers for pictures and sound, as stored.
        senses_loaded: whether they are in ``loaded``: mlx-lm leaves them out where it can load the
            type, and only mlx-vlm loads the others.
        experts: routed experts, as loaded.
        ngram: n-gram lookup tables, as loaded.
        matrices: number of weights in matrices that the model multiplies with.
        layers, moe_layers: decoder layers, and those of them with routed experts.
        n_experts, experts_per_token: per layer, None for dense models or where unknown.
        embedding: a lookup table of which one row is read per token, 0 where it is the head too.
    """

    precision: str
    quantization: str | None
    bits: int | None
    group_size: int | None
    total: int
    loaded: int
    basis: str
    senses: int
    senses_loaded: bool
    experts: int
    ngram: int
    matrices: int
    layers: int | None
    moe_layers: int
    n_experts: int | None
    experts_per_token: int | None
    embedding: int

    @property
    def is_moe(self) -> bool:
        """Whether there are routed experts."""
        return self.experts > 0

    @property
    def resident(self) -> int:
        """What stays in memory when experts are streamed."""
        return self.loaded - self.experts

    @property
    def token_experts(self) -> int | None:
        """Bytes of the experts that one token uses, over all layers."""
        if not self.is_moe or not self.n_experts or not self.experts_per_token:
            return None
        return self.experts * min(self.experts_per_token, self.n_experts) // self.n_experts

    @property
    def read_per_token(self) -> int:
        """Bytes of weights that generating one token reads."""
        experts = self.experts if self.token_experts is None else self.token_experts
        return self.resident - self.ngram - self.embedding + experts


def weigh(model: ModelFiles) -> Weights:
    """Add up the weights of a model.

    Raises:
        CheckpointError: the manifest is damaged, or does not fit the tensors.
    """
    config, text = model.config, text_config(model.config)
    manifest = read_manifest(model.config, model.tensors)
    loaded, basis = _loaded_sizes(model, manifest)
    senses = {name: size for name, size in loaded.items() if _SENSES.search(name)}
    senses_loaded = bool(senses) and model.model_type not in TEXT_ONLY
    tensors = model.tensors
    if not senses_loaded:
        loaded = {name: size for name, size in loaded.items() if name not in senses}
        tensors = {name: info for name, info in tensors.items() if name not in senses}
    if senses and not senses_loaded:
        basis += f", without {sum(senses.values()) / GB:.2f} GB of towers that mlx-lm leaves out"
    roles = _roles(tensors)
    experts = sum(size for name, size in loaded.items() if roles[_module(name)] == "expert")
    ngram = sum(size for name, size in loaded.items() if _NGRAM.search(name))
    moe_layers = {layer_of(path) for path, role in roles.items() if role == "expert"} - {None}
    method, bits, group_size = _quantization(config, manifest)
    if UNASSIGNED in model.tensors:
        bits = None  # the parts will differ
    embedding = sum(size for name, size in loaded.items() if roles[_module(name)] == "embedding")
    tied = not any(role == "lm_head" for role in roles.values())
    return Weights(
        precision=_precision(model.tensors, config, manifest),
        quantization=method,
        bits=bits,
        group_size=group_size,
        total=model.weight_bytes,
        loaded=sum(loaded.values()),
        basis=basis,
        senses=sum(senses.values()),
        senses_loaded=senses_loaded,
        experts=experts,
        ngram=ngram,
        matrices=_matrix_weights(tensors, manifest, roles, tied),
        layers=_first_int(text, _LAYER_COUNTS),
        moe_layers=len(moe_layers),
        n_experts=_first_int(text, _EXPERT_COUNTS) if experts else None,
        experts_per_token=_first_int(text, _PER_TOKEN) if experts else None,
        embedding=0 if tied else embedding - min(ngram, embedding),
    )


def read_manifest(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> Manifest | None:
    """The manifest of our folders and of the predecessor's, None for others.

    Raises:
        CheckpointError: it is damaged, or does not fit the tensors.
    """
    if has_manifest(config) or config.get("model_file") == MODEL_FILE:
        manifest = Manifest.from_config(config, tensors)
        check_tensors(manifest, tensors)
        return manifest
    blocks = (config.get(key) for key in ("quantization", "quantization_config"))
    if any(isinstance(block, Mapping) and block.get("mode") == "turboquant" for block in blocks):
        # late: it imports numpy, which takes as long as everything else here together
        from ..checkpoint import predecessor

        return predecessor.manifest_from_headers(config, tensors)
    return None


def check_model(model: ModelFiles) -> None:
    """Refuse what no command would load, as far as config.json and the headers show it.

    Raises:
        CheckpointError: a value of the config that no model can have, a manifest that is damaged
            or does not fit the tensors or the number of layers, or a file that is missing.
    """
    try:
        check_config(model.config, len(model.tensors))
        manifest = read_manifest(model.config, model.tensors)
        if manifest is not None and has_manifest(model.config):
            _check_files(model, manifest)
            _check_layers(model.config, manifest)
    except CheckpointError as error:
        raise CheckpointError(f"{model.name}: {error.message}", error.hint) from None


def _check_files(model: ModelFiles, manifest: Manifest) -> None:
    if manifest.mtp is not None and manifest.mtp.file not in model.other_files:
        raise CheckpointError(
            f"{manifest.mtp.file} is missing, the manifest names it",
            hint="copy the folder again, with all of its files",
        )
    code = model.config.get("source_model_file")
    if code is not None and code not in model.other_files:
        raise CheckpointError(f"source_model_file {code!r} is not a Python file in it")


def _check_layers(config: Mapping[str, Any], manifest: Manifest) -> None:
    """Whether the model has every layer that the manifest names."""
    count, geometry = text_config(config).get("num_hidden_layers"), describe(config)
    if not isinstance(count, int) or isinstance(count, bool) or geometry is None:
        return
    # a few model types have more layers than they say; then they have as many caches
    most = max(count, len(geometry.layers))
    for path in manifest.modules:
        layer = None if _SENSES.search(path) else layer_of(path)
        if layer is not None and layer >= most:
            raise CheckpointError(
                f"the manifest names a module {path}, but config.json: num_hidden_layers is {count}"
            )


def check_tensors(manifest: Manifest, tensors: Mapping[str, TensorInfo]) -> None:
    """Hold every tensor that the manifest promises against the headers.

    Raises:
        CheckpointError: one is missing, or of another type or shape; or there is one that could
            only be part of a quantized module, and belongs to none.
    """
    promised = manifest.tensors()
    for path, entry in manifest.modules.items():
        for suffix, spec in expected_tensors(entry).items():
            name = f"{path}.{suffix}"
            info = tensors.get(name)
            if info is None:
                raise CheckpointError(f"tensor {name} is missing, the manifest promises it")
            if not spec.accepts(info.dtype, info.shape):
                wanted = f"{spec.dtype or 'a floating-point type'} {list(spec.shape)}"
                raise CheckpointError(
                    f"tensor {name} is {info.dtype} {list(info.shape)}, the manifest says {wanted}"
                )
    for name, info in tensors.items():
        if name in promised or name == UNASSIGNED:
            continue
        if info.dtype not in FLOAT_DTYPES or _module(name) in manifest.modules:
            raise CheckpointError(f"tensor {name} belongs to nothing in the manifest")


def _loaded_sizes(model: ModelFiles, manifest: Manifest | None) -> tuple[dict[str, int], str]:
    sizes = {name: info.nbytes for name, info in model.tensors.items()}
    if manifest is not None and not has_manifest(model.config):
        return _repacked_sizes(sizes, manifest), "repacked to the dense layout at load"
    fp8 = [name for name, info in model.tensors.items() if info.dtype in _FP8]
    if fp8:
        for name in fp8:
            sizes[name] *= 2
        return sizes, "8-bit floats are expanded to 16 bits at load"
    return sizes, "as stored"


def _repacked_sizes(sizes: Mapping[str, int], manifest: Manifest) -> dict[str, int]:
    from ..checkpoint.predecessor import SPECULATOR_PREFIX

    result = {
        name: size
        for name, size in sizes.items()
        if _module(name) not in manifest.modules and not name.startswith(SPECULATOR_PREFIX)
    }
    for path, entry in manifest.modules.items():
        for suffix, spec in expected_tensors(entry).items():
            count = 1
            for size in spec.shape:
                count *= size
            result[f"{path}.{suffix}"] = count * DTYPE_BITS[spec.dtype or "F16"] // 8
    return result


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _roles(tensors: Mapping[str, TensorInfo]) -> dict[str, str]:
    """Module path -> role; a module with a tensor of three axes is a stack of experts or heads."""
    ranks: dict[str, int] = {}
    for name, info in tensors.items():
        path = _module(name)
        ranks[path] = max(ranks.get(path, 0), len(info.shape))
    return {path: _role(path, rank) for path, rank in ranks.items()}


def _role(path: str, rank: int) -> str:
    parts = path.split(".")
    last = parts[-1]
    if "embed" in last or last in ("wte", "wpe", "tok_embeddings"):
        return "embedding" if last != "embed_out" else "lm_head"
    if "shared_experts" in parts or "shared_expert" in parts or "conv" in last:
        return "mlp"
    # experts that a module holds as parameters of its own: mlp.experts.gate_up_proj
    if last == "experts":
        return "expert"
    return role_of(path, "switch" if rank == 3 else "linear")


def _matrix_weights(
    tensors: Mapping[str, TensorInfo],
    manifest: Manifest | None,
    roles: Mapping[str, str],
    tied: bool,
) -> int:
    modules = {} if manifest is None else manifest.modules
    total = sum(
        entry.num_weights for entry in modules.values() if entry.kind != "affine_embedding" or tied
    )
    for name, info in tensors.items():
        path = _module(name)
        if path in modules or len(info.shape) < 2 or info.dtype not in (*_PLAIN, *_FP8):
            continue
        if name.endswith(("scales", "biases")) or (roles[path] == "embedding" and not tied):
            continue
        total += info.size
    return total


def _quantization(
    config: Mapping[str, Any], manifest: Manifest | None
) -> tuple[str | None, int | None, int | None]:
    if manifest is not None:
        entries = [entry for entry in manifest.modules.values() if not entry.is_affine]
        bits = _only({entry.bits for entry in entries})
        return "turboquant", bits, _only({entry.group_size for entry in entries})
    block = config.get("quantization") or config.get("quantization_config")
    if not isinstance(block, Mapping) or not block:
        return None, None, None
    method = block.get("quant_method") or block.get("mode") or "affine"
    bits, group = block.get("bits"), block.get("group_size")
    return (
        str(method),
        bits if isinstance(bits, int) else None,
        group if isinstance(group, int) else None,
    )


def _only(values: set[int]) -> int | None:
    return next(iter(values)) if len(values) == 1 else None


def _precision(
    tensors: Mapping[str, TensorInfo], config: Mapping[str, Any], manifest: Manifest | None
) -> str:
    if manifest is not None:
        # biases count with what was kept, as in the converter's own report
        stored = 8 * sum(
            info.nbytes
            for name, info in tensors.items()
            if name == UNASSIGNED
            or (_module(name) in manifest.modules and not name.endswith(".bias"))
        )
        weights = sum(entry.num_weights for entry in manifest.modules.values())
        kind = "TurboQuant" if has_manifest(config) else "TurboQuant (predecessor's format)"
        return f"{kind}, {stored / max(weights, 1):.2f} bits per quantized weight"
    method, bits, group = _quantization(config, manifest)
    if method is not None:
        name = "MLX affine" if method == "affine" else method
        return name + (f" {bits}-bit" if bits else "") + (f" g{group}" if group else "")
    by_type: dict[str, int] = {}
    for info in tensors.values():
        by_type[info.dtype] = by_type.get(info.dtype, 0) + info.nbytes
    return max(by_type, key=lambda key: by_type[key])


def _first_int(config: Mapping[str, Any], names: Iterable[str]) -> int | None:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**40:
            return value
    return None

"""Llama models of random weights, made in memory: for machines that no checkpoint reaches.

A random stream of codes is as good a code as any, so our layers need no quantizing: their words are
drawn, and their scales are set so that outputs have the variance of inputs. What such a model says
means nothing; how fast it runs, and that two back-ends say the same, does not depend on that.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from kernel_timing import random_words

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 512,
        "num_hidden_layers": 4,
        "intermediate_size": 1536,
        "num_attention_heads": 8,
        "head_dim": 64,
        "num_key_value_heads": 2,
        "vocab_size": 4096,
    },
    "1b": {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "head_dim": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "8b": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "head_dim": 128,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
}


def llama(shape: str, weights: str, seed: int = 0) -> nn.Module:
    """A Llama with untied embeddings in bfloat16, evaluated.

    Args:
        shape: a key of ``SHAPES``.
        weights: "bf16"; "affine" and bits (MLX's own, everything that mlx-lm quantizes, groups of
            64); or "scalar" or "trellis" and bits (what turboquant-convert makes of it).
        seed: of the random numbers.
    """
    config = {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 500000.0}
    config["tie_word_embeddings"] = False
    model = build(config | SHAPES[shape], mx.bfloat16, seed)
    code, bits = weights.rstrip("0123456789"), int(weights.lstrip("abcdefghijklmnopqrstuvwxyz"))
    if code == "affine":
        nn.quantize(model, group_size=64, bits=bits)
    elif code in ("scalar", "trellis"):
        _pack(model, bits, code)
    elif weights != "bf16":
        raise ValueError(f"no such weights: {weights}")
    return evaluated(model)


def build(config: dict[str, Any], dtype: mx.Dtype, seed: int = 0) -> nn.Module:
    """A Llama of a config, its random weights not drawn yet."""
    from mlx_lm.models import llama as model_file

    mx.random.seed(seed)
    model = model_file.Model(model_file.ModelArgs.from_dict(config))
    model.set_dtype(dtype)
    return model


def evaluated(model: nn.Module) -> nn.Module:
    """The model, its weights drawn, in no more memory than they take at last, ready to run."""
    for part in [*model.layers, model]:
        mx.eval(part.parameters())  # one at a time: drawn in float32, cast and freed
        mx.clear_cache()
    return model.eval()


def stored_bytes(model: nn.Module) -> int:
    """Bytes of all parameters."""
    from mlx.utils import tree_flatten

    return sum(value.nbytes for _, value in tree_flatten(model.parameters()))


def _pack(model: nn.Module, bits: int, codec: str) -> None:
    """Replace the layers that the converter quantizes by packed ones of random words."""
    from mlx.utils import tree_unflatten

    from turboquant_mlx.convert.options import ConvertOptions
    from turboquant_mlx.convert.recipe import plan_modules
    from turboquant_mlx.convert.source_model import list_modules
    from turboquant_mlx.layers.linear import TurboQuantLinear
    from turboquant_mlx.layers.rotation_group import RotationGroup

    infos = {info.path: info for info in list_modules(model)}
    plan = plan_modules(list(infos.values()), ConvertOptions(bits=bits, codec=codec))
    groups: dict[str, RotationGroup] = {}
    layers = []
    for decision in plan.decisions:
        spec = decision.spec
        if spec is None:
            continue
        shape, leader = infos[decision.path].shape, decision.rotation_group or decision.path
        new_group = partial(RotationGroup, shape[-1], spec.rotation_block)
        group = groups.get(leader) or groups.setdefault(leader, new_group())
        layer = TurboQuantLinear(spec, shape, group=group, leads=leader == decision.path)
        _fill(layer)
        layers.append((decision.path, layer))
    model.update_modules(tree_unflatten(layers))


def _fill(layer: Any) -> None:
    from turboquant_mlx.quant.codebook import lloyd_max
    from turboquant_mlx.quant.trellis_table import trellis_table

    spec, (_, width) = layer.spec, layer.shape
    layer.codes = random_words(*layer.codes.shape)
    table = trellis_table(spec.bits) if spec.is_trellis else lloyd_max(spec.bits)
    layer.table = mx.array(table.astype(np.float32))
    if spec.scale_layout == "log8":
        layer.scales = mx.full(layer.scales.shape, round(240 - 8 * np.log2(width)), mx.uint8)
    else:
        layer.scales = mx.full(layer.scales.shape, width**-0.5, mx.float16)
    if "multiplier" in layer:
        signs = mx.random.randint(0, 2, (width,)) * 2 - 1
        layer.multiplier = signs.astype(mx.float16)

"""Turn a stock model class into one that takes our checkpoints: shared by loader and stock hook."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import CheckpointError
from ..kernels.dispatch import backend
from ..layers import cpu
from ..layers.install import install_layers
from .schema import Manifest, expected_tensors

Transform = Callable[[dict[str, mx.array]], dict[str, mx.array]]


def adopt(
    model: nn.Module,
    manifest: Manifest,
    *,
    transform: Transform | None = None,
    cpu_expand: cpu.CpuExpand = "auto",
) -> nn.Module:
    """Give a freshly built stock model the layers of a manifest.

    Args:
        model: from mlx-lm or mlx-vlm, weights not loaded.
        manifest: what is quantized how.
        transform: applied to the files' tensors first (for folders in another layout).
        cpu_expand: see ``layers.cpu.prepare``; used on the CPU only.

    Returns:
        the same model; its next ``sanitize`` takes our tensors.
    """
    paths = install_layers(model, manifest)
    _replace_sanitize(model, manifest, paths, transform)
    if backend() == "cpu":
        cpu.prepare(model, cpu_expand)
    return model


def _replace_sanitize(
    model: Any, manifest: Manifest, paths: dict[str, str], transform: Transform | None
) -> None:
    """Let the model's own ``sanitize`` see one ordinary weight per quantized module.

    Such methods look for names like ``lm_head.weight`` and draw conclusions from their absence
    (gemma3 drops its head), so each quantized module is shown to it as a weight of the right
    shape, which costs nothing as it is never evaluated.
    """
    original = getattr(model, "sanitize", None)

    def sanitize(weights: dict[str, mx.array]) -> dict[str, mx.array]:
        # an instance attribute would survive a copy of the model and point back at this one
        object.__delattr__(model, "sanitize")
        if transform is not None:
            weights = transform(weights)
        packed = {name: weights[name] for name in manifest.tensors() if name in weights}
        plain = {name: value for name, value in weights.items() if name not in packed}
        shown = plain | {
            f"{path}.weight": mx.zeros(entry.shape, mx.bfloat16)
            for path, entry in manifest.modules.items()
        }
        kept = shown if original is None else original(shown)
        result = dict(kept)
        for path, entry in manifest.modules.items():
            placeholder = f"{paths[path]}.weight"
            if result.pop(placeholder, None) is None:
                raise CheckpointError(f"this model type has no use for the quantized {path}")
            for suffix in expected_tensors(entry):
                name = f"{path}.{suffix}"
                if name in packed:
                    result[f"{paths[path]}.{suffix}"] = packed[name]
        return result

    model.sanitize = sanitize

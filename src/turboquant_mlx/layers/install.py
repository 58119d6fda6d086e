"""Replace the layers of a freshly built model by those that a manifest describes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.nn as nn
from mlx.utils import tree_unflatten

from ..errors import CheckpointError
from .linear import TurboQuantLinear
from .packed import PackedLayer
from .rotation_group import RotationGroup
from .switch import TurboQuantSwitchLinear

if TYPE_CHECKING:
    from ..checkpoint.schema import Manifest, ModuleEntry

LANGUAGE_PREFIX = "language_model."
"""mlx-vlm keeps a text model below this name; mlx-lm does so for some model types only."""


def install_layers(model: nn.Module, manifest: Manifest) -> dict[str, str]:
    """Swap the modules that the manifest names for quantized ones, their weights still empty.

    Args:
        model: the stock model of mlx-lm or mlx-vlm, just built.
        manifest: a checked manifest (``checkpoint.schema.Manifest``).

    Returns:
        manifest path -> path in this model (they differ by ``LANGUAGE_PREFIX`` at most).

    Raises:
        CheckpointError: the model has no such module, or one of another kind or shape.
    """
    modules = dict(model.named_modules())
    paths = {path: _find(modules, path) for path in manifest.modules}
    groups: dict[str, RotationGroup] = {}
    replacements = []
    for path, entry in manifest.modules.items():
        stock = modules[paths[path]]
        _check_module(path, stock, entry)
        if entry.is_affine:
            layer = stock.to_quantized(group_size=entry.group_size, bits=entry.bits, mode="affine")
        else:
            group = groups.setdefault(
                entry.rotation_group, RotationGroup(entry.width, entry.rotation_block)
            )
            kind = TurboQuantLinear if entry.kind == "linear" else TurboQuantSwitchLinear
            layer = kind(
                entry.spec, entry.shape, group=group, leads=entry.is_leader, bias=entry.bias
            )
        replacements.append((paths[path], layer))
    model.update_modules(tree_unflatten(replacements))
    return paths


def _find(modules: dict[str, nn.Module], path: str) -> str:
    for candidate in (path, LANGUAGE_PREFIX + path, path.removeprefix(LANGUAGE_PREFIX)):
        if candidate in modules:
            return candidate
    raise CheckpointError(f"the manifest names a module {path} that this model type does not have")


def _check_module(path: str, stock: Any, entry: ModuleEntry) -> None:
    name = type(stock).__name__
    fits = {
        "linear": name == "Linear",
        "switch": name == "SwitchLinear",  # mlx-lm and mlx-vlm have a class each
    }.get(entry.kind, hasattr(stock, "to_quantized"))
    if not fits:
        raise CheckpointError(
            f"the manifest has {path} as {entry.kind}, in this model it is a {name}"
        )
    if tuple(stock.weight.shape) != entry.shape:
        raise CheckpointError(
            f"the manifest has {path} of shape {list(entry.shape)}, by config.json it is "
            f"{list(stock.weight.shape)}"
        )
    if ("bias" in stock) != entry.bias:
        has = "a bias" if entry.bias else "no bias"
        raise CheckpointError(f"the manifest says that {path} has {has}, config.json disagrees")


def packed_layers(model: nn.Module) -> list[tuple[str, PackedLayer]]:
    """All layers of a model that hold packed weights, with their paths."""
    return [(path, m) for path, m in model.named_modules() if isinstance(m, PackedLayer)]


def set_qjl(model: nn.Module, enabled: bool) -> int:
    """Use or skip the QJL sketches of all layers that have one; returns how many do."""
    layers = [layer for _, layer in packed_layers(model) if layer.spec.qjl]
    for layer in layers:
        layer.use_qjl = enabled
    return len(layers)

"""True sizes: what the quantized weights take, counted from stored tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..checkpoint.schema import Manifest
from ..checkpoint.source import Folder


@dataclass(frozen=True)
class Size:
    """How large a model is.

    Attributes:
        weights: number of weights that are quantized, as the layers represent them.
        weight_bytes: all bytes stored for them: codes, scales, biases of scales, tables,
            multipliers, sketches; not the biases of layers.
        model_bytes: all tensors of the model.
    """

    weights: int
    weight_bytes: int
    model_bytes: int

    @property
    def bits_per_weight(self) -> float | None:
        """Bits per quantized weight; None where nothing is quantized."""
        return self.weight_bytes * 8 / self.weights if self.weights else None


def size_of_folder(folder: Folder, manifest: Manifest | None, model: nn.Module) -> Size:
    """The size of a stored model, from the headers of its files.

    Args:
        folder: its files.
        manifest: of a TurboQuant folder, else None.
        model: the loaded model, which knows the shapes of MLX's own quantized layers.
    """
    if manifest is not None:
        weights = {path: entry.num_weights for path, entry in manifest.modules.items()}
    else:
        weights = {
            path: module.scales.size * module.group_size
            for path, module in model.named_modules()
            if "scales" in module and hasattr(module, "group_size")
        }
    stored = sum(
        info.nbytes
        for name, info in folder.tensors.items()
        if name.rpartition(".")[0] in weights and not name.endswith(".bias")
    )
    return Size(sum(weights.values()), stored, folder.weight_bytes)


def size_of_model(model: nn.Module, quantized: Iterable[str], weights: int) -> Size:
    """The size of a model that is quantized in memory.

    Args:
        model: with its quantized layers.
        quantized: paths of the layers that count as quantized.
        weights: how many weights they represent.
    """
    modules = dict(model.named_modules())
    stored = sum(_own_bytes(modules[path]) for path in quantized)
    return Size(weights, stored, model_bytes(model))


def model_bytes(model: nn.Module) -> int:
    """Bytes of all parameters."""
    return sum(value.nbytes for _, value in tree_flatten(model.parameters()))


def _own_bytes(module: Any) -> int:
    arrays = {name: value for name, value in module.items() if isinstance(value, mx.array)}
    arrays.pop("bias", None)
    return sum(value.nbytes for value in arrays.values())

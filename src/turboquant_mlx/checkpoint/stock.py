"""What lets stock mlx-lm and stock mlx-vlm load our folders.

Each folder carries ``turboquant_model.py`` (``MODEL_FILE_TEXT``), named by ``model_file`` in its
config.json. mlx-lm imports it under its trust flag, mlx-vlm without one. mlx-lm asks the module for
``Model`` and ``ModelArgs``; mlx-vlm for ``Model``, ``ModelConfig`` and whatever else its own module
for the model type has. Both call ``Model(config)``, and the type of that config tells who is
asking.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.nn as nn

from ..errors import CheckpointError
from .build import adopt
from .model_class import model_classes
from .schema import Manifest

MODEL_FILE_TEXT = '''\
"""Lets stock mlx-lm (with --trust-remote-code) and mlx-vlm load this TurboQuant model.

Needs the package that made it, turboquant-mlx-kit
"""

from turboquant_mlx.checkpoint.stock import StockModule

_module = StockModule(__file__)
ModelArgs = _module.args
Model = _module.build


def __getattr__(name):
    return _module.vlm_attribute(name)
'''


# What stock mlx-vlm calls the rotary base of these models' full-attention layers.
_VLM_BASE_KEYS = {"gemma3": "rope_global_base_freq", "gemma3_text": "rope_global_base_freq"}


def add_stock_keys(config: dict[str, Any]) -> None:
    """Add to a normalised config what only stock mlx-vlm reads, in place.

    Without it mlx-vlm would run some models with a default rotary base of its own.
    """
    for part in (config, config.get("text_config")):
        if isinstance(part, dict) and "rope_theta" in part:
            key = _VLM_BASE_KEYS.get(str(part.get("model_type", config.get("model_type"))))
            if key is not None:
                part[key] = part["rope_theta"]


class StockArgs:
    """Stands in for mlx-lm's ``ModelArgs``: the real ones and the class that they belong to."""

    def __init__(self, model_class: type, args: Any):
        self.model_class = model_class
        self.args = args


class StockArgsFactory:
    """Makes ``StockArgs`` for one folder; mlx-lm takes it for the class of the arguments."""

    def __init__(self, folder: Path):
        self.folder = folder

    def from_dict(self, config: dict[str, Any]) -> StockArgs:
        """Build the arguments from config.json (it was normalised when it was written)."""
        # without trust, mlx-lm would not have run the file that brought us here
        model_class, args_class = model_classes(self.folder, config, trust_remote_code=True)
        return StockArgs(model_class, args_class.from_dict(config))


class StockModule:
    """The content of one folder's ``turboquant_model.py``.

    Args:
        model_file: path of that file; config.json is read from beside it.

    Raises:
        CheckpointError: config.json has no valid manifest.
    """

    def __init__(self, model_file: str):
        folder = Path(model_file).parent
        self.args = StockArgsFactory(folder)
        config = json.loads((folder / "config.json").read_text())
        self.manifest = Manifest.from_config(config)
        self.model_type = config["model_type"]

    def build(self, config: Any) -> nn.Module:
        """Build the model that the asking library wants, with our layers in it."""
        if isinstance(config, StockArgs):
            return adopt(config.model_class(config.args), self.manifest)
        return adopt(self._vlm_module().Model(config), self.manifest)

    def vlm_attribute(self, name: str) -> Any:
        """An attribute of mlx-vlm's module for this model type.

        Raises:
            AttributeError: it has none of that name.
        """
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._vlm_module(), name)

    def _vlm_module(self) -> Any:
        from mlx_vlm.utils import get_model_and_args

        try:
            module, _ = get_model_and_args({"model_type": self.model_type})
        except ValueError as error:
            raise CheckpointError(
                f"mlx-vlm has no model type {self.model_type!r}", hint="use mlx-lm for this model"
            ) from error
        return module

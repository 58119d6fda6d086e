"""One forward pass of a model's own code, decoder layer by decoder layer, with a hand in it.

The modules of a freshly built instance whose weights are still on disk are intercepted; nothing of
the model is re-implemented. A decoder layer is evaluated when it returns, and its weights are let
go of at once, so a model larger than memory passes layer by layer. A model that calls a layer
again (looped transformers do) gets that layer from another lazy instance. The head's own product
is never computed.

On the CPU the layers run through ``layers.cpu``, which is many times faster than MLX there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from tqdm import tqdm

from ..cli import bars_are_off, raise_if_interrupted
from ..kernels.dispatch import backend
from ..layers import cpu
from .roles import role_of

Build = Callable[[], nn.Module]
Call = Callable[..., Any]


class LayerPass:
    """One forward pass over one text.

    Args:
        build: makes the model anew, every weight lazy and floating point.
        groups: rotation groups, path of the leader -> paths of all members.
        title: of the progress bar.
    """

    def __init__(self, build: Build, groups: Mapping[str, Sequence[str]], title: str):
        self.build = build
        self.groups = groups
        self.title = title
        self.model = build()
        self.modules = dict(self.model.named_modules())
        self.layers = {path: self.modules[path] for path in layer_paths(self.modules)}
        self.led_in = {path: [g for g in groups if _is_in(g, path)] for path in self.layers}
        self.spent: set[str] = set()
        self.spare: dict[str, nn.Module] = {}

    def intercept(self) -> None:
        """Put a hand in the calls of modules, with ``intercept``, before the model runs."""
        raise NotImplementedError

    def layer_done(self, path: str) -> None:
        """Called after a decoder layer has run, while its weights are still there."""

    def layer_refilled(self, path: str) -> None:
        """Called after a layer that is called again has got its weights again."""

    def run(self, tokens: np.ndarray, progress: bool) -> None:
        """Feed tokens [pieces, length] to the model."""
        if backend() == "cpu":
            cpu.prepare(self.model, "never")
        for module in self.modules.values():
            if isinstance(module, nn.Embedding):
                # it is a tied head too, whose output nobody looks at
                head: Any = module
                head.as_linear = partial(no_product, module.weight.shape[0])
        self.intercept()
        with tqdm(
            total=len(self.layers),
            unit="layer",
            disable=bars_are_off(progress),
            dynamic_ncols=True,
            desc=self.title,
        ) as bar:
            for path, layer in self.layers.items():
                intercept(layer, partial(self._run_layer, path, bar))
            self.model(mx.array(tokens))

    def is_head(self, path: str) -> bool:
        """Whether a module is the output head, whose product nobody needs."""
        return self.modules[path].weight.ndim == 2 and role_of(path, "linear") == "lm_head"

    def _run_layer(self, path: str, bar: tqdm, call: Call, *args: Any, **kwargs: Any) -> Any:
        """Run one decoder layer to its end, then let go of its weights."""
        raise_if_interrupted()
        layer = self.layers[path]
        if path in self.spent:
            self._refill(path, layer)
        out = call(*args, **kwargs)
        mx.eval(out)
        self.layer_done(path)
        for _, module in layer.named_modules():
            for name in _weights_of(module):
                module[name] = mx.zeros((0,))
        cpu.drop_expansions(layer)
        self.spent.add(path)
        bar.update(1)
        return out

    def _refill(self, path: str, layer: nn.Module) -> None:
        """Give a layer that is called again its weights again, lazy."""
        if path not in self.spare:
            modules = dict(self.build().named_modules())
            self.spare = {path: modules[path] for path in self.layers}
        fresh = self.spare.pop(path)
        for (_, module), (_, source) in zip(
            layer.named_modules(), fresh.named_modules(), strict=True
        ):
            for name in _weights_of(source):
                module[name] = source[name]
        self.layer_refilled(path)


def intercept(module: nn.Module, around: Call) -> None:
    """Let ``around(call, ...)`` run wherever this one module is called.

    Its class becomes a subclass of what it was, so attributes and isinstance checks stay.
    """
    kind: Any = type(module)

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return around(partial(kind.__call__, self), *args, **kwargs)

    body = {"__call__": __call__, "__module__": __name__}
    module.__class__ = type(kind.__name__, (kind,), body)


def layer_paths(modules: Mapping[str, nn.Module]) -> list[str]:
    """Paths of the decoder layers: whatever ends in the first number of some module's path."""
    found: dict[str, None] = {}
    for path in modules:
        parts = path.split(".")
        number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if number is not None:
            found.setdefault(".".join(parts[: number + 1]))
    return [path for path in found if path in modules]


def _is_in(path: str, layer: str) -> bool:
    return path == layer or path.startswith(f"{layer}.")


def _weights_of(module: nn.Module) -> list[str]:
    """Names of a module's own parameters."""
    return [
        name
        for name, value in module.items()
        if isinstance(value, mx.array) and not name.startswith("_")
    ]


def no_product(rows: int, x: mx.array) -> mx.array:
    """What takes the place of a head's output: zeros, and not even those are ever computed."""
    return mx.zeros((*x.shape[:-1], rows), x.dtype)

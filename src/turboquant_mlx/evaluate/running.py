"""Running a model over a chunk, with activations in 32 or 16 bits.

Scores should tell what the stored weights are worth, not how a kernel rounds, so activations are
float32: every embedding returns float32, and all later layers keep the type of their input. The
weights stay as they are stored. The same model with 16-bit activations gives the noise floor, the
divergence below which a difference means nothing.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..checkpoint.named_error import cannot_be_run
from ..errors import CheckpointError
from .reference import Forward


class _Float32Output:
    def __call__(self: Any, x: mx.array) -> mx.array:
        return super().__call__(x).astype(mx.float32)  # type: ignore[misc]


@lru_cache
def _float32_twin(kind: type) -> type:
    return type(f"Float32{kind.__name__}", (_Float32Output, kind), {"__module__": __name__})


def use_float32_activations(model: nn.Module) -> None:
    """Make a model compute in float32, whatever its weights are stored as.

    Call it when the layers are final: embeddings get a subclass of their own class.
    """
    for module in model.modules():
        if isinstance(module, (nn.Embedding, nn.QuantizedEmbedding)):
            module.__class__ = _float32_twin(type(module))


def use_16bit_activations(model: nn.Module) -> None:
    """Make a model compute in 16 bits: its own 16-bit type, or bfloat16 for a float32 model."""
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.weight.dtype == mx.float32:
            model.set_dtype(mx.bfloat16)
            return


def forward_of(model: nn.Module) -> Forward:
    """A function from tokens int32 [t] to logits float32 [t, vocabulary].

    The result is a view of memory that MLX holds for as long as it is used.

    Raises:
        CheckpointError: by the function; the model's code fails, or returns no plain logits.
    """

    def forward(ids: np.ndarray) -> np.ndarray:
        try:
            logits = model(mx.array(ids)[None])
            if isinstance(logits, mx.array):
                logits = logits[0].astype(mx.float32)
                mx.eval(logits)
        except (ValueError, TypeError, LookupError) as error:  # what a bad config leads to
            text = " ".join(str(error).split()) or type(error).__name__
            raise cannot_be_run("this model", text.rstrip(".")) from error
        if not isinstance(logits, mx.array):
            raise CheckpointError("the model does not return plain logits and cannot be scored")
        return np.array(logits, copy=False)

    return forward


def device_name() -> str:
    """ "cpu" or "gpu"."""
    return "cpu" if mx.default_device().type == mx.DeviceType.cpu else "gpu"

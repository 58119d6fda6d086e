"""Low-rank adapters on packed layers, by mlx-lm's own LoRA classes.

mlx-lm asks a layer that it does not know for ``to_lora``, when it makes adapters and when it loads
them. Merging is another matter: the sum would have to be quantized anew, with the loss of that on
top. So an adapter stays beside its packed weight, or the sum is kept in 16 bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.tuner.lora import LoRALinear, LoRASwitchLinear

from ..errors import OptionError
from ..kernels.dispatch import backend
from ..quant.weight import dequantize_weight
from .cpu import adopt

if TYPE_CHECKING:
    from .packed import PackedLayer

MERGED_DTYPE = mx.bfloat16


class TurboQuantLoRALinear(LoRALinear):
    """A packed linear layer and what an adapter adds to its output."""

    def fuse(self, dequantize: bool = False) -> nn.Module:
        """A plain layer of the sum, in bfloat16.

        Raises:
            OptionError: the sum is asked for in packed form.
        """
        weight = _decoded(self.linear, dequantize)
        delta = (self.scale * self.lora_b.T) @ self.lora_a.T
        made = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        return _filled(made, weight + delta, self.linear)


class TurboQuantLoRASwitchLinear(LoRASwitchLinear):
    """Packed experts and what an adapter adds to their outputs."""

    def fuse(self, dequantize: bool = False) -> nn.Module:
        """Plain experts of the sum, in bfloat16.

        Raises:
            OptionError: the sum is asked for in packed form.
        """
        weight = _decoded(self.linear, dequantize)
        experts, outputs, width = weight.shape
        delta = (self.scale * self.lora_b) @ self.lora_a.reshape(experts, -1, width)
        made = SwitchLinear(width, outputs, experts, bias=False)
        return _filled(made, weight + delta, self.linear)


def adapted(layer: PackedLayer, r: int, scale: float, dropout: float) -> nn.Module:
    """mlx-lm's adapter around a packed layer, which it holds as ``linear``."""
    sizes = {"input_dims": layer.input_dims, "output_dims": layer.output_dims}
    more: dict[str, Any] = {"r": r, "scale": scale, "dropout": dropout}
    made: nn.Module
    if len(layer.shape) == 3:
        made = TurboQuantLoRASwitchLinear(num_experts=layer.shape[0], **sizes, **more)
    else:
        made = TurboQuantLoRALinear(**sizes, **more)
    made.linear = layer
    return made


def _decoded(layer: PackedLayer, dequantize: bool) -> mx.array:
    if not dequantize:
        raise OptionError(
            "an adapter cannot be merged into a packed weight",
            hint="keep it as an adapter; layer.fuse(dequantize=True) gives a plain layer",
        )
    return dequantize_weight(layer.packed())


def _filled(made: nn.Module, weight: mx.array, layer: PackedLayer) -> nn.Module:
    made.weight = weight.astype(MERGED_DTYPE)
    if "bias" in layer:
        made.bias = layer.bias
    if backend() == "cpu":
        adopt(made)  # MLX's own product of experts takes float32 alone there
    return made

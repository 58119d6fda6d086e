"""The CPU back-end of whole models: every large product goes through numpy's BLAS.

Our packed layers do so by themselves. The layers that conversion left alone (a tied head above
all) keep their stock class's parameters and behaviour and get a subclass of it that multiplies
through ``kernels.cpu_matrix``; bf16 expert stacks, on which stock ``mx.gather_mm`` raises on a
CPU, run this way too. Attention is replaced while such a model is alive.

Decoded weights are held as float32 (4 bytes a weight) where memory allows, see ``prepare``, and
are then rotated back once: rotating the activation of every token took MLX a third of a prefill.
Where they are decoded on each call they stay in the stored domain, as on a GPU.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..kernels import cpu_attention
from ..kernels.cpu_matrix import CpuMatrix, as_numpy, expert_product
from ..kernels.dispatch import backend, is_differentiated, is_traced
from ..kernels.replay import same_arrays
from ..quant.bfloat16 import widen
from ..quant.decode import NumpyDecoder
from ..quant.weight import PackedWeight
from .cpu_token import CpuNormMixin, CpuRopeMixin
from .memory import available_memory_bytes
from .packed import PackedLayer
from .rotation_group import RotationGroup

logger = logging.getLogger("turboquant_mlx")

CpuExpand = Literal["auto", "always", "never"]

KEEP_SHARE = 0.7
"""Share of the memory that is free at load which "auto" lets expanded weights take."""


def packed_matrix(weight: PackedWeight, use_qjl: bool, keep: bool) -> CpuMatrix:
    """The matrix of a packed (O, I) weight: in its stored domain, unless it is to be kept."""
    rows, width = weight.shape
    return CpuMatrix((rows, width), NumpyDecoder(weight, rotated=not keep, use_qjl=use_qjl), keep)


class ExpandedWeight:
    """The float32 form of one layer's weight, made again when the layer's arrays are replaced.

    Args:
        version: returns the arrays that the weight is made from; they are compared by identity.
        make: ``make(keep)`` builds the matrix.
    """

    def __init__(self, version: Callable[[], tuple], make: Callable[[bool], CpuMatrix]):
        self.keep = True
        self._version = version
        self._make = make
        self._seen: tuple = ()
        self._matrix: CpuMatrix | None = None
        self._made_to_keep = False

    def matrix(self) -> CpuMatrix:
        """The current matrix."""
        now = self._version()
        stale = not same_arrays(self._seen, now) or self._made_to_keep < self.keep
        if self._matrix is None or stale:
            self._matrix, self._seen = self._make(self.keep), now
            self._made_to_keep = self.keep
        return self._matrix

    def drop(self) -> None:
        """Forget the matrix and the arrays that it was made from."""
        if self._matrix is not None:
            self._matrix.release()
        self._matrix, self._seen = None, ()

    def __getstate__(self) -> dict:
        # the matrix can be made again, and its lock cannot be copied
        return {**self.__dict__, "_seen": (), "_matrix": None}


class ExpandedExperts:
    """``ExpandedWeight`` for a stack of experts, each expanded when it is first routed to."""

    def __init__(self, version: Callable[[], tuple], make: Callable[[int, bool], CpuMatrix]):
        self.keep = True
        self._version = version
        self._make = make
        self._seen: tuple = ()
        self._matrices: dict[int, CpuMatrix] = {}

    def matrix(self, expert: int) -> CpuMatrix:
        """The current matrix of one expert."""
        now = self._version()
        if not same_arrays(self._seen, now):
            self._matrices, self._seen = {}, now
        matrix = self._matrices.get(expert)
        if matrix is None:
            matrix = self._matrices[expert] = self._make(expert, self.keep)
        return matrix

    def drop(self) -> None:
        """Forget the matrices and the arrays that they were made from."""
        for matrix in self._matrices.values():
            matrix.release()
        self._matrices, self._seen = {}, ()

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_seen": (), "_matrices": {}}


class JointWeight:
    """The linear layers of one rotation group as a single matrix: one product instead of three.

    A product of one row with a small matrix takes little more time than calling it does.

    Args:
        layers: packed linear layers that read the same input; all of a group.
    """

    def __init__(self, layers: Sequence[PackedLayer]):
        self._layers = list(layers)
        self._starts = np.cumsum([0, *(layer.output_dims for layer in layers)]).tolist()
        self._expanded = ExpandedWeight(self._version, self._make)

    def product(self, x: mx.array) -> list[mx.array] | None:
        """Outputs of each layer in the dtype of x [..., width], or None while x is traced."""
        return None if is_traced(x) else self._expanded.matrix().parts(x, self._starts)

    def drop(self) -> None:
        """Forget the matrix and the arrays that it was made from."""
        self._expanded.drop()

    def _version(self) -> tuple:
        return tuple(array for layer in self._layers for array in layer.weight_version())

    def _make(self, keep: bool) -> CpuMatrix:
        decoders = [
            NumpyDecoder(layer.packed(), rotated=False, use_qjl=layer.use_qjl)
            for layer in self._layers
        ]

        def expand(start: int, stop: int) -> np.ndarray:
            parts = []
            for decoder, low, high in zip(decoders, self._starts, self._starts[1:], strict=False):
                if low < stop and start < high:
                    parts.append(decoder(max(start, low) - low, min(stop, high) - low))
            return parts[0] if len(parts) == 1 else np.concatenate(parts)

        return CpuMatrix((self._starts[-1], self._layers[0].input_dims), expand, keep)


# --- stock layers that conversion left alone -------------------------------------------------


def _stock_arrays(layer: nn.Module) -> tuple:
    return tuple(layer.get(name) for name in ("weight", "scales", "biases"))


def _stock_matrix(layer: Any, keep: bool) -> CpuMatrix:
    weight, scales, biases = _stock_arrays(layer)
    if scales is None:
        return _dense_matrix(weight, keep)
    shape = (weight.shape[0], scales.shape[-1] * layer.group_size)
    rows = partial(_affine_rows, layer, weight, scales, biases)
    return CpuMatrix(shape, rows, keep, any_thread=False)


def _stock_expert(layer: Any, expert: int, keep: bool) -> CpuMatrix:
    weight, scales, biases = _stock_arrays(layer)
    if scales is None:
        return _dense_matrix(weight[expert], keep)
    shape = (weight.shape[1], scales.shape[-1] * layer.group_size)
    arrays = (weight[expert], scales[expert], None if biases is None else biases[expert])
    return CpuMatrix(shape, partial(_affine_rows, layer, *arrays), keep, any_thread=False)


def _dense_matrix(weight: mx.array, keep: bool) -> CpuMatrix:
    """A matrix whose rows are those of a floating-point array."""
    rows, columns = weight.shape
    bits = weight.view(mx.uint16) if weight.dtype == mx.bfloat16 else weight
    values = np.array(bits, copy=False)

    def expand(start: int, stop: int) -> np.ndarray:
        return widen(values[start:stop])

    return CpuMatrix((rows, columns), expand, keep, free=weight.dtype == mx.float32)


def _affine_rows(layer: Any, weight, scales, biases, start: int, stop: int) -> np.ndarray:
    rows = mx.dequantize(
        weight[start:stop],
        scales[start:stop],
        None if biases is None else biases[start:stop],
        group_size=layer.group_size,
        bits=layer.bits,
        mode=layer.mode,
    )
    return as_numpy(rows)


def _result_dtype(layer: Any, x: mx.array) -> mx.Dtype:
    """Dtype of the stock layer's product, without its bias: gates in float32 stay that wide."""
    scales = layer.get("scales")
    other = layer.weight if scales is None else scales
    return mx.result_type(x, other) if mx.issubdtype(other.dtype, mx.floating) else x.dtype


class _CpuLinearMixin:
    def __call__(self: Any, x: mx.array) -> mx.array:
        if backend() != "cpu" or is_traced(x) or is_differentiated(self.weight):
            return super().__call__(x)  # type: ignore[misc]
        y = self.expanded.matrix()(x, _result_dtype(self, x))
        return y + self.bias if "bias" in self else y


class _CpuEmbeddingMixin:
    def as_linear(self: Any, x: mx.array) -> mx.array:
        if backend() != "cpu" or is_traced(x) or is_differentiated(self.weight):
            return super().as_linear(x)  # type: ignore[misc]
        return self.expanded.matrix()(x, _result_dtype(self, x))


class _CpuSwitchMixin:
    def __call__(self: Any, x, indices, sorted_indices: bool = False) -> mx.array:
        if backend() != "cpu":
            return super().__call__(x, indices, sorted_indices)  # type: ignore[misc]
        wide, dtype = x.astype(mx.float32), _result_dtype(self, x)
        if is_traced(wide, indices) or is_differentiated(wide):
            # the stock product raises for 16-bit activations on a CPU
            y = super().__call__(wide, indices, sorted_indices)  # type: ignore[misc]
            return y.astype(mx.result_type(dtype, self.bias) if "bias" in self else dtype)
        y = expert_product(wide, indices, self.expanded.matrix, self.output_dims).astype(dtype)
        if "bias" in self:
            y = y + mx.expand_dims(self.bias[indices], -2)
        return y


@lru_cache
def _cpu_twin(kind: type) -> type | None:
    """The CPU subclass of a stock layer class, or None where its own way is as good."""
    mixin: type
    if kind in (nn.Linear, nn.QuantizedLinear):
        mixin = _CpuLinearMixin
    elif kind in (nn.Embedding, nn.QuantizedEmbedding):
        mixin = _CpuEmbeddingMixin
    elif kind is nn.RMSNorm:
        mixin = CpuNormMixin
    elif kind is nn.RoPE:
        mixin = CpuRopeMixin
    elif kind.__name__ in ("SwitchLinear", "QuantizedSwitchLinear"):
        # mlx-lm and mlx-vlm each have classes of their own with these names
        mixin = _CpuSwitchMixin
    else:
        return None
    return type(f"Cpu{kind.__name__}", (mixin, kind), {"__module__": __name__})


def adopt(layer: nn.Module) -> None:
    """Turn a stock layer into its CPU twin in place; parameters and isinstance checks stay."""
    twin = _cpu_twin(type(layer))
    if twin is None:
        return
    layer.__class__ = twin
    arrays = partial(_stock_arrays, layer)
    if issubclass(twin, _CpuSwitchMixin):
        layer.expanded = ExpandedExperts(arrays, partial(_stock_expert, layer))
    elif issubclass(twin, (_CpuLinearMixin, _CpuEmbeddingMixin)):
        layer.expanded = ExpandedWeight(arrays, partial(_stock_matrix, layer))


def expanded_bytes(model: nn.Module) -> int:
    """Float32 bytes that all weights of a prepared model take when they are expanded."""
    total = 0
    for _, layer in model.named_modules():
        if not isinstance(getattr(layer, "expanded", None), (ExpandedWeight, ExpandedExperts)):
            continue
        if isinstance(layer, PackedLayer):
            total += 4 * int(np.prod(layer.shape))
        elif "scales" in layer:
            total += 4 * layer.scales.size * layer.group_size
        elif layer.weight.dtype != mx.float32:
            total += 4 * layer.weight.size
    return total


def drop_expansions(model: nn.Module) -> None:
    """Free the float32 forms of all layers of a model, or of a part of one."""
    for _, layer in model.named_modules():
        expanded = getattr(layer, "expanded", None)
        if isinstance(expanded, (ExpandedWeight, ExpandedExperts)):
            expanded.drop()
        if isinstance(layer, PackedLayer) and layer.group.joint is not None:
            layer.group.joint.drop()


def _join(group: RotationGroup) -> None:
    """Let the layers of a group be multiplied together, if all are linear ones."""
    linear = [
        layer
        for layer in group.layers
        if isinstance(layer, PackedLayer) and isinstance(layer.expanded, ExpandedWeight)
    ]
    if group.joint is None and 1 < len(linear) == group.size:
        group.joint = JointWeight(linear)


def prepare(model: nn.Module, expand: CpuExpand = "auto") -> None:
    """Make a model with TurboQuant layers run well on the CPU.

    Stock layers get their CPU twins, and attention goes through ``kernels.cpu_attention`` for as
    long as the model lives. Nothing is expanded yet: each weight is at its first use.

    Args:
        model: built, its weights loaded or not.
        expand: "always" keeps every weight as float32 after its first use; "never" decodes block
            by block on each call; "auto" keeps them if they fit ``KEEP_SHARE`` of the memory that
            is free now, and says on the log if they do not.
    """
    for _, layer in model.named_modules():
        adopt(layer)
    keep = expand == "always"
    if expand == "auto":
        needed, free = expanded_bytes(model), available_memory_bytes()
        keep = needed <= KEEP_SHARE * free
        if not keep:
            logger.warning(
                "note: float32 copies of all weights would take %.1f GB of %.1f GB free; decoding "
                "them on every call instead, which is slower",
                needed / 1e9,
                free / 1e9,
            )
    for _, layer in model.named_modules():
        expanded = getattr(layer, "expanded", None)
        if isinstance(expanded, (ExpandedWeight, ExpandedExperts)):
            expanded.keep = keep
        if keep and isinstance(layer, PackedLayer):
            _join(layer.group)
    cpu_attention.install()
    weakref.finalize(model, cpu_attention.uninstall)

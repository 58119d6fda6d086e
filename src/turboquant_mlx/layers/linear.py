"""A linear layer with a packed weight."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from ..kernels.cpu_matrix import CpuMatrix
from ..kernels.dispatch import backend, is_traced, kernels_of_backend
from ..kernels.matmul import packed_matmul
from ..kernels.matvec import joint_matvec, why_not_jointly
from ..kernels.rotate import rotated_input
from ..kernels.selection import MATVEC_ROWS
from ..quant.spec import QuantSpec
from ..quant.weight import PackedWeight
from .cpu import ExpandedWeight, packed_matrix
from .packed import PackedLayer
from .rotation_group import RotationGroup


class TurboQuantLinear(PackedLayer):
    """``y = W x + b`` with W [O, I] stored as codes; the dtype of x is kept.

    The activation is rotated and meets the weight in the stored domain. On the CPU the product is
    NumPy's: with rows decoded block by block in the stored domain, or, where the decoded weight is
    kept, with one that has been rotated back, so that the activation need not be rotated.
    """

    def __init__(
        self,
        spec: QuantSpec,
        shape: tuple[int, ...],
        *,
        group: RotationGroup,
        leads: bool = True,
        bias: bool = False,
    ):
        super().__init__(spec, shape, group=group, leads=leads, bias=bias)
        self.expanded = ExpandedWeight(self.weight_version, self._cpu_matrix)
        self.together = _Weights()
        self.alone = _Weights()

    def __call__(self, x: mx.array) -> mx.array:
        """Apply the layer to x [..., I]; returns [..., O] in the dtype of x."""
        y = self._on_cpu(x) if backend() == "cpu" else self._with_its_group(x)
        if y is None:
            rotated = rotated_input(self.group, x, gradients=self.training)
            weight = self.packed() if self.use_qjl else self.alone.weights([self])[0]
            y = packed_matmul(rotated, weight, self.use_qjl, gradients=self.training)
        if "bias" in self:
            y = (y + self.bias).astype(x.dtype)
        return y

    def _on_cpu(self, x: mx.array) -> mx.array | None:
        """The product by NumPy, or None while a transformation traces."""
        keep, group = self.expanded.keep, self.group
        joint = group.joint
        if keep and joint is not None:
            outputs = group.once(x, "product", lambda: joint.product(x))
            return None if outputs is None else _own(outputs, group, self)
        read = x if keep else group.read(x, rotated=True, dtype=mx.float32)
        return None if is_traced(read) else self.expanded.matrix()(read, x.dtype)

    def _with_its_group(self, x: mx.array) -> mx.array | None:
        """The product by a kernel that makes those of the whole group, or None if there is none.

        While one token is generated a launch costs about as much as what it does.
        """
        group = self.group
        few = 0 < x.size <= MATVEC_ROWS * x.shape[-1]
        if self.training or self.use_qjl or group.size == 1 or not few:
            return None
        dialect = kernels_of_backend(x.dtype)
        if dialect is None or not self.together.possible(group.layers):
            return None

        def make() -> list[mx.array]:
            weights = self.together.weights(group.layers)
            return joint_matvec(rotated_input(group, x), weights, dialect)

        outputs = group.once(x, "products", make)
        return _own(outputs, group, self)

    def _cpu_matrix(self, keep: bool) -> CpuMatrix:
        return packed_matrix(self.packed(), self.use_qjl, keep)


def _own(outputs: list[mx.array], group: RotationGroup, layer: nn.Module) -> mx.array:
    """The output of one layer among those of its whole group."""
    return next(y for y, other in zip(outputs, group.layers, strict=True) if other is layer)


class _Weights:
    """The weights of some layers as kernels take them, kept between calls."""

    def __init__(self) -> None:
        self._possible: bool | None = None
        self._weights: list[PackedWeight] = []

    def possible(self, layers: Sequence[nn.Module]) -> bool:
        """Whether there is a kernel for all of them together."""
        if self._possible is None:
            linear = all(isinstance(layer, TurboQuantLinear) for layer in layers)
            weights = [layer.packed() for layer in layers] if linear else []
            self._possible = linear and not why_not_jointly(weights)
        return self._possible

    def weights(self, layers: Sequence[nn.Module]) -> list[PackedWeight]:
        """The stored weights; made anew when a layer's arrays have been replaced."""
        held = self._weights
        if len(held) != len(layers) or not all(map(_is_of, held, layers)):
            held = self._weights = [layer.packed() for layer in layers]
        return held

    def __getstate__(self) -> dict:
        # a copy of the layer has arrays of its own
        return {"_possible": self._possible, "_weights": []}


def _is_of(weight: PackedWeight, layer: nn.Module) -> bool:
    """Whether a weight has the arrays that its layer has now."""
    same = weight.codes is layer["codes"] and weight.scales is layer["scales"]
    return same and weight.table is layer["table"]

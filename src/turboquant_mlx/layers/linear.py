"""A linear layer with a packed weight."""

from __future__ import annotations

from functools import partial

import mlx.core as mx
import mlx.nn as nn

from ..kernels.cpu_matrix import CpuMatrix
from ..kernels.dialect import Dialect
from ..kernels.dispatch import Backend, backend, is_traced, kernels_of
from ..kernels.matmul import packed_matmul
from ..kernels.matvec import joint_matvec, matvec, why_not_jointly
from ..kernels.replay import Program
from ..kernels.rotate import rotate_rows, rotated_input
from ..kernels.selection import MATVEC_ROWS
from ..quant.spec import QuantSpec
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

    def __call__(self, x: mx.array) -> mx.array:
        """Apply the layer to x [..., I]; returns [..., O] in the dtype of x."""
        choice = backend()
        y = self._on_cpu(x) if choice == "cpu" else self._with_its_group(x, choice)
        if y is None:
            rotated = rotated_input(self.group, x, gradients=self.training)
            y = packed_matmul(rotated, self.packed(), self.use_qjl, gradients=self.training)
        if "bias" in self:
            y = (y + self.bias).astype(x.dtype)
        return y

    def to_lora(self, r: int = 8, scale: float = 20.0, dropout: float = 0.0) -> nn.Module:
        """This layer with a low-rank adapter of mlx-lm's, see ``lora``."""
        from .lora import adapted

        return adapted(self, r, scale, dropout)

    def _on_cpu(self, x: mx.array) -> mx.array | None:
        """The product by NumPy, or None while a transformation traces."""
        keep, group = self.expanded.keep, self.group
        joint = group.joint
        if keep and joint is not None:
            outputs = group.once(x, "product", lambda: joint.product(x))
            return None if outputs is None else outputs[self.place]
        read = x if keep else group.read(x, rotated=True, dtype=mx.float32)
        return None if is_traced(read) else self.expanded.matrix()(read, x.dtype)

    def _with_its_group(self, x: mx.array, choice: Backend) -> mx.array | None:
        """A few rows by the kernels, for all layers of the group, or None if they cannot.

        While one token is generated, the host's time for a call is what counts.
        """
        group = self.group
        few = 0 < x.size <= MATVEC_ROWS * group.width
        if not few or self.use_qjl or self.training or not self.group_has_kernel():
            return None
        dialect = kernels_of(choice, x.dtype)
        if dialect is None:
            return None
        # held by the first of the layers, which the group names to all of them
        replay, make = group.layers[0].replay, partial(_products, group, dialect)
        outputs = group.once(x, "products", lambda: replay(group.arrays(), make, x))
        return outputs[self.place]

    def _cpu_matrix(self, keep: bool) -> CpuMatrix:
        return packed_matrix(self.packed(), self.use_qjl, keep)


def _products(group: RotationGroup, dialect: Dialect) -> Program:
    """The rotation of an activation and its products with the weights of all layers of a group."""
    weights = [layer.packed() for layer in group.layers]

    def program(x: mx.array) -> list[mx.array]:
        rotated = rotate_rows(x, group.block, group.multiplier, dialect)
        if why_not_jointly(weights):
            return [matvec(rotated, weight, dialect) for weight in weights]
        return joint_matvec(rotated, weights, dialect)

    return program

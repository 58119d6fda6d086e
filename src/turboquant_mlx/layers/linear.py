"""A linear layer with a packed weight."""

from __future__ import annotations

import mlx.core as mx

from ..kernels.cpu_matrix import CpuMatrix
from ..kernels.dispatch import backend, is_traced
from ..kernels.matmul import packed_matmul
from ..kernels.rotate import rotated_input
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
        y = self._on_cpu(x) if backend() == "cpu" else None
        if y is None:
            rotated = rotated_input(self.group, x, gradients=self.training)
            y = packed_matmul(rotated, self.packed(), self.use_qjl, gradients=self.training)
        if "bias" in self:
            y = (y + self.bias).astype(x.dtype)
        return y

    def _on_cpu(self, x: mx.array) -> mx.array | None:
        """The product by NumPy, or None while a transformation traces."""
        keep, joint = self.expanded.keep, self.group.joint
        if keep and joint is not None:
            outputs = self.group.once(x, "product", lambda: joint.product(x))
            return None if outputs is None else outputs[..., joint.rows(self)]
        wide = self.group.read(x, rotated=not keep, dtype=mx.float32)
        return None if is_traced(wide) else self.expanded.matrix()(wide).astype(x.dtype)

    def _cpu_matrix(self, keep: bool) -> CpuMatrix:
        return packed_matrix(self.packed(), self.use_qjl, keep)

"""A linear layer with a packed weight."""

from __future__ import annotations

import mlx.core as mx

from ..kernels.cpu_matrix import CpuMatrix
from ..kernels.dispatch import backend, is_traced
from ..kernels.matmul import packed_matmul
from ..quant.spec import QuantSpec
from .cpu import ExpandedWeight, packed_matrix
from .packed import PackedLayer
from .rotation_group import RotationGroup


class TurboQuantLinear(PackedLayer):
    """``y = W x + b`` with W [O, I] stored as codes; the dtype of x is kept.

    The activation is rotated and meets the weight in the stored domain. Only the product itself
    differs between back-ends: on the CPU it is numpy's, with rows decoded once or block by block.
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
        rotated = self.group.rotate(x)
        if backend() == "cpu" and not is_traced(rotated):
            y = self.expanded.matrix()(rotated)
        else:
            y = packed_matmul(rotated, self.packed(), self.use_qjl)
        if "bias" in self:
            y = (y + self.bias).astype(x.dtype)
        return y

    def _cpu_matrix(self, keep: bool) -> CpuMatrix:
        return packed_matrix(self.packed(), self.use_qjl, keep)

"""A linear layer with a packed weight."""

from __future__ import annotations

import mlx.core as mx

from ..kernels.cpu_matrix import CpuMatrix
from ..kernels.dispatch import backend, is_traced
from ..kernels.matmul import kernels_of_backend, packed_matmul
from ..kernels.matvec import joint_matvec, why_not_jointly
from ..kernels.rotate import rotated_input
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
        self.jointly: bool | None = None
        """Whether one kernel may multiply by the weights of the whole group; None is unknown."""

    def __call__(self, x: mx.array) -> mx.array:
        """Apply the layer to x [..., I]; returns [..., O] in the dtype of x."""
        y = self._on_cpu(x) if backend() == "cpu" else self._with_its_group(x)
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

    def _with_its_group(self, x: mx.array) -> mx.array | None:
        """The product by a kernel that makes those of the whole group, or None if there is none.

        While one token is generated a launch costs about as much as what it does.
        """
        group = self.group
        if (
            self.training
            or self.use_qjl
            or group.size == 1
            or not 0 < x.size <= MATVEC_ROWS * x.shape[-1]
        ):
            return None
        if self.jointly is None:
            layers = group.layers
            self.jointly = all(isinstance(layer, TurboQuantLinear) for layer in layers) and (
                not why_not_jointly([layer.packed() for layer in layers])
            )
        dialect = kernels_of_backend(x.dtype)
        if not self.jointly or dialect is None:
            return None

        def make() -> list[mx.array]:
            weights = [layer.packed() for layer in group.layers]
            return joint_matvec(rotated_input(group, x), weights, dialect)

        outputs = group.once(x, "products", make)
        return next(y for y, layer in zip(outputs, group.layers, strict=True) if layer is self)

    def _cpu_matrix(self, keep: bool) -> CpuMatrix:
        return packed_matrix(self.packed(), self.use_qjl, keep)

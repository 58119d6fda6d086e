"""A stack of expert layers with packed weights, for mlx-lm's and mlx-vlm's SwitchLinear alike."""

from __future__ import annotations

import mlx.core as mx

from ..kernels.cpu_matrix import CpuMatrix, expert_product
from ..kernels.dispatch import backend, is_traced
from ..kernels.gather import gather_matmul
from ..kernels.rotate import rotated_input
from ..quant.spec import QuantSpec
from .cpu import ExpandedExperts, packed_matrix
from .packed import PackedLayer
from .rotation_group import RotationGroup


class TurboQuantSwitchLinear(PackedLayer):
    """``y = W_e x + b_e`` for the expert e of each row, W [E, O, I] stored as codes.

    Called as the stock classes are; the dtype of x is kept. On the CPU only the experts that are
    named get decoded.
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
        self.expanded = ExpandedExperts(self.weight_version, self._cpu_matrix)

    @property
    def num_experts(self) -> int:
        return self.shape[0]

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """Apply expert ``indices`` to x [..., n, I] (leading axes broadcast); [..., n, O]."""
        y = self._on_cpu(x, indices) if backend() == "cpu" else None
        if y is None:
            rotated = rotated_input(self.group, x, gradients=self.training)
            y = gather_matmul(
                rotated,
                self.packed(),
                indices,
                sorted_indices,
                self.use_qjl,
                gradients=self.training,
            )
        if "bias" in self:
            y = (y + mx.expand_dims(self.bias[indices], -2)).astype(x.dtype)
        return y

    def _on_cpu(self, x: mx.array, indices: mx.array) -> mx.array | None:
        """The products by NumPy, or None while a transformation traces."""
        expanded = self.expanded
        wide = self.group.read(x, rotated=not expanded.keep, dtype=mx.float32)
        if is_traced(wide, indices):
            return None
        return expert_product(wide, indices, expanded.matrix, self.output_dims).astype(x.dtype)

    def _cpu_matrix(self, expert: int, keep: bool) -> CpuMatrix:
        return packed_matrix(self.packed().expert(expert), self.use_qjl, keep)

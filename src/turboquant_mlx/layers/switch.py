"""A stack of expert layers with packed weights, for mlx-lm's and mlx-vlm's SwitchLinear alike."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from ..kernels.cpu_matrix import CpuMatrix, expert_product
from ..kernels.dispatch import Backend, backend, is_differentiated, is_traced, kernels_of
from ..kernels.gather import are_few, gather_matmul, joint_gather_matmul
from ..kernels.matvec import why_not_jointly
from ..kernels.replay import Program
from ..kernels.rotate import rotate_rows, rotated_input
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
        choice = backend()
        if choice == "cpu":
            y = self._on_cpu(x, indices)
        else:
            y = self._with_its_group(x, indices, choice)
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

    def to_lora(self, r: int = 8, scale: float = 20.0, dropout: float = 0.0) -> nn.Module:
        """This layer with a low-rank adapter of mlx-lm's, see ``lora``."""
        from .lora import adapted

        return adapted(self, r, scale, dropout)

    def _on_cpu(self, x: mx.array, indices: mx.array) -> mx.array | None:
        """The products by NumPy, or None while a transformation traces or takes gradients."""
        expanded = self.expanded
        wide = self.group.read(x, rotated=not expanded.keep, dtype=mx.float32)
        if is_traced(wide, indices) or is_differentiated(wide):
            return None
        return expert_product(wide, indices, expanded.matrix, self.output_dims).astype(x.dtype)

    def _with_its_group(self, x: mx.array, indices: mx.array, choice: Backend) -> mx.array | None:
        """A few rows by the kernels, for all layers of the group, or None if they cannot.

        While one token is generated, the host's time for a call is what counts.
        """
        group = self.group
        if self.training or self.use_qjl or not self.group_has_kernel():
            return None
        dialect = kernels_of(choice, x.dtype)
        if dialect is None or not are_few(x, indices, self.num_experts, dialect):
            return None

        def make() -> Program:
            weights = [layer.packed() for layer in group.layers]

            def program(x: mx.array, indices: mx.array) -> list[mx.array]:
                rotated = rotate_rows(x, group.block, group.multiplier, dialect)
                if why_not_jointly(weights):
                    return [gather_matmul(rotated, weight, indices) for weight in weights]
                return joint_gather_matmul(rotated, weights, indices, dialect)

            return program

        # held by the first of the layers, which the group names to all of them
        replay = group.layers[0].replay
        kind = ("products", _Same(indices))
        outputs = group.once(x, kind, lambda: replay(group.arrays(), make, x, indices))
        return outputs[self.place]

    def _cpu_matrix(self, expert: int, keep: bool) -> CpuMatrix:
        return packed_matrix(self.packed().expert(expert), self.use_qjl, keep)


class _Same:
    """Compares by identity of an array, which it holds: an id may be given to a new array."""

    def __init__(self, array: mx.array):
        self.array = array

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.array is self.array

    __hash__ = None  # type: ignore[assignment]

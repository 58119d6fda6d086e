"""A stack of expert layers with packed weights, for mlx-lm's and mlx-vlm's SwitchLinear alike."""

from __future__ import annotations

import mlx.core as mx

from ..kernels.cpu_matrix import CpuMatrix, expert_product
from ..kernels.dispatch import backend, is_differentiated, is_traced, kernels_of_backend
from ..kernels.gather import are_few, gather_matmul, joint_gather_matmul
from ..kernels.matvec import why_not_jointly
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
        self.jointly: bool | None = None  # whether there is a kernel for the group, once asked

    @property
    def num_experts(self) -> int:
        return self.shape[0]

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """Apply expert ``indices`` to x [..., n, I] (leading axes broadcast); [..., n, O]."""
        on_cpu = backend() == "cpu"
        y = self._on_cpu(x, indices) if on_cpu else self._with_its_group(x, indices)
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
        """The products by NumPy, or None while a transformation traces or takes gradients."""
        expanded = self.expanded
        wide = self.group.read(x, rotated=not expanded.keep, dtype=mx.float32)
        if is_traced(wide, indices) or is_differentiated(wide):
            return None
        return expert_product(wide, indices, expanded.matrix, self.output_dims).astype(x.dtype)

    def _with_its_group(self, x: mx.array, indices: mx.array) -> mx.array | None:
        """The products by a kernel that makes those of the whole group (gate and up), or None.

        While one token is generated a launch costs about as much as what it does.
        """
        group = self.group
        if self.training or self.use_qjl or group.size == 1:
            return None
        dialect = kernels_of_backend(x.dtype)
        if dialect is None or not are_few(x, indices, self.num_experts, dialect):
            return None
        if not self._has_joint_kernel():
            return None

        def make() -> list[mx.array]:
            weights = [layer.packed() for layer in group.layers]
            return joint_gather_matmul(rotated_input(group, x), weights, indices, dialect)

        outputs = group.once(x, ("products", _Same(indices)), make)
        return next(y for y, layer in zip(outputs, group.layers, strict=True) if layer is self)

    def _has_joint_kernel(self) -> bool:
        if self.jointly is None:
            layers = [n for n in self.group.layers if isinstance(n, TurboQuantSwitchLinear)]
            whole = len(layers) == self.group.size
            self.jointly = whole and not why_not_jointly([n.packed() for n in layers])
        return self.jointly

    def _cpu_matrix(self, expert: int, keep: bool) -> CpuMatrix:
        return packed_matrix(self.packed().expert(expert), self.use_qjl, keep)


class _Same:
    """Compares by identity of an array, which it holds: an id may be given to a new array."""

    def __init__(self, array: mx.array):
        self.array = array

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.array is self.array

    __hash__ = None  # type: ignore[assignment]

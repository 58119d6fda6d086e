"""What TurboQuant linear and expert layers have in common: their parameters and their decoding."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from ..kernels.replay import Replay
from ..kernels.unpack import why_no_kernel
from ..quant.spec import QuantSpec
from ..quant.weight import PackedWeight
from .rotation_group import RotationGroup

_PACKED = ("scales", "table", "multiplier", "qjl_norms", "qjl_multiplier")
"""Parameters that are numbers but not of the activation's dtype."""


class PackedLayer(nn.Module):
    """A layer whose weight is stored as codes, scales and a table.

    Parameters (see docs/reference/format.md): ``codes``, ``scales``, ``table``; on the leader of
    the rotation group ``multiplier``; with QJL ``qjl_codes``, ``qjl_norms`` and on the leader
    ``qjl_multiplier``; optionally ``bias``. They start as zeros of the right shape and dtype, to be
    filled by ``load_weights``.

    There is no attribute ``bits``: mlx-lm takes any module that has one for its own affine layer.

    Args:
        spec: how the weight is decoded.
        shape: (O, I), or (E, O, I) for a stack of experts.
        group: the rotation group that the layer reads its input from; the layer joins it.
        leads: whether this layer holds the group's multiplier.
        bias: whether the layer adds a bias [O] or [E, O].
    """

    def __init__(
        self,
        spec: QuantSpec,
        shape: tuple[int, ...],
        *,
        group: RotationGroup,
        leads: bool,
        bias: bool,
    ):
        super().__init__()
        *rows, width = shape
        self.spec = spec
        # an attribute of type tuple would become part of MLX's module tree
        self.dims = _Dims(shape)
        self.group = group
        self.use_qjl = spec.qjl
        self.place = group.join(self, leads)
        self.replay = Replay()
        self.has_kernel: bool | None = None  # of the whole group; None until asked

        scale_dtype = mx.uint8 if spec.scale_layout == "log8" else mx.float16
        self.codes = mx.zeros((*rows, spec.words_per_row(width)), mx.uint32)
        self.scales = mx.zeros((*rows, width // spec.group_size), scale_dtype)
        self.table = mx.zeros((spec.table_size,), mx.float32)
        if leads:
            self.multiplier = mx.ones((width,), mx.float16)
        if spec.qjl:
            self.qjl_codes = mx.zeros((*rows, -(-width // 32)), mx.uint32)
            self.qjl_norms = mx.zeros(tuple(rows), mx.float16)
            if leads:
                self.qjl_multiplier = mx.ones((width,), mx.float16)
        if bias:
            self.bias = mx.zeros(tuple(rows))
        self.freeze()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight that the layer represents."""
        return self.dims.shape

    @property
    def input_dims(self) -> int:
        return self.shape[-1]

    @property
    def output_dims(self) -> int:
        return self.shape[-2]

    def group_has_kernel(self) -> bool:
        """Whether kernels multiply by every layer of the group, all of one kind."""
        if self.has_kernel is None:
            self.has_kernel = all(
                type(layer) is type(self) and not why_no_kernel(layer.packed())
                for layer in self.group.layers
            )
        return self.has_kernel

    def packed(self) -> PackedWeight:
        """The stored weight with the group's multipliers, as ``quant.weight`` takes it."""
        with_qjl = self.spec.qjl
        return PackedWeight(
            spec=self.spec,
            shape=self.shape,
            codes=self.codes,
            scales=self.scales,
            table=self.table,
            multiplier=self.group.multiplier,
            qjl_codes=self.qjl_codes if with_qjl else None,
            qjl_norms=self.qjl_norms if with_qjl else None,
            qjl_multiplier=self.group.qjl_multiplier if with_qjl else None,
        )

    def __setitem__(self, name: str, value: object) -> None:
        """Set a parameter; the packed ones keep the dtype that their format has.

        ``Module.set_dtype`` gives every array of floats the dtype that activations should have.
        What it rounded is put aside for what is there; other values are taken, in the right dtype.
        """
        held = self.get(name)
        if name in _PACKED and isinstance(value, mx.array) and isinstance(held, mx.array):
            same = value.shape == held.shape and value.dtype != held.dtype
            if same and mx.issubdtype(held.dtype, mx.floating):
                rounded = held.astype(value.dtype)
                value = held if mx.array_equal(rounded, value).item() else value.astype(held.dtype)
        super().__setitem__(name, value)

    def weight_version(self) -> tuple:
        """Identity of the arrays that the weight is decoded from.

        A decoded copy is stale when this has changed (the held arrays are compared by identity).
        """
        arrays = (self["codes"], self["scales"], self["table"])  # attributes are looked up slowly
        return (*arrays, self.group.multiplier, self.use_qjl)

    def _extra_repr(self) -> str:
        spec = self.spec
        name = "ternary" if spec.code == "ternary" else f"{spec.bits}-bit"
        if spec.window_bits > spec.bits:
            name += f" trellis, window {spec.window_bits}"
        return (
            f"shape={self.shape}, {name}, group_size={spec.group_size}, "
            f"rotation_block={spec.rotation_block}, qjl={spec.qjl}, bias={'bias' in self}"
        )


class _Dims:
    """A shape that MLX's module tree leaves alone."""

    def __init__(self, shape: tuple[int, ...]):
        self.shape = tuple(shape)

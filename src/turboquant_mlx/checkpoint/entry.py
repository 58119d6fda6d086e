"""One quantized module: its entry in the manifest, and the tensors that follow from it.

No MLX here.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeGuard

from ..errors import CheckpointError, QuantizationError
from ..quant.spec import QuantSpec

Kind = Literal["linear", "switch", "affine_linear", "affine_embedding", "affine_switch"]
KINDS: tuple[str, ...] = (
    "linear",
    "switch",
    "affine_linear",
    "affine_embedding",
    "affine_switch",
)
AFFINE_BITS = (1, 2, 3, 4, 5, 6, 8)
AFFINE_GROUP_SIZES = (32, 64, 128)
FLOAT_DTYPES = ("F16", "BF16", "F32")

# Orders of the small Hadamard matrices that MLX multiplies its powers of two with.
HADAMARD_FACTORS = (1, 12, 20, 28)

_COMMON_KEYS = ("kind", "shape", "bits", "group_size", "bias")
_TURBOQUANT_KEYS = (
    "code",
    "window_bits",
    "tile",
    "scale_layout",
    "rotation_block",
    "rotation_group",
    "qjl",
)
_MODULE_PATH = re.compile(r"[^\s./\\]+(\.[^\s./\\]+)*")


class TensorSpec(NamedTuple):
    """Type and shape that a stored tensor must have.

    ``dtype`` is a safetensors type name; None stands for any of ``FLOAT_DTYPES``, used where a
    tensor keeps the type that it had in the source model.
    """

    dtype: str | None
    shape: tuple[int, ...]

    def accepts(self, dtype: str, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this type and shape is what the manifest asks for."""
        right_type = dtype in FLOAT_DTYPES if self.dtype is None else dtype == self.dtype
        return right_type and tuple(shape) == self.shape


def is_hadamard_size(n: int) -> bool:
    """Whether n is a power of two, or 12, 20 or 28 times one."""
    return any(n % m == 0 and n // m > 0 and (n // m) & (n // m - 1) == 0 for m in HADAMARD_FACTORS)


@dataclass(frozen=True)
class ModuleEntry:
    """One quantized module, checked where it is made.

    Attributes:
        path: the module's path in the mlx-lm model ("model.layers.0.self_attn.q_proj").
        kind: "linear" and "switch" (a stack of experts) hold our codes; the "affine_" kinds
            hold MLX's own affine quantization.
        shape: shape of the weight that is represented, (O, I), or (E, O, I) for the switch kinds.
        bits, group_size: as in ``QuantSpec``, or MLX's own meaning for the affine kinds.
        bias: whether the layer adds a bias ((O,) or (E, O)).
        code, window_bits, tile, scale_layout, rotation_block, qjl: as in ``QuantSpec``;
            meaningless for the affine kinds, where they keep their defaults.
        rotation_group: path of the module that holds the input multiplier for all modules
            reading the same activation; "" stands for the module itself.

    Raises:
        CheckpointError: a field has an impossible value; the message names the module.
    """

    path: str
    kind: Kind
    shape: tuple[int, ...]
    bits: int
    group_size: int
    bias: bool = False
    code: str = "scalar"
    window_bits: int = 0
    tile: int = 0
    scale_layout: str = "float16"
    rotation_block: int = 1
    rotation_group: str = ""
    qjl: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.path, str) or not _MODULE_PATH.fullmatch(self.path):
            raise CheckpointError(f"{self.path!r} is not a module path")
        if self.kind not in KINDS:
            raise self._error(f"unknown kind {self.kind!r}")
        object.__setattr__(self, "shape", tuple(self.shape))
        rank = 3 if self.kind.endswith("switch") else 2
        if len(self.shape) != rank or not all(is_int(n) and n > 0 for n in self.shape):
            raise self._error(f"shape {list(self.shape)} is not {rank} positive sizes")
        for name in ("bits", "group_size", "window_bits", "tile", "rotation_block"):
            if not is_int(getattr(self, name)):
                raise self._error(f"{name} {getattr(self, name)!r} is not an integer")
        for name in ("bias", "qjl"):
            if not isinstance(getattr(self, name), bool):
                raise self._error(f"{name} {getattr(self, name)!r} is neither true nor false")
        if self.is_affine:
            self._check_affine()
        else:
            self._check_turboquant()

    def _check_affine(self) -> None:
        if self.bits not in AFFINE_BITS:
            raise self._error(f"affine quantization has no {self.bits} bits")
        if self.group_size not in AFFINE_GROUP_SIZES:
            raise self._error(f"affine quantization has no group size {self.group_size}")
        if self.width % self.group_size:
            raise self._error(f"width {self.width} is no multiple of group size {self.group_size}")
        if self.kind == "affine_embedding" and self.bias:
            raise self._error("an embedding has no bias")

    def _check_turboquant(self) -> None:
        if not self.rotation_group:
            object.__setattr__(self, "rotation_group", self.path)
        try:
            spec = self.spec
        except QuantizationError as error:
            raise self._error(error.message) from None
        # The spec fills in what a code implies (the window of a plain scalar code).
        object.__setattr__(self, "bits", spec.bits)
        object.__setattr__(self, "window_bits", spec.window_bits)
        if self.width % self.group_size:
            raise self._error(f"width {self.width} is no multiple of group size {self.group_size}")
        if self.tile and self.width % self.tile:
            raise self._error(f"width {self.width} is no multiple of tile {self.tile}")
        if self.width % self.rotation_block:
            raise self._error(
                f"width {self.width} is no multiple of rotation block {self.rotation_block}"
            )
        if not is_hadamard_size(self.rotation_block):
            raise self._error(f"there is no rotation of {self.rotation_block} values")

    def _error(self, message: str) -> CheckpointError:
        return CheckpointError(f"manifest, module {self.path}: {message}")

    @classmethod
    def from_spec(
        cls,
        path: str,
        kind: Kind,
        shape: tuple[int, ...],
        spec: QuantSpec,
        *,
        bias: bool = False,
        rotation_group: str = "",
    ) -> ModuleEntry:
        """The entry of a module of kind "linear" or "switch" quantized as ``spec`` says."""
        return cls(
            path=path,
            kind=kind,
            shape=shape,
            bits=spec.bits,
            group_size=spec.group_size,
            bias=bias,
            code=spec.code,
            window_bits=spec.window_bits,
            tile=spec.tile,
            scale_layout=spec.scale_layout,
            rotation_block=spec.rotation_block,
            rotation_group=rotation_group,
            qjl=spec.qjl,
        )

    @classmethod
    def from_dict(cls, path: str, values: Any) -> ModuleEntry:
        """Read one entry of the manifest's "modules".

        Raises:
            CheckpointError: a key is unknown or missing, or a value is impossible.
        """
        where = f"manifest, module {path}"
        if not isinstance(values, Mapping):
            raise CheckpointError(f"{where}: the entry is not an object")
        kind = values.get("kind")
        if kind not in KINDS:
            raise CheckpointError(f"{where}: unknown kind {kind!r}")
        keys = _COMMON_KEYS if kind.startswith("affine") else _COMMON_KEYS + _TURBOQUANT_KEYS
        check_keys(values, keys, where)
        if not isinstance(values["shape"], (list, tuple)):
            raise CheckpointError(f"{where}: shape is not a list")
        for key in ("code", "scale_layout", "rotation_group"):
            if not isinstance(values.get(key, ""), str) or values.get(key) == "":
                raise CheckpointError(f"{where}: {key} {values[key]!r} is not a name")
        entry = cls(path=path, **values)
        for key in ("bits", "window_bits"):
            if key in values and getattr(entry, key) != values[key]:
                raise CheckpointError(f"{where}: {key} {values[key]} does not suit {entry.code}")
        return entry

    def to_dict(self) -> dict[str, Any]:
        """The entry as it stands in the manifest; ``from_dict`` gives the same entry back."""
        keys = _COMMON_KEYS if self.is_affine else _COMMON_KEYS + _TURBOQUANT_KEYS
        values: dict[str, Any] = {key: getattr(self, key) for key in keys}
        values["shape"] = list(self.shape)
        return values

    @property
    def is_affine(self) -> bool:
        """Whether the weight is in MLX's affine layout and not in ours."""
        return self.kind.startswith("affine")

    @property
    def is_leader(self) -> bool:
        """Whether this module holds the input multiplier of its rotation group."""
        return not self.is_affine and self.rotation_group == self.path

    @property
    def width(self) -> int:
        """Length of the input, the last axis of the weight."""
        return self.shape[-1]

    @property
    def num_weights(self) -> int:
        """Weights that the module represents, without its bias."""
        n = 1
        for size in self.shape:
            n *= size
        return n

    @property
    def spec(self) -> QuantSpec:
        """How the weight is decoded.

        Raises:
            ValueError: the module is of an affine kind.
        """
        if self.is_affine:
            raise ValueError(f"{self.path} is an affine module and has no QuantSpec")
        return QuantSpec(
            code=self.code,  # type: ignore[arg-type]  # QuantSpec checks the value
            bits=self.bits,
            window_bits=self.window_bits,
            tile=self.tile,
            group_size=self.group_size,
            scale_layout=self.scale_layout,  # type: ignore[arg-type]
            rotation_block=self.rotation_block,
            qjl=self.qjl,
        )


def expected_tensors(entry: ModuleEntry) -> dict[str, TensorSpec]:
    """The tensors that belong to a module, by the last part of their name.

    Returns:
        {"codes": TensorSpec("U32", (O, words)), ...}, in the order in which they are written.
        The stored name is ``f"{entry.path}.{suffix}"``.
    """
    *lead, width = entry.shape
    rows = tuple(lead)
    groups = (*rows, width // entry.group_size)
    tensors: dict[str, TensorSpec] = {}
    if entry.is_affine:
        tensors["weight"] = TensorSpec("U32", (*rows, width * entry.bits // 32))
        tensors["scales"] = TensorSpec(None, groups)
        tensors["biases"] = TensorSpec(None, groups)
    else:
        spec = entry.spec
        tensors["codes"] = TensorSpec("U32", (*rows, spec.words_per_row(width)))
        tensors["scales"] = TensorSpec("U8" if spec.scale_layout == "log8" else "F16", groups)
        tensors["table"] = TensorSpec("F32", (spec.table_size,))
        if entry.is_leader:
            tensors["multiplier"] = TensorSpec("F16", (width,))
        if spec.qjl:
            tensors["qjl_codes"] = TensorSpec("U32", (*rows, -(-width // 32)))
            tensors["qjl_norms"] = TensorSpec("F16", rows)
            if entry.is_leader:
                tensors["qjl_multiplier"] = TensorSpec("F16", (width,))
    if entry.bias:
        tensors["bias"] = TensorSpec(None, rows)
    return tensors


def check_keys(
    values: Mapping[str, Any], keys: Iterable[str], where: str, optional: Iterable[str] = ()
) -> None:
    """Make sure that an object has these keys and no others.

    Raises:
        CheckpointError: beginning with ``where``, and naming the key.
    """
    required = tuple(keys)
    known = (*required, *optional)
    for key in values:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did the writer mean {close[0]!r}?" if close else None
            raise CheckpointError(f"{where}: unknown key {key!r}", hint=hint)
    for key in required:
        if key not in values:
            raise CheckpointError(f"{where}: key {key!r} is missing")


def is_int(value: Any) -> TypeGuard[int]:
    """Whether a JSON value is a whole number (true and false are none)."""
    return isinstance(value, int) and not isinstance(value, bool)

"""The manifest of a converted model: what config.json says about each quantized module.

The manifest is the value of the key ``turboquant`` of config.json. docs/reference/format.md
describes it for people, format.schema.json for machines; this module is what both agree with.

Reading is strict. An unknown version, kind or key, a missing key, a value of the wrong type and
a rotation group that does not hang together are each a ``CheckpointError`` naming the module.
Whatever passes can be decoded: the sizes of all stored tensors follow from the manifest alone
(``Manifest.tensors``), and a reader compares them with the files before it touches a weight.

No MLX here: the planner and the doctor read manifests too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import CheckpointError
from ..quant.spec import QuantSpec
from .entry import (
    AFFINE_BITS,
    AFFINE_GROUP_SIZES,
    FLOAT_DTYPES,
    HADAMARD_FACTORS,
    KINDS,
    Kind,
    ModuleEntry,
    TensorSpec,
    check_keys,
    expected_tensors,
    is_hadamard_size,
    is_int,
)

__all__ = [
    "AFFINE_BITS",
    "AFFINE_GROUP_SIZES",
    "FLOAT_DTYPES",
    "FORMAT_VERSION",
    "HADAMARD_FACTORS",
    "KINDS",
    "MANIFEST_KEY",
    "MODEL_FILE",
    "QUANT_METHOD",
    "Kind",
    "Manifest",
    "ModuleEntry",
    "MtpInfo",
    "TensorSpec",
    "config_entries",
    "expected_tensors",
    "has_manifest",
    "is_hadamard_size",
]

FORMAT_VERSION = 1
MANIFEST_KEY = "turboquant"
QUANT_METHOD = "turboquant"
MODEL_FILE = "turboquant_model.py"

_MANIFEST_KEYS = ("format_version", "created_by", "options", "modules")


@dataclass(frozen=True)
class MtpInfo:
    """The multi-token-prediction head kept from the source: a file of its own beside the model."""

    file: str
    tensors: int


@dataclass(frozen=True)
class Manifest:
    """All that config.json says about the quantization of a model.

    Attributes:
        modules: module path -> entry, in the order of the model.
        options: the options of the conversion as they were given (informative; any JSON values).
        created_by: distribution and version that wrote the folder (informative).
        mtp: the kept multi-token-prediction head, or None.

    Raises:
        CheckpointError: the rotation groups do not hang together.
    """

    modules: dict[str, ModuleEntry]
    options: dict[str, Any] = field(default_factory=dict)
    created_by: str = ""
    mtp: MtpInfo | None = None

    def __post_init__(self) -> None:
        for path, entry in self.modules.items():
            if path != entry.path:
                raise CheckpointError(f"manifest: {path!r} holds the entry of {entry.path!r}")
            if not entry.is_affine:
                self._check_group(entry)

    def _check_group(self, entry: ModuleEntry) -> None:
        where = f"manifest, module {entry.path}"
        leader = self.modules.get(entry.rotation_group)
        if leader is None:
            raise CheckpointError(f"{where}: its rotation group {entry.rotation_group} is absent")
        if not leader.is_leader:
            raise CheckpointError(
                f"{where}: its rotation group {entry.rotation_group} does not lead a group"
            )
        for name in ("width", "rotation_block", "qjl"):
            mine, theirs = getattr(entry, name), getattr(leader, name)
            if mine != theirs:
                raise CheckpointError(
                    f"{where}: {name} {mine} differs from {theirs} of its rotation group "
                    f"{leader.path}"
                )

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], found: Mapping[str, Any] | None = None
    ) -> Manifest:
        """Read the manifest from a model's config.

        Args:
            config: the whole content of config.json.
            found: the tensors of the folder by name. With them, a manifest of more modules than
                the files hold is refused before its entries are looked at.

        Raises:
            CheckpointError: there is none, or it is not exactly what this version writes.
        """
        block = config.get(MANIFEST_KEY)
        if block is None:
            raise CheckpointError(f"config.json has no {MANIFEST_KEY!r} block")
        if not isinstance(block, Mapping):
            raise CheckpointError(f"config.json: {MANIFEST_KEY!r} is not an object")
        version = block.get("format_version")
        if not is_int(version) or version < 1:
            raise CheckpointError(f"manifest: format_version {version!r} is not a version number")
        if version > FORMAT_VERSION:
            raise CheckpointError(
                f"the model is in format version {version}, this release reads up to "
                f"{FORMAT_VERSION}",
                hint="upgrade turboquant-mlx-kit",
            )
        check_keys(block, _MANIFEST_KEYS, "manifest", optional=("mtp",))
        if not isinstance(block["created_by"], str):
            raise CheckpointError("manifest: created_by is not a text")
        for key in ("options", "modules"):
            if not isinstance(block[key], Mapping):
                raise CheckpointError(f"manifest: {key} is not an object")
        if found is not None:
            _check_names(block["modules"], found)
        return cls(
            modules={
                path: ModuleEntry.from_dict(path, values)
                for path, values in block["modules"].items()
            },
            options=dict(block["options"]),
            created_by=block["created_by"],
            mtp=_read_mtp(block["mtp"]) if "mtp" in block else None,
        )

    def to_dict(self) -> dict[str, Any]:
        """The block as it stands in config.json under ``MANIFEST_KEY``."""
        block: dict[str, Any] = {
            "format_version": FORMAT_VERSION,
            "created_by": self.created_by,
            "options": dict(self.options),
            "modules": {path: entry.to_dict() for path, entry in self.modules.items()},
        }
        if self.mtp is not None:
            block["mtp"] = {"file": self.mtp.file, "tensors": self.mtp.tensors}
        return block

    def spec(self, path: str) -> QuantSpec:
        """How the weight of one module is decoded.

        Raises:
            KeyError: the manifest has no such module.
            ValueError: the module is of an affine kind.
        """
        return self.modules[path].spec

    def groups(self) -> dict[str, list[str]]:
        """Rotation groups: path of the leader -> paths of all members, itself included."""
        groups: dict[str, list[str]] = {}
        for path, entry in self.modules.items():
            if not entry.is_affine:
                groups.setdefault(entry.rotation_group, []).append(path)
        return groups

    def tensors(self) -> dict[str, TensorSpec]:
        """Full name -> type and shape of every tensor that belongs to a quantized module."""
        return {
            f"{path}.{suffix}": tensor
            for path, entry in self.modules.items()
            for suffix, tensor in expected_tensors(entry).items()
        }

    def check_tensors(self, found: Mapping[str, Any]) -> None:
        """Compare the tensors of a folder with what the manifest promises.

        Args:
            found: name -> anything with ``dtype`` (a safetensors type name) and ``shape``; tensors
                that belong to no quantized module are not looked at.

        Raises:
            CheckpointError: a tensor is missing, of another type or shape, or surplus (one of
                our own suffixes, or any name below a quantized module, that nothing asked for).
        """
        wanted = self.tensors()
        for name, tensor in wanted.items():
            if name not in found:
                raise CheckpointError(f"tensor {name} is missing")
            info = found[name]
            if not tensor.accepts(info.dtype, tuple(info.shape)):
                raise CheckpointError(
                    f"tensor {name} is {info.dtype} {list(info.shape)}, the manifest asks for "
                    f"{tensor.dtype or 'floating point'} {list(tensor.shape)}"
                )
        for name in found:
            if name not in wanted and name.rpartition(".")[0] in self.modules:
                raise CheckpointError(f"tensor {name} belongs to nothing in the manifest")


def has_manifest(config: Mapping[str, Any]) -> bool:
    """Whether a config belongs to a folder in our format (of any version)."""
    return MANIFEST_KEY in config


def config_entries(manifest: Manifest, bits: int, group_size: int) -> dict[str, Any]:
    """The keys that a converted model's config.json has beyond those of its source.

    ``quantization_config`` is a label for other tools. There is no ``quantization``: stock
    loaders act on that key, and would take our tensors for their own.
    """
    return {
        "quantization_config": {
            "quant_method": QUANT_METHOD,
            "bits": bits,
            "group_size": group_size,
        },
        "model_file": MODEL_FILE,
        MANIFEST_KEY: manifest.to_dict(),
    }


def _check_names(modules: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Make sure that each module has its main tensor, whatever its entry says."""
    for path, values in modules.items():
        if f"{path}.codes" in found or f"{path}.weight" in found:
            continue
        kind = values.get("kind") if isinstance(values, Mapping) else None
        is_affine = isinstance(kind, str) and kind.startswith("affine")
        raise CheckpointError(f"tensor {path}.{'weight' if is_affine else 'codes'} is missing")


def _read_mtp(values: Any) -> MtpInfo:
    if not isinstance(values, Mapping):
        raise CheckpointError("manifest: mtp is not an object")
    check_keys(values, ("file", "tensors"), "manifest, mtp")
    name, count = values["file"], values["tensors"]
    if not isinstance(name, str) or not re.fullmatch(r"[^/\\]+\.safetensors", name):
        raise CheckpointError(f"manifest, mtp: {name!r} is not a safetensors file in the folder")
    if not is_int(count) or count < 1:
        raise CheckpointError(f"manifest, mtp: tensors {count!r} is not a count")
    return MtpInfo(name, count)

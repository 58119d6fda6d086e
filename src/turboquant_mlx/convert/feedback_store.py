"""Layers that error feedback has quantized, on disk until they are written, and across runs.

The folder lies beside the target under a name that depends on everything that the result depends
on: another run of the same command with the same source finds it and goes on where the first was
stopped. It is removed when the conversion is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..checkpoint.schema import ModuleEntry
from ..quant.weight import PackedWeight

_TOKENS = "tokens.npy"
_LAYER = ".safetensors"
_SCRATCH = ".partial"


def fingerprint(*parts: Any) -> str:
    """A short name for everything that a result depends on.

    Args:
        parts: what JSON can hold, or paths of files: their size and time of change count.
    """
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, Path):
            found = part.stat()
            part = [str(part.resolve()), found.st_size, found.st_mtime_ns]
        digest.update(json.dumps(part, sort_keys=True).encode() + b"\0")
    return digest.hexdigest()[:16]


class FeedbackStore:
    """Quantized layers and the text that they were quantized on.

    Args:
        target: the folder that is being written.
        key: see ``fingerprint``.
        entries: what the manifest says of each layer.
    """

    def __init__(self, target: Path, key: str, entries: Mapping[str, ModuleEntry]):
        self.entries = entries
        self._others = f".{target.name}.feedback-*"
        self.folder = target.absolute().parent / f".{target.name}.feedback-{key}"
        self.folder.mkdir(parents=True, exist_ok=True)
        for scratch in self.folder.glob(f"*{_SCRATCH}*"):
            scratch.unlink()
        self._paths = {
            file.name.removesuffix(_LAYER) for file in self.folder.glob(f"*{_LAYER}")
        } & set(entries)
        self.found = len(self._paths)
        """Layers of an earlier run."""

    def __contains__(self, path: str) -> bool:
        return path in self._paths

    def __len__(self) -> int:
        return len(self._paths)

    def tokens(self) -> np.ndarray | None:
        """The text of an earlier run."""
        file = self.folder / _TOKENS
        return np.load(file) if file.exists() else None

    def keep_tokens(self, tokens: np.ndarray) -> None:
        """Keep the text for a later run."""
        scratch = self.folder / f"tokens{_SCRATCH}.npy"
        np.save(scratch, tokens)
        os.replace(scratch, self.folder / _TOKENS)

    def put(self, path: str, packed: PackedWeight) -> None:
        """Keep a layer."""
        scratch = self.folder / f"{path}{_SCRATCH}{_LAYER}"
        mx.save_safetensors(str(scratch), packed.arrays())
        os.replace(scratch, self.folder / f"{path}{_LAYER}")
        self._paths.add(path)

    def get(self, path: str) -> PackedWeight:
        """Read a layer."""
        entry = self.entries[path]
        arrays: Any = mx.load(str(self.folder / f"{path}{_LAYER}"))
        mx.eval(arrays)
        return PackedWeight(spec=entry.spec, shape=entry.shape, **arrays)

    def remove(self) -> None:
        """Forget everything, what runs with other options left for this target included."""
        for folder in self.folder.parent.glob(self._others):
            shutil.rmtree(folder, ignore_errors=True)

    def remove_if_empty(self) -> None:
        """Leave nothing behind where there is nothing to go on from."""
        if not self._paths:
            shutil.rmtree(self.folder, ignore_errors=True)

"""Layers that error feedback has quantized, on disk until they are written, and across runs.

The folder lies beside the target under a name that depends on everything that the result depends
on: another run of the same command with the same source finds it and goes on where the first was
stopped. It is removed when the conversion is complete.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from filelock import FileLock, Timeout

from ..checkpoint.headers import read_header
from ..checkpoint.schema import ModuleEntry, expected_tensors
from ..errors import CheckpointError, OutputError
from ..quant.weight import PackedWeight

logger = logging.getLogger("turboquant_mlx")

_TOKENS = "tokens.npy"
_LAYER = ".safetensors"
_SCRATCH = ".partial"
_LOCK = ".lock"


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

    Raises:
        OutputError: another process is at work on the same.
    """

    def __init__(self, target: Path, key: str, entries: Mapping[str, ModuleEntry]):
        self.entries = entries
        self._others = f".{glob.escape(target.name)}.feedback-*"
        self.folder = target.absolute().parent / f".{target.name}.feedback-{key}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(self.folder / _LOCK)
        try:
            self._lock.acquire(blocking=False)
        except Timeout:
            raise OutputError(
                f"another process runs this very conversion (it keeps its layers in {self.folder})",
                hint="wait for it, or end it; what it has done will not be lost",
            ) from None
        for scratch in self.folder.glob(f"*{_SCRATCH}*"):
            scratch.unlink()
        left = {file.name.removesuffix(_LAYER) for file in self.folder.glob(f"*{_LAYER}")}
        self._paths = {path for path in left & set(entries) if self._is_whole(path)}
        self.found = len(self._paths)
        """Layers of an earlier run."""

    def __contains__(self, path: str) -> bool:
        return path in self._paths

    def __len__(self) -> int:
        return len(self._paths)

    def _is_whole(self, path: str) -> bool:
        """Whether a layer of an earlier run can be read; one that cannot is forgotten."""
        file = self.folder / f"{path}{_LAYER}"
        try:
            found = read_header(file).tensors
            for name, wanted in expected_tensors(self.entries[path]).items():
                if name not in found or tuple(found[name].shape) != wanted.shape:
                    raise CheckpointError(f"{file}: its {name} are not those of this layer")
        except CheckpointError as error:
            logger.warning("warning: quantizing %s again, what is kept is damaged: %s", path, error)
            file.unlink()
            return False
        return True

    def tokens(self) -> np.ndarray | None:
        """The text of an earlier run; None if there is none, or a damaged one."""
        file = self.folder / _TOKENS
        if not file.exists():
            return None
        try:
            return np.load(file)
        except (ValueError, EOFError, OSError) as error:
            logger.warning("warning: making the text again, %s is damaged: %s", file, error)
            return None

    def keep_tokens(self, tokens: np.ndarray) -> None:
        """Keep the text for a later run.

        Raises:
            OutputError: the disk is full, or the folder cannot be written.
        """
        scratch = self.folder / f"tokens{_SCRATCH}.npy"
        with self._written(scratch):
            np.save(scratch, tokens)
            _settle(scratch, self.folder / _TOKENS)

    def put(self, path: str, packed: PackedWeight) -> None:
        """Keep a layer.

        Raises:
            OutputError: the disk is full, or the folder cannot be written.
        """
        scratch = self.folder / f"{path}{_SCRATCH}{_LAYER}"
        arrays = packed.arrays()
        mx.eval(arrays)  # what goes wrong from here on is the disk's
        with self._written(scratch):
            mx.save_safetensors(str(scratch), arrays)
            _settle(scratch, self.folder / f"{path}{_LAYER}")
        self._paths.add(path)

    @contextmanager
    def _written(self, scratch: Path) -> Iterator[None]:
        """Name the folder where a file cannot be written, and remove what there is of the file."""
        try:
            yield
        except (OSError, RuntimeError) as error:  # MLX's writer raises the latter
            with contextlib.suppress(OSError):
                scratch.unlink()
            reason = getattr(error, "strerror", None) or str(error)
            raise OutputError(
                f"{self.folder} cannot be written: {reason.rstrip('.')}",
                hint="error feedback keeps its layers there; free some space or choose another "
                "disk",
            ) from error

    def get(self, path: str) -> PackedWeight:
        """Read a layer."""
        entry = self.entries[path]
        arrays: Any = mx.load(str(self.folder / f"{path}{_LAYER}"))
        mx.eval(arrays)
        return PackedWeight(spec=entry.spec, shape=entry.shape, **arrays)

    def close(self) -> None:
        """Let another process take over."""
        self._lock.release()

    def remove(self) -> None:
        """Forget everything, what runs with other options left for this target included."""
        self.close()
        for folder in self.folder.parent.glob(self._others):
            try:
                with FileLock(folder / _LOCK, blocking=False):
                    shutil.rmtree(folder, ignore_errors=True)
            except (Timeout, OSError):
                continue  # somebody is at work in it

    def remove_if_empty(self) -> None:
        """Leave nothing behind where there is nothing to go on from."""
        if not self._paths:
            self.close()
            shutil.rmtree(self.folder, ignore_errors=True)


def _settle(scratch: Path, file: Path) -> None:
    """Give a finished file its name, once its bytes are on the disk."""
    with scratch.open("rb+") as written:
        os.fsync(written.fileno())
    os.replace(scratch, file)

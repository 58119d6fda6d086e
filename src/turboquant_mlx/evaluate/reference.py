"""What candidates are compared with: the log-probabilities of the 16-bit model, kept if possible.

One file per model, text and cut holds float16 [chunks, scored positions, vocabulary], so a second
evaluation of the same model starts at once. The name of the file is a hash of everything that the
numbers depend on. Where the file would be larger than the cache may be, the reference stays in
memory and is run again beside every candidate: slower, but the same numbers.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

import numpy as np

from .. import __version__
from ..checkpoint.source import Folder
from ..checkpoint.target import os_errors
from ..errors import OptionError, OutputError
from .score import store_log_probs
from .text import Chunks

LAYOUT = 1  # a higher number makes older files count as absent
SAMPLES_PER_FILE = 64
SAMPLE_BYTES = 4096

_NAME = "logprobs-{}.npy"
_PARTIAL = re.compile(r"\.logprobs-\w+\.partial-(\d+)")

Forward = Callable[[np.ndarray], np.ndarray]
"""Takes int32 [t] tokens, returns float32 [t, vocabulary] logits."""


class Reference(Protocol):
    """Log-probabilities of the 16-bit model, chunk by chunk."""

    def log_probs(self, index: int) -> np.ndarray:
        """float16 [scored positions, vocabulary] of one chunk."""
        ...


class StoredReference:
    """Log-probabilities in a file, read as they are needed."""

    def __init__(self, array: np.ndarray):
        self._array = array

    def log_probs(self, index: int) -> np.ndarray:
        return self._array[index]


class LiveReference:
    """Log-probabilities that the model computes again each time."""

    def __init__(self, forward: Forward, chunks: Chunks):
        self._forward = forward
        self._chunks = chunks

    def log_probs(self, index: int) -> np.ndarray:
        return log_probs_of(self._forward, self._chunks, index)


def log_probs_of(forward: Forward, chunks: Chunks, index: int) -> np.ndarray:
    """The scored positions' log-probabilities as ``store_log_probs`` keeps them."""
    logits = forward(chunks.ids[index])
    return store_log_probs(logits[chunks.skip : -1])


class ReferenceCache:
    """A folder of log-probabilities, never larger than its limit.

    Args:
        folder: made when something is stored.
        limit_bytes: of all files together; 0 stores nothing.
    """

    def __init__(self, folder: str | Path, limit_bytes: int):
        self.folder = Path(folder)
        self.limit_bytes = limit_bytes

    def find(self, key: str, chunks: Chunks) -> StoredReference | None:
        """What is stored under a key, if it is whole."""
        path = self._path(key)
        try:
            array = np.load(path, mmap_mode="r")
            os.utime(path)  # the least recently used file goes first
        except (OSError, ValueError, EOFError):
            return None
        whole = array.dtype == np.float16 and array.shape[:2] == (len(chunks), chunks.scored)
        return StoredReference(array) if whole else None

    def has_room(self, chunks: Chunks, vocabulary: int) -> bool:
        """Whether a file of this size may be stored at all."""
        return self._size(chunks, vocabulary) <= self.limit_bytes

    @contextmanager
    def store(
        self, key: str, chunks: Chunks, vocabulary: int
    ) -> Iterator[Callable[[np.ndarray], None]]:
        """Store one chunk after the other.

        Yields:
            a function that takes the next chunk's float16 [scored, vocabulary].

        Raises:
            OutputError: the folder cannot be written, or the disk is full.
        """
        size = self._size(chunks, vocabulary)
        partial = self.folder / f".logprobs-{key}.partial-{os.getpid()}"
        what = f"the cache {self.folder} cannot be written"
        with os_errors(what):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._make_room(size)
            free = shutil.disk_usage(self.folder).free
            if size > free:
                raise OutputError(
                    f"no room in the cache {self.folder}: {size / 1e9:.2f} GB needed, "
                    f"{free / 1e9:.2f} GB free",
                    hint="--cache-dir names another folder, --cache-limit 0 stores nothing",
                )
            file = partial.open("wb")

        def write(log_probs: np.ndarray) -> None:
            # written, not mapped: a full disk is then an error and not a signal
            with os_errors(what):
                file.write(np.ascontiguousarray(log_probs, np.float16).data)

        header = {
            "descr": np.lib.format.dtype_to_descr(np.dtype(np.float16)),
            "fortran_order": False,
            "shape": (len(chunks), chunks.scored, vocabulary),
        }
        try:
            with file:
                np.lib.format.write_array_header_1_0(file, header)
                yield write
            with os_errors(what):
                os.replace(partial, self._path(key))
        finally:
            partial.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self.folder / _NAME.format(key)

    @staticmethod
    def _size(chunks: Chunks, vocabulary: int) -> int:
        return 2 * len(chunks) * chunks.scored * vocabulary

    def _make_room(self, size: int) -> None:
        """Delete what dead processes left, then the least recently used files."""
        for path in self.folder.iterdir():
            match = _PARTIAL.fullmatch(path.name)
            if match is not None and not _is_alive(int(match[1])):
                path.unlink(missing_ok=True)
        stored = {path: path.stat() for path in self.folder.glob(_NAME.format("*"))}
        total = sum(status.st_size for status in stored.values())
        for path in sorted(stored, key=lambda path: stored[path].st_mtime_ns):
            if total + size <= self.limit_bytes:
                break
            path.unlink(missing_ok=True)
            total -= stored[path].st_size


def default_cache_folder() -> Path:
    """Where log-probabilities are kept when the user names no folder.

    Raises:
        OptionError: the place is in somebody's home folder, and there is no such home folder.
    """
    caches = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    if caches.startswith("~"):
        raise OptionError(
            f"there is no home folder for the cache ({caches})",
            hint="--cache-dir names another folder",
        )
    return Path(caches) / "turboquant-mlx-kit" / "evaluate"


def cache_key(folder: Folder, chunks: Chunks, device: str) -> str:
    """A hash of everything that the reference's log-probabilities depend on.

    Weights are not read whole, which would take minutes for a large model: of each file the size,
    the time of its last change and ``SAMPLES_PER_FILE`` pieces count.

    Args:
        folder: the 16-bit model.
        chunks: the tokens.
        device: what the model runs on.
    """
    digest = hashlib.sha256()
    facts = {
        "layout": LAYOUT,
        "package": __version__,
        "mlx": version("mlx"),
        "mlx-lm": version("mlx-lm"),
        "device": device,
        "config": folder.config,
        "chunks": [list(chunks.ids.shape), chunks.skip],
    }
    digest.update(json.dumps(facts, sort_keys=True, default=str).encode())
    digest.update(np.ascontiguousarray(chunks.ids).tobytes())
    for path in folder.weight_files:
        status = path.stat()
        digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns} ".encode())
        with path.open("rb") as file:
            for i in range(SAMPLES_PER_FILE):
                file.seek(i * status.st_size // SAMPLES_PER_FILE)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:24]


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True

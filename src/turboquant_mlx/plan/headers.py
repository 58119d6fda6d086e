"""What a model consists of, from its small files and the headers of its shards.

``open_model`` takes what the user typed: a local folder, or a repository of the Hugging Face hub
(``owner/name``, or ``owner/name@revision``). Of a repository it reads config.json, the index and
a few kilobytes of each shard by range requests, through huggingface_hub's own client: HF_ENDPOINT,
token, cache and offline mode are respected. Shards that the cache already holds are read there. A
folder of that cache in which shards are missing is completed from the hub and never summed as if
it were whole.

No tensor is read or downloaded, and no MLX imported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from threading import Lock
from typing import Any

from ..checkpoint.config import read_json_object
from ..checkpoint.headers import (
    LENGTH_BYTES,
    Header,
    TensorInfo,
    header_length,
    join_headers,
    parse_header,
    read_header,
    show,
)
from ..checkpoint.source import (
    CONFIG_FILE,
    INDEX_FILE,
    OTHER_WEIGHT_FORMATS,
    TOKENIZER_FILES,
    WEIGHT_PATTERN,
    explain_no_model,
    has_tokenizer,
    inspect_folder,
    read_index,
    resolve,
)
from ..errors import CheckpointError, ModelNotFoundError, TurboQuantError, UnsupportedModelError

FIRST_BYTES = 64 * 1024
"""Bytes asked of a shard at first: a header of up to 600 tensors comes with a single request."""
HEADER_THREADS = 8

_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SNAPSHOT = re.compile(r"models--(?P<owner>[^/]+?)--(?P<name>[^/]+)/snapshots/(?P<commit>[^/]+)")


@dataclass(frozen=True)
class ModelFiles:
    """A model's description.

    Attributes:
        name: what the user typed.
        source: "local" or "huggingface".
        config: config.json as it is.
        tensors: tensor name -> type, shape and place.
        file_of: tensor name -> file name.
        file_bytes: weight file -> length in bytes.
        path: the local folder, or None for a repository.
        revision: the commit of a repository, else None.
        other_files: names of all files beside the weights.
        bytes_read: bytes that were requested from the hub.
        notes: what the user should know about how this was found.
    """

    name: str
    source: str
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    file_of: dict[str, str]
    file_bytes: dict[str, int]
    path: Path | None = None
    revision: str | None = None
    other_files: tuple[str, ...] = ()
    bytes_read: int = 0
    notes: tuple[str, ...] = field(default=())

    @property
    def model_type(self) -> str | None:
        """What config.json calls the architecture."""
        value = self.config.get("model_type")
        return value if isinstance(value, str) else None

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.nbytes for info in self.tensors.values())

    @property
    def has_tokenizer(self) -> bool:
        """Whether a tokenizer comes with the model."""
        if self.path is not None:
            return has_tokenizer(self.path)
        return any(
            name in TOKENIZER_FILES or name.endswith(".tiktoken") for name in self.other_files
        )


def open_model(name: str) -> ModelFiles:
    """Find and describe a model.

    Args:
        name: a local folder, ``owner/name`` or ``owner/name@revision``.

    Raises:
        ModelNotFoundError: there is no such model, or no way to reach it.
        UnsupportedModelError: its weights are in a format that nothing here reads.
        CheckpointError: a file is missing or damaged; the message names it.
    """
    repo, revision = _split_revision(name)
    if not _REPO.fullmatch(repo) or _is_there(name):
        # a path; whatever cannot be one is refused in the same words as by the other commands
        path = resolve(name)
        return _open_local(path, name)
    return _open_repository(repo, revision, name)


def _is_there(name: str) -> bool:
    """Whether a folder or a file has this name."""
    try:
        return Path(name).expanduser().exists()
    except OSError:  # too long for a path, or not for us to look at
        return False


def _split_revision(name: str) -> tuple[str, str | None]:
    repo, at, revision = name.partition("@")
    return (repo, revision) if at and revision else (name, None)


# --- local ----------------------------------------------------------------------------------------


def _open_local(path: Path, name: str) -> ModelFiles:
    snapshot = _SNAPSHOT.search(path.resolve().as_posix())
    try:
        return _describe_folder(path, name)
    except TurboQuantError:
        if snapshot is None:
            raise
    repo = f"{snapshot['owner']}/{snapshot['name']}"
    found = _open_repository(repo, snapshot["commit"], name)
    note = f"{path} is only partly downloaded; what is missing was looked up at {repo} on the hub"
    return replace(found, notes=(note, *found.notes))


def _describe_folder(path: Path, name: str) -> ModelFiles:
    folder = inspect_folder(path)
    weights = {file.name for file in folder.weight_files}
    return ModelFiles(
        name=name,
        source="local",
        config=folder.config,
        tensors=folder.tensors,
        file_of={tensor: file.name for tensor, file in folder.file_of.items()},
        file_bytes={file.name: header.file_bytes for file, header in folder.headers.items()},
        path=path,
        other_files=tuple(sorted(file.name for file in path.iterdir() if file.name not in weights)),
    )


# --- hub ------------------------------------------------------------------------------------------


def _open_repository(repo: str, revision: str | None, name: str) -> ModelFiles:
    # the hub's client takes a third of a second to import, which local folders need not pay
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return _open_offline(repo, revision, name)
    try:
        return _Repository(repo, revision).describe(name)
    except TurboQuantError:
        raise
    except Exception as error:
        # the client's errors and those of the libraries below it share no base class
        cause = _no_connection(error) or error
        explained = explain_no_model(cause, repo, revision, offline=False, allow_download=True)
        if not _is_out_of_reach(error):
            raise explained from error
        try:
            return _open_offline(repo, revision, name)
        except TurboQuantError:
            raise explained from error


def _is_out_of_reach(error: BaseException) -> bool:
    """Whether the hub gave no answer at all (an answer of no is another thing)."""
    from huggingface_hub import errors

    return not isinstance(error, errors.HfHubHTTPError | errors.HFValidationError)


def _no_connection(error: BaseException) -> Exception | None:
    """What the client says of a whole download where there is no way to the hub, else None."""
    from huggingface_hub import errors

    # the client's library has had several names
    transport = any(kind.__name__ == "TransportError" for kind in type(error).__mro__)
    if not transport and not isinstance(error, ConnectionError | TimeoutError):
        return None
    missing = errors.LocalEntryNotFoundError(str(error))
    missing.__cause__ = error
    return missing


def _open_offline(repo: str, revision: str | None, name: str) -> ModelFiles:
    """Only what the cache holds; a part of a model is no model."""
    path = resolve(repo, revision, allow_download=False)
    try:
        return replace(_describe_folder(path, name), notes=("taken from the hub's cache",))
    except CheckpointError as error:
        raise CheckpointError(
            f"{repo}: only partly downloaded, and the hub is switched off (HF_HUB_OFFLINE): "
            f"{error.message.removeprefix(f'{path}: ')}",
            hint="unset HF_HUB_OFFLINE to have the rest looked up",
        ) from None


class _Repository:
    """One revision of one repository, read piece by piece; counts the bytes."""

    def __init__(self, repo: str, revision: str | None):
        from huggingface_hub import HfApi

        info = HfApi().model_info(repo, revision=revision)
        self.repo = repo
        self.commit: str = info.sha or revision or "main"
        self.files = sorted(sibling.rfilename for sibling in info.siblings or [])
        self.bytes_read = 0
        self._lock = Lock()

    def describe(self, name: str) -> ModelFiles:
        if CONFIG_FILE not in self.files:
            raise ModelNotFoundError(f"{self.repo} is not a model: it has no {CONFIG_FILE}")
        config = read_json_object(self._small_file(CONFIG_FILE))
        if not isinstance(config.get("model_type"), str) or not config["model_type"]:
            raise CheckpointError(f"{self.repo}: {CONFIG_FILE} has no model_type")
        index = read_index(self._small_file(INDEX_FILE)) if INDEX_FILE in self.files else None
        shards = self._shards(None if index is None else index["weight_map"])
        with ThreadPoolExecutor(HEADER_THREADS) as pool:
            headers = dict(zip(shards, pool.map(self._header, shards), strict=True))
        tensors, file_of = self._join(headers, None if index is None else index["weight_map"])
        return ModelFiles(
            name=name,
            source="huggingface",
            config=config,
            tensors=tensors,
            file_of=file_of,
            file_bytes={shard: header.file_bytes for shard, header in headers.items()},
            revision=self.commit,
            other_files=tuple(file for file in self.files if file not in headers),
            bytes_read=self.bytes_read,
        )

    def _small_file(self, file: str) -> Path:
        """A whole file, through the client's cache."""
        from huggingface_hub import hf_hub_download

        path = Path(hf_hub_download(self.repo, file, revision=self.commit))
        self.bytes_read += path.stat().st_size
        return path

    def _shards(self, weight_map: Mapping[str, str] | None) -> list[str]:
        if weight_map is None:
            shards = [file for file in self.files if fnmatch(file, WEIGHT_PATTERN)]
            shards = [file for file in shards if "/" not in file]
        else:
            shards = sorted(set(weight_map.values()))
        if not shards:
            for pattern in OTHER_WEIGHT_FORMATS:
                for file in self.files:
                    if fnmatch(file, pattern):
                        raise UnsupportedModelError(
                            f"{self.repo}: no {WEIGHT_PATTERN}, only weights in another format "
                            f"({show(file)})"
                        )
            raise CheckpointError(f"{self.repo}: there is no weight file ({WEIGHT_PATTERN})")
        for shard in shards:
            if shard not in self.files:
                raise CheckpointError(
                    f"{self.repo}: weight file {show(shard)} is missing, the index names it"
                )
            if not fnmatch(shard, WEIGHT_PATTERN):
                raise UnsupportedModelError(
                    f"{self.repo}: weight file {show(shard)} is not named {WEIGHT_PATTERN}, "
                    "mlx-lm does not read it"
                )
        return shards

    def _header(self, shard: str) -> Header:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(self.repo, shard, revision=self.commit)
        if isinstance(cached, str):
            return read_header(cached)
        label = f"{self.repo}: {shard}"
        first, total = self._range(shard, 0, FIRST_BYTES)
        length = header_length(first[:LENGTH_BYTES], total, label)
        end = LENGTH_BYTES + length
        if end > len(first):
            more, _ = self._range(shard, len(first), end)
            first += more
        return parse_header(first[LENGTH_BYTES:end], total, label)

    def _range(self, file: str, start: int, end: int) -> tuple[bytes, int]:
        """Bytes [start, end) of a file, or up to its end, and the length of the whole file."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        url = hf_hub_url(self.repo, file, revision=self.commit)
        asked = {**build_hf_headers(), "Range": f"bytes={start}-{end - 1}"}
        # streamed: a server that ignores the range would send the whole shard
        with get_session().stream("GET", url, headers=asked, follow_redirects=True) as answer:
            if answer.status_code == 416:
                raise CheckpointError(f"{self.repo}: {file}: truncated, it ends before its header")
            hf_raise_for_status(answer)
            partial = answer.status_code == 206
            skip = 0 if partial else start
            got = bytearray()
            for piece in answer.iter_bytes():
                got += piece
                if len(got) >= skip + end - start:
                    break
            with self._lock:
                self.bytes_read += len(got)
            total = _total_bytes(answer.headers, partial)
        if total is None:
            raise CheckpointError(f"{self.repo}: {file}: the hub does not say how long it is")
        return bytes(got[skip : skip + end - start]), total

    def _join(
        self, headers: Mapping[str, Header], weight_map: Mapping[str, str] | None
    ) -> tuple[dict[str, TensorInfo], dict[str, str]]:
        tensors, file_of = join_headers(headers, self.repo, str)
        for name, shard in (weight_map or {}).items():
            if file_of.get(name) != shard:
                where = f"in {file_of[name]}" if name in file_of else "missing"
                raise CheckpointError(
                    f"{self.repo}: tensor {show(name)} is {where}, the index says it is in {shard}"
                )
        return tensors, file_of


def _total_bytes(headers: Mapping[str, str], partial: bool) -> int | None:
    """Length of the whole file, from the headers of an answer."""
    if partial:
        _, _, total = headers.get("content-range", "").rpartition("/")
    else:
        total = headers.get("content-length", "")
    return int(total) if total.isascii() and total.isdigit() else None

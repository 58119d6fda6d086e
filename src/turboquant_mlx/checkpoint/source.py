"""Finding a model, and checking that its files are complete before anything is done with them.

``resolve`` turns what a user typed into a folder: a local one, or one that the Hugging Face hub
provides. ``inspect_folder`` reads config.json, the index and the header of every shard, and holds
them against each other. Neither reads weights.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, ModelNotFoundError, UnsupportedModelError
from .config import read_json_object
from .headers import Header, TensorInfo, join_headers, read_header, show

INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
WEIGHT_PATTERN = "model*.safetensors"
# Parsing takes a second for every 30 MB; the largest models' configs have a few.
MAX_CONFIG_BYTES = 32 * 2**20

# What is fetched from the hub: weights in safetensors, everything that is text.
DOWNLOAD_PATTERNS = [
    "*.json",
    "model*.safetensors",
    "mtp.safetensors",
    "*.py",
    "tokenizer.model",
    "*.tiktoken",
    "*.txt",
    "*.jsonl",
    "*.jinja",
    "README.md",
]
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
    "tokenizer_config.json",
)
OTHER_WEIGHT_FORMATS = ("*.gguf", "*.bin", "*.pt", "*.pth", "*.npz", "*.msgpack", "*.h5")

_REPO_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_SHARD_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5,})-of-(?P<total>\d{5,})\.safetensors")
_MAX_SHARDS = 100_000


def resolve(
    path_or_repo: str | Path, revision: str | None = None, allow_download: bool = True
) -> Path:
    """Find a model: a local folder, or a repository of the Hugging Face hub.

    Anything that looks like a path (an absolute one, one that begins with "." or "~", one that
    ends in "/", more than one "/", or none) is only ever looked for on this machine. "owner/name"
    is a folder if there is one, else a repository, whose files are downloaded into the hub's
    cache with progress bars on stderr, or taken from there.

    Args:
        path_or_repo: what the user typed.
        revision: branch, tag or commit of a repository; None is its default branch.
        allow_download: False takes a repository from the cache only.

    Returns:
        the folder; ``inspect_folder`` says whether a model is in it.

    Raises:
        ModelNotFoundError: there is neither; one line says why.
    """
    name = str(path_or_repo)
    if not name.strip():
        raise ModelNotFoundError("no model is named")
    path = Path(os.path.expanduser(name))
    try:
        if path.is_dir():
            return path
        if path.exists():
            raise ModelNotFoundError(f"{show(name)} is a file, not a model folder")
    except (OSError, ValueError):
        pass  # a name that cannot be a path is not found below
    if isinstance(path_or_repo, Path) or not _REPO_ID.fullmatch(name):
        hint = None if "/" in name else "a model of the hub is named owner/name"
        raise ModelNotFoundError(f"no such folder: {show(name)}", hint=hint)
    return _download(name, revision, allow_download)


def _download(repo: str, revision: str | None, allow_download: bool) -> Path:
    # Importing the hub's client takes a third of a second, which local models need not pay.
    from huggingface_hub import constants, snapshot_download

    offline = bool(constants.HF_HUB_OFFLINE)
    try:
        return Path(
            snapshot_download(
                repo,
                revision=revision,
                allow_patterns=DOWNLOAD_PATTERNS,
                local_files_only=offline or not allow_download,
            )
        )
    except Exception as error:
        # The client's own errors and those of the libraries below it share no base class.
        raise explain_no_model(error, repo, revision, offline, allow_download) from error


def explain_no_model(
    error: Exception, repo: str, revision: str | None, offline: bool, allow_download: bool
) -> ModelNotFoundError:
    """One line about why a repository is not here."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return ModelNotFoundError(
            f"the model {repo} is gated, and its owner has not given you access",
            hint="ask for access on the model's page, then log in with: hf auth login",
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return ModelNotFoundError(
            f"no such folder, and no such model on the hub: {repo}",
            hint="a private model needs a login: hf auth login",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelNotFoundError(f"the model {repo} has no revision {revision}")
    if isinstance(error, errors.HFValidationError):
        return ModelNotFoundError(f"no such folder: {repo}")
    if isinstance(error, errors.HfHubHTTPError) and error.response.status_code in (401, 403):
        return ModelNotFoundError(
            f"no such folder, and the hub does not let you read {repo}",
            hint="log in with: hf auth login",
        )
    if not isinstance(error, errors.LocalEntryNotFoundError):
        return ModelNotFoundError(f"the download of {repo} failed ({_reason(error)})")
    # What remains: the files are not in the cache, and the hub was not, or could not be, asked.
    if type(error).__name__ == "IncompleteSnapshotError":
        return ModelNotFoundError(
            f"the model {repo} is only partly downloaded, and the hub cannot be asked for the rest",
            hint="try again with a network connection, without HF_HUB_OFFLINE",
        )
    if offline:
        return ModelNotFoundError(
            f"no such folder, and the hub is switched off (HF_HUB_OFFLINE): {repo}",
            hint="unset HF_HUB_OFFLINE to let it be downloaded",
        )
    if not allow_download:
        return ModelNotFoundError(f"no such folder, and it was never downloaded: {repo}")
    return ModelNotFoundError(
        f"no such folder, and the hub cannot be reached for {repo} "
        f"({_reason(error.__cause__ or error)})",
        hint="check the network connection, or give the path of a local folder",
    )


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


@dataclass(frozen=True)
class Folder:
    """A model folder whose files agree with each other.

    Attributes:
        path: the folder.
        config: config.json as it is (tagged floats decoded, not normalised).
        weight_files: the shards, sorted by name.
        tensors: tensor name -> place in the data of its file.
        file_of: tensor name -> file.
        headers: file -> its checked header.
        index: the content of the index file, or None when there is none.
    """

    path: Path
    config: dict[str, Any]
    weight_files: list[Path]
    tensors: dict[str, TensorInfo]
    file_of: dict[str, Path]
    headers: dict[Path, Header] = field(default_factory=dict)
    index: dict[str, Any] | None = None

    @property
    def model_type(self) -> str:
        """The model type that config.json names."""
        return self.config["model_type"]

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors (headers not counted)."""
        return sum(info.nbytes for info in self.tensors.values())


def inspect_folder(path: str | Path) -> Folder:
    """Read the description of a model and check that its files are complete and agree.

    Args:
        path: a local folder.

    Raises:
        ModelNotFoundError: there is no such folder, or it holds no model.
        UnsupportedModelError: the weights are in another file format.
        CheckpointError: a file is damaged, absent, outside of the folder, or not as the index
            says; a tensor is missing, surplus, or in two files.
    """
    path = Path(path)
    if not path.is_dir():
        raise ModelNotFoundError(f"no such folder: {path}")
    _refuse_pipes(path)
    config_file = path / CONFIG_FILE
    if not config_file.is_file():
        raise ModelNotFoundError(f"{path} is not a model folder: it has no {CONFIG_FILE}")
    if (size := config_file.stat().st_size) > MAX_CONFIG_BYTES:
        raise CheckpointError(f"{config_file}: {size:,} bytes are too many to describe a model")
    config = read_json_object(config_file)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise CheckpointError(f"{config_file}: there is no model_type")

    index = read_index(path / INDEX_FILE)
    found = sorted(file for file in path.glob(WEIGHT_PATTERN) if not file.is_dir())
    files = found if index is None else _indexed_files(path, index["weight_map"], found)
    if not files:
        raise _no_weights(path)
    if index is None:
        _check_shard_numbers(path, files)

    headers = {file: read_header(file) for file in files}
    tensors, file_of = join_headers(headers, str(path), lambda file: file.name)
    if index is not None:
        _check_index(path, index["weight_map"], file_of)
    return Folder(path, config, files, tensors, file_of, headers, index)


def refuse_names_not_text(folder: Folder) -> None:
    """MLX opens files by names in UTF-8 only; file systems permit any bytes.

    Raises:
        CheckpointError: the path of the folder or of a weight file is not UTF-8.
    """
    for file in (folder.path, *folder.weight_files):
        try:
            str(file).encode("utf-8")
        except UnicodeEncodeError:
            raise CheckpointError(
                f"{file}: the name is not valid UTF-8, MLX cannot open it",
                hint="rename the folder or the file",
            ) from None


def has_tokenizer(path: str | Path) -> bool:
    """Whether a folder holds a tokenizer in any of the usual formats."""
    path = Path(path)
    return any((path / name).is_file() for name in TOKENIZER_FILES) or any(path.glob("*.tiktoken"))


def _refuse_pipes(path: Path) -> None:
    """Reading a named pipe or a device in place of a file would never end."""
    for pattern in DOWNLOAD_PATTERNS:
        for file in path.glob(pattern):
            if file.exists() and not file.is_file() and not file.is_dir():
                raise CheckpointError(f"{file}: is not a file")


def read_index(file: Path) -> dict[str, Any] | None:
    if not file.is_file():
        return None
    index = read_json_object(file)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{file}: there is no weight_map")
    for tensor, name in weight_map.items():
        # The name is joined to the folder's path, so it must not lead out of the folder.
        if (
            not isinstance(name, str)
            or not name.endswith(".safetensors")
            or name != Path(name).name
            or "\\" in name
            or "\0" in name
        ):
            raise CheckpointError(
                f"{file}: tensor {show(tensor)} is said to be in {show(name)}, which is not a "
                "safetensors file in the folder"
            )
    return index


def _indexed_files(path: Path, weight_map: dict[str, str], found: list[Path]) -> list[Path]:
    names = sorted(set(weight_map.values()))
    for name in names:
        if not fnmatch(name, WEIGHT_PATTERN):
            raise UnsupportedModelError(
                f"{path}: weight file {show(name)} is not named {WEIGHT_PATTERN}, mlx-lm does not "
                "read it"
            )
        if not (path / name).is_file():
            raise CheckpointError(
                f"{path}: weight file {show(name)} is missing, the index names it",
                hint="download the model again, or copy the missing file",
            )
    for file in found:
        if file.name not in names:
            raise CheckpointError(
                f"{path}: the index does not name the weight file {file.name}",
                hint="move the file away if it does not belong to the model",
            )
    return [path / name for name in names]


def _check_shard_numbers(path: Path, files: list[Path]) -> None:
    """Without an index, the numbers in the names tell whether a shard is missing."""
    present = {file.name for file in files}
    for file in files:
        match = _SHARD_NAME.fullmatch(file.name)
        if match is None:
            continue
        total, digits = int(match["total"]), len(match["number"])
        if total > _MAX_SHARDS:
            raise CheckpointError(f"{path}: {file.name} claims to be one of {total} files")
        for number in range(1, total + 1):
            name = f"{match['stem']}-{number:0{digits}d}-of-{match['total']}.safetensors"
            if name not in present:
                raise CheckpointError(f"{path}: weight file {name} is missing")


def _check_index(path: Path, weight_map: dict[str, str], file_of: dict[str, Path]) -> None:
    for tensor, name in weight_map.items():
        if tensor not in file_of:
            raise CheckpointError(
                f"{path}: tensor {show(tensor)} is missing, the index says it is in {name}"
            )
        if file_of[tensor].name != name:
            raise CheckpointError(
                f"{path}: tensor {show(tensor)} is in {file_of[tensor].name}, the index says "
                f"in {name}"
            )
    for tensor, file in file_of.items():
        if tensor not in weight_map:
            raise CheckpointError(
                f"{path}: tensor {show(tensor)} in {file.name} is not in the index"
            )


def _no_weights(path: Path) -> CheckpointError | UnsupportedModelError:
    for pattern in OTHER_WEIGHT_FORMATS:
        for file in sorted(path.glob(pattern)):
            return UnsupportedModelError(
                f"{path}: no {WEIGHT_PATTERN}, only weights in another format ({file.name})",
                hint="save the model in safetensors format first",
            )
    return CheckpointError(f"{path}: there is no weight file ({WEIGHT_PATTERN})")

"""Safetensors headers: read, and believed only after every number has been checked.

A file is 8 bytes (little-endian length n of the header), n bytes of JSON, then the data. Nothing
in the header may be trusted: files come from downloads that broke off and from strangers. What
``read_header`` returns is consistent: the tensors tile the data exactly, in the order of their
offsets, without hole, overlap or remainder, and each is as long as its type and shape say.

Only the header is read, never the data, so that a model of any size is checked at once.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ..errors import CheckpointError

File = TypeVar("File")

# The limit of the safetensors library itself; real headers stay below a few MB.
MAX_HEADER_BYTES = 100_000_000
LENGTH_BYTES = 8
# Larger numbers are never honest, and multiplying them takes a hostile amount of time.
MAX_RANK = 32
MAX_SIZE = 1 << 62

# Bits per element of every type that the format knows.
DTYPE_BITS: dict[str, int] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
}


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies.

    Attributes:
        dtype: safetensors type name ("F16", "U32", ...).
        shape: sizes of the axes; () for a scalar.
        start, end: first byte and first byte after it, counted from the start of the *data*
            (``Header.data_offset``), as in the file.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's data."""
        return self.end - self.start

    @property
    def size(self) -> int:
        """Number of elements."""
        return _product(self.shape)


@dataclass(frozen=True)
class Header:
    """A checked header.

    Attributes:
        tensors: name -> place, in the order of the data.
        metadata: the file's own ``__metadata__`` (texts only).
        data_offset: byte of the file at which the data begins.
        file_bytes: length of the whole file.
    """

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str] = field(default_factory=dict)
    data_offset: int = 0
    file_bytes: int = 0


def tensor_bytes(dtype: str, shape: Iterable[int]) -> int:
    """Bytes that a tensor of this safetensors type and shape takes.

    Raises:
        CheckpointError: the type is unknown, or the elements do not fill whole bytes.
    """
    if dtype not in DTYPE_BITS:
        raise CheckpointError(f"unknown data type {show(dtype)}")
    bits = _product(shape) * DTYPE_BITS[dtype]
    if bits % 8:
        raise CheckpointError(f"{dtype} values do not fill whole bytes")
    return bits // 8


def read_header(path: str | Path) -> Header:
    """Read and check the header of a safetensors file.

    Raises:
        CheckpointError: the file is absent, unreadable, truncated or not what it claims to be.
    """
    path = Path(path)
    try:
        if not path.is_file():
            problem = "is not a file" if path.exists() else "does not exist"
            raise CheckpointError(f"{path}: {problem}")
        file_bytes = path.stat().st_size
        with path.open("rb") as file:
            length = header_length(file.read(LENGTH_BYTES), file_bytes, str(path))
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    return parse_header(raw, file_bytes, str(path))


def header_length(prefix: bytes, file_bytes: int, label: str) -> int:
    """Length of the JSON header, from the first 8 bytes of a file.

    Args:
        prefix: the first 8 bytes (fewer when the file has no more).
        file_bytes: length of the whole file.
        label: what to call the file in an error.

    Raises:
        CheckpointError: the file is too short, or the length cannot be right.
    """
    if len(prefix) < LENGTH_BYTES:
        raise CheckpointError(f"{label}: truncated, {file_bytes} bytes cannot hold a header")
    (length,) = struct.unpack("<Q", prefix[:LENGTH_BYTES])
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{label}: not a safetensors file, its header would have {length} bytes"
        )
    if LENGTH_BYTES + length > file_bytes:
        raise CheckpointError(
            f"{label}: truncated, the header needs {LENGTH_BYTES + length} bytes and the file "
            f"has {file_bytes}"
        )
    return length


def parse_header(raw: bytes, file_bytes: int, label: str) -> Header:
    """Check the JSON part of a header.

    Args:
        raw: the header's bytes, without the 8 bytes of its length.
        file_bytes: length of the whole file; the planner takes it from a remote server.
        label: what to call the file in an error.

    Raises:
        CheckpointError: see the module's docstring.
    """
    data_offset = LENGTH_BYTES + len(raw)
    try:
        values = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique_pairs)
    except _DuplicateKeyError as error:
        raise CheckpointError(f"{label}: header names {show(error.key)} twice") from None
    except (ValueError, RecursionError):
        raise CheckpointError(f"{label}: the header is not JSON, the file is damaged") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{label}: the header is not a JSON object")
    metadata = values.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{label}: __metadata__ is not an object of texts")
    tensors = {name: _check_tensor(name, info, label) for name, info in values.items()}
    ordered = dict(sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)))
    _check_layout(ordered, file_bytes - data_offset, label)
    return Header(ordered, metadata, data_offset, file_bytes)


def join_headers(
    headers: Mapping[File, Header], label: str, name_of: Callable[[File], str]
) -> tuple[dict[str, TensorInfo], dict[str, File]]:
    """The tensors of all files of a model together.

    Args:
        headers: file -> its header.
        label: what to call the model in an error.
        name_of: what to call a file in an error.

    Returns:
        tensor name -> what the header says, and -> the file.

    Raises:
        CheckpointError: a tensor is in two files, or there is none.
    """
    tensors: dict[str, TensorInfo] = {}
    file_of: dict[str, File] = {}
    for file, header in headers.items():
        for name, info in header.tensors.items():
            if name in file_of:
                raise CheckpointError(
                    f"{label}: tensor {show(name)} is in two files, {name_of(file_of[name])} and "
                    f"{name_of(file)}"
                )
            tensors[name], file_of[name] = info, file
    if not tensors:
        raise CheckpointError(f"{label}: the weight files hold no tensors")
    return tensors, file_of


def show(name: Any) -> str:
    """A name from a file in printable form: no control characters, at most 200 characters."""
    text = name if isinstance(name, str) else repr(name)
    if not text.isprintable():
        text = ascii(text)
    return text if len(text) <= 200 else text[:197] + "..."


def _check_tensor(name: str, info: Any, label: str) -> TensorInfo:
    where = f"{label}: tensor {show(name)}"
    if not isinstance(info, dict) or set(info) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where}: the entry is not dtype, shape and data_offsets")
    dtype, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise CheckpointError(f"{where}: unknown data type {show(dtype)}")
    if not _is_sizes(shape):
        raise CheckpointError(f"{where}: shape {show(repr(shape))} is not a list of sizes")
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where}: data_offsets {show(repr(offsets))} are not a range")
    try:
        needed = tensor_bytes(dtype, shape)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error.message}") from None
    if offsets[1] - offsets[0] != needed:
        raise CheckpointError(
            f"{where}: {dtype} {show(repr(shape))} takes {needed} bytes, the file gives it "
            f"{offsets[1] - offsets[0]}"
        )
    return TensorInfo(dtype, tuple(shape), offsets[0], offsets[1])


def _check_layout(ordered: dict[str, TensorInfo], data_bytes: int, label: str) -> None:
    """Tensors (sorted by offset) must cover the data from its first byte to its last."""
    end, last = 0, "the header"
    for name, info in ordered.items():
        if info.start < end:
            raise CheckpointError(f"{label}: tensor {show(name)} overlaps {show(last)}")
        if info.start > end:
            raise CheckpointError(
                f"{label}: {info.start - end} bytes before tensor {show(name)} belong to nothing"
            )
        if info.end > data_bytes:
            raise CheckpointError(
                f"{label}: truncated, tensor {show(name)} ends at byte {info.end} of the data and "
                f"the file has {data_bytes}"
            )
        end, last = info.end, name
    if end != data_bytes:
        raise CheckpointError(f"{label}: {data_bytes - end} bytes at the end belong to nothing")


class _DuplicateKeyError(Exception):
    def __init__(self, key: str):
        self.key = key


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise _DuplicateKeyError(key)
        values[key] = value
    return values


def _is_sizes(values: Any) -> bool:
    return (
        isinstance(values, list)
        and len(values) <= MAX_RANK
        and all(isinstance(n, int) and not isinstance(n, bool) for n in values)
        and all(0 <= n < MAX_SIZE for n in values)
    )


def _product(sizes: Iterable[int]) -> int:
    n = 1
    for size in sizes:
        n *= size
    return n

"""Writing a model folder so that it either is there, whole, or is not there at all.

Everything goes into a hidden sibling of the target, ``.<name>.partial-<pid>``. The index and then
config.json come last, all files are forced to disk, and one rename makes the folder appear under
its name. An error, Ctrl-C included, removes the sibling; after ``kill -9`` it stays behind, without
a config.json, and the next conversion to the same place removes it. A target that exists is
refused, or, with ``overwrite``, moved aside and deleted only when the new folder is in its place.

All tensors are declared before the first is written. So shards, headers and offsets are known in
advance, every tensor goes straight to its place, and no more than one is held in memory. Inside a
shard, types with larger elements come first, so that each tensor lies at a multiple of its element
size, as readers that map the file into memory require.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np

from ..errors import QuantizationError
from .config import dump_json
from .headers import DTYPE_BITS, LENGTH_BYTES, tensor_bytes
from .source import CONFIG_FILE, INDEX_FILE
from .target import (
    NO_SPACE,
    check_space,
    check_target,
    make_partial,
    move_into_place,
    os_errors,
    output_error,
    remove_partial,
)

__all__ = ["MAX_SHARD_BYTES", "FolderWriter", "check_space", "check_target", "write_bytes"]

MAX_SHARD_BYTES = 5 * 2**30
METADATA = {"format": "mlx"}
_COPY_BYTES = 16 * 2**20
# numpy has no bfloat16; such tensors arrive as their 16-bit patterns, 8-bit floats as bytes.
_NUMPY_TYPES = {
    "BOOL": "?",
    "U8": "u1",
    "I8": "i1",
    "U16": "u2",
    "I16": "i2",
    "F16": "f2",
    "BF16": "u2",
    "U32": "u4",
    "I32": "i4",
    "F32": "f4",
    "U64": "u8",
    "I64": "i8",
    "F64": "f8",
    "C64": "c8",
}


# Bits of the exponent, which are all set in a value that is infinite or no number.
_EXPONENTS = {
    "F16": ("u2", 0x7C00),
    "BF16": ("u2", 0x7F80),
    "F32": ("u4", 0x7F80_0000),
    "F64": ("u8", 0x7FF0_0000_0000_0000),
}
_CHECK_BYTES = 2**20


def write_bytes(file: BinaryIO, data: memoryview) -> None:
    """Write all of ``data``. Every byte of a folder passes here: tests replace it to fail."""
    while len(data):
        data = data[file.write(data) :]


@dataclass
class _Tensor:
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: str | None
    start: int = 0
    written: int = 0
    done: bool = False


@dataclass
class _File:
    """A safetensors file in the making: open from its first byte until its last tensor is in."""

    name: str
    tensors: dict[str, _Tensor]
    missing: int = 0
    handle: BinaryIO | None = None
    header: bytes = field(default=b"", repr=False)

    def lay_out(self) -> None:
        order = sorted(self.tensors, key=lambda name: -DTYPE_BITS[self.tensors[name].dtype])
        entries: dict[str, Any] = {"__metadata__": METADATA}
        end = 0
        for name in order:
            tensor = self.tensors[name]
            entries[name] = {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "data_offsets": [end, end + tensor.nbytes],
            }
            tensor.start = end
            end += tensor.nbytes
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.header = struct.pack("<Q", len(text)) + text
        assert len(self.header) == LENGTH_BYTES + len(text)
        for tensor in self.tensors.values():
            tensor.start += len(self.header)
        self.missing = len(self.tensors)

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors.values())


class FolderWriter:
    """Writes one model folder; a context manager.

    Example:
        with FolderWriter(target) as writer:
            writer.declare("model.norm.weight", "F16", (64,))
            writer.add("model.norm.weight", array)
            writer.add_copy(source / "tokenizer.json")
            writer.commit(config)

    Leaving the block without ``commit`` removes what was written.

    Args:
        target: the folder to make. Its parent must exist.
        overwrite: replace a model folder that is there. Nothing else is ever replaced.
        max_shard_bytes: a weight file takes no further tensor that would make its data longer.

    Raises:
        OutputError: the target exists, or cannot be made where it is asked for.
    """

    def __init__(
        self,
        target: str | Path,
        *,
        overwrite: bool = False,
        max_shard_bytes: int = MAX_SHARD_BYTES,
    ):
        self.target = Path(target)
        self.max_shard_bytes = max_shard_bytes
        self._overwrite = overwrite
        self._tensors: dict[str, _Tensor] = {}
        self._files: dict[str, _File] = {}
        self._file_of: dict[str, _File] = {}
        self._others: set[str] = set()
        self._planned = self._committed = False
        # The folder to write into, for libraries that save their own files (tokenizers).
        self.path = make_partial(self.target, overwrite=overwrite)

    # -- tensors --------------------------------------------------------------------------------

    def declare(
        self, name: str, dtype: str, shape: tuple[int, ...], file: str | None = None
    ) -> None:
        """Announce a tensor. All are announced before the first is written.

        Args:
            name: its name in the file.
            dtype: safetensors type name ("U32", "BF16", ...).
            shape: sizes of its axes.
            file: a safetensors file of its own, outside of the index ("mtp.safetensors"); None
                puts the tensor in the model's shards.

        Raises:
            ValueError: the name is taken, or writing has begun.
        """
        if self._planned:
            raise ValueError(f"{name} is declared after the first tensor was written")
        if name in self._tensors:
            raise ValueError(f"{name} is declared twice")
        if file is not None:
            _check_name(file)
        shape = tuple(int(n) for n in shape)
        self._tensors[name] = _Tensor(dtype, shape, tensor_bytes(dtype, shape), file)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors declared so far."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def check_space(self, required_bytes: int | None = None) -> None:
        """Make sure that the disk has room for the declared tensors, or for ``required_bytes``.

        Raises:
            OutputError: it has not.
        """
        check_space(self.path, self.tensor_bytes if required_bytes is None else required_bytes)

    def add(self, name: str, data: Any) -> None:
        """Write one tensor.

        Args:
            name: a declared name. Writing in the order of declaration keeps one file open.
            data: a numpy array, or anything contiguous that offers the buffer protocol (an
                evaluated MLX array does). BF16 may come as its 16-bit patterns.

        Raises:
            QuantizationError: a value is infinite or no number; a model with such a value answers
                nonsense at best.
            OutputError: the disk is full, or cannot be written.
            ValueError: the tensor was not declared, was written already, or has another type,
                shape or size than was declared.
        """
        tensor = self._declared(name)
        shape = getattr(data, "shape", None)
        if shape is not None and not isinstance(data, memoryview) and tuple(shape) != tensor.shape:
            raise ValueError(f"{name} has shape {tuple(shape)}, {tensor.shape} was declared")
        if isinstance(data, np.ndarray):
            expected = np.dtype(_NUMPY_TYPES.get(tensor.dtype, "u1"))
            if data.dtype != expected:
                raise ValueError(f"{name} is {data.dtype}, {tensor.dtype} was declared")
        raw = _raw(name, data)
        if tensor.written:
            raise ValueError(f"{name} is written twice")
        if len(raw) != tensor.nbytes:
            raise ValueError(f"{name} has {len(raw)} bytes, {tensor.nbytes} were declared")
        self._write(name, tensor, raw)

    def add_part(self, name: str, data: Any) -> None:
        """Write the next part of a tensor: consecutive rows, or experts, of one too large to hold.

        Args and errors as for ``add``; the parts must make up the declared size in the end.
        """
        tensor = self._declared(name)
        raw = _raw(name, data)
        if tensor.written + len(raw) > tensor.nbytes:
            raise ValueError(f"{name} is longer than the {tensor.nbytes} bytes declared")
        self._write(name, tensor, raw)

    def _declared(self, name: str) -> _Tensor:
        if name not in self._tensors:
            raise ValueError(f"{name} was not declared")
        if not self._planned:
            self._plan()
        return self._tensors[name]

    def _plan(self) -> None:
        """Spread the declared tensors over files, in their order."""
        self._planned = True
        shards: list[dict[str, _Tensor]] = []
        size = 0
        for name, tensor in self._tensors.items():
            if tensor.file is not None:
                side = self._files.setdefault(tensor.file, _File(tensor.file, {}))
                side.tensors[name] = tensor
                continue
            if not shards or (shards[-1] and size + tensor.nbytes > self.max_shard_bytes):
                shards.append({})
                size = 0
            shards[-1][name] = tensor
            size += tensor.nbytes
        for number, tensors in enumerate(shards, 1):
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            file = "model.safetensors" if len(shards) == 1 else file
            self._files[file] = _File(file, tensors)
        for planned in self._files.values():
            planned.lay_out()
            self._file_of.update(dict.fromkeys(planned.tensors, planned))
        self.check_space(sum(planned.nbytes for planned in self._files.values()))

    def _write(self, name: str, tensor: _Tensor, raw: memoryview) -> None:
        if tensor.done:
            raise ValueError(f"{name} is written twice")
        _check_finite(name, tensor.dtype, raw)
        file = self._file_of[name]
        with os_errors(f"{self.target} cannot be written", file.name):
            if file.handle is None:
                file.handle = open(self.path / file.name, "xb", buffering=0)  # noqa: SIM115
                write_bytes(file.handle, memoryview(file.header))
            file.handle.seek(tensor.start + tensor.written)
            write_bytes(file.handle, raw)
            tensor.written += len(raw)
            if tensor.written == tensor.nbytes:
                tensor.done = True
                file.missing -= 1
            if file.missing == 0:
                _finish(file.handle)

    # -- other files ----------------------------------------------------------------------------

    def add_bytes(self, filename: str, data: bytes | str) -> None:
        """Write a small file beside the weights.

        Raises:
            OutputError: the disk is full, or cannot be written.
            ValueError: the name is taken, or leads out of the folder.
        """
        with self._other(filename) as file:
            write_bytes(file, memoryview(data.encode() if isinstance(data, str) else data))

    def add_copy(self, source: str | Path, filename: str | None = None) -> None:
        """Copy a file (a link is followed) into the folder, under its own name or another.

        Raises:
            OutputError: the source cannot be read, or the copy not written.
            ValueError: the name is taken, or leads out of the folder.
        """
        source = Path(source)
        with os_errors(f"{source} cannot be read"):
            original = source.open("rb")
        with original, self._other(filename or source.name) as file:
            while True:
                with os_errors(f"{source} cannot be read"):
                    piece = original.read(_COPY_BYTES)
                if not piece:
                    break
                write_bytes(file, memoryview(piece))

    @contextmanager
    def _other(self, filename: str) -> Iterator[BinaryIO]:
        _check_name(filename)
        if filename in self._others or filename in (CONFIG_FILE, INDEX_FILE):
            raise ValueError(f"{filename} is written twice")
        self._others.add(filename)
        with (
            os_errors(f"{self.target} cannot be written", filename),
            open(self.path / filename, "xb", buffering=0) as file,
        ):
            yield file
            os.fsync(file.fileno())

    # -- the end --------------------------------------------------------------------------------

    def commit(self, config: dict[str, Any], *, total_parameters: int | None = None) -> None:
        """Write index and config.json, and let the folder appear under its name.

        Args:
            config: the content of config.json.
            total_parameters: weights that the model represents, for the index.

        Raises:
            OutputError: the disk is full, or the folder cannot be moved into place.
            ValueError: a declared tensor was not written, or not to its end.
        """
        if not self._planned:
            self._plan()
        self._check_complete()
        shards = {
            name: file.name
            for name, file in self._file_of.items()
            if self._tensors[name].file is None
        }
        metadata: dict[str, Any] = {
            "total_size": sum(self._tensors[name].nbytes for name in shards)
        }
        if total_parameters is not None:
            metadata["total_parameters"] = total_parameters
        index = {"metadata": metadata, "weight_map": dict(sorted(shards.items()))}
        for filename, values in ((INDEX_FILE, index), (CONFIG_FILE, config)):
            with (
                os_errors(f"{self.target} cannot be written", filename),
                open(self.path / filename, "xb", buffering=0) as file,
            ):
                write_bytes(file, memoryview(dump_json(values).encode()))
                os.fsync(file.fileno())
        move_into_place(self.path, self.target, overwrite=self._overwrite)
        self._committed = True

    def _check_complete(self) -> None:
        for name, tensor in self._tensors.items():
            if not tensor.done:
                raise ValueError(
                    f"{name} has {tensor.written} of its {tensor.nbytes} bytes at the end"
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._committed:
            return
        for file in self._files.values():
            if file.handle is not None:
                file.handle.close()
        remove_partial(self.path)
        # Others write into the folder too (tokenizers save themselves).
        if isinstance(error, OSError) and error.errno in NO_SPACE:
            raise output_error(f"{self.target} cannot be written", None, error) from error


def _raw(name: str, data: Any) -> memoryview:
    """The bytes of an array, without a copy where it is contiguous."""
    if isinstance(data, np.ndarray):
        return np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
    view = memoryview(data)
    if not view.c_contiguous:
        raise ValueError(f"the data of {name} is not contiguous")
    # frombuffer takes any element type; memoryview.cast knows no bfloat16.
    return np.frombuffer(view, np.uint8).data if view.nbytes else memoryview(b"")


def _check_finite(name: str, dtype: str, raw: memoryview) -> None:
    """Refuse floating-point values that are not finite, in pieces that stay in the cache."""
    if dtype not in _EXPONENTS:
        return
    kind, exponent = _EXPONENTS[dtype]
    patterns = np.frombuffer(raw, kind, count=len(raw) // np.dtype(kind).itemsize)
    step = _CHECK_BYTES // patterns.itemsize
    for start in range(0, patterns.size, step):
        piece = patterns[start : start + step]
        if ((piece & exponent) == exponent).any():
            raise QuantizationError(
                f"tensor {name} has values that are not finite",
                hint="the source is damaged, or --dtype cannot hold its values",
            )


def _check_name(filename: str) -> None:
    plain = filename == Path(filename).name and "\\" not in filename
    if not filename or not plain or filename.startswith("."):
        raise ValueError(f"{filename!r} is not a file name")


def _finish(handle: BinaryIO) -> None:
    os.fsync(handle.fileno())
    handle.close()

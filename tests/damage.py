"""Ways to damage a model folder, for tests of what is refused.

Safetensors files are taken apart and put together byte by byte, so that a file can be wrong in
ways in which no library would write it.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
Damage = Callable[[Path], None]


def split_file(file: Path) -> tuple[dict[str, Any], bytes]:
    """Header and data of a safetensors file."""
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def join_file(file: Path, header: dict[str, Any], data: bytes) -> None:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def file_with(folder: Path, tensor: str) -> Path:
    """The weight file that holds a tensor."""
    return next(f for f in sorted(folder.glob("*.safetensors")) if tensor in split_file(f)[0])


def change_header(tensor: str, **changes: Any) -> Damage:
    """Overwrite fields of one tensor's entry; the data stays."""

    def damage(folder: Path) -> None:
        file = file_with(folder, tensor)
        header, data = split_file(file)
        header[tensor].update(changes)
        join_file(file, header, data)

    return damage


def change_tensors(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite a file after ``change`` has had its tensors as [dtype, shape, bytes] by name."""
    header, data = split_file(file)
    metadata = header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        tensors[name] = [entry["dtype"], entry["shape"], data[start:end]]
    change(tensors)
    header = {} if metadata is None else {"__metadata__": metadata}
    parts, end = [], 0
    for name, (dtype, shape, raw) in tensors.items():
        offsets = [end, end + len(raw)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        parts.append(raw)
        end += len(raw)
    join_file(file, header, b"".join(parts))


def remove_tensor(tensor: str) -> Damage:
    """Take a tensor out of its file, and out of the index where there is one."""

    def damage(folder: Path) -> None:
        change_tensors(file_with(folder, tensor), lambda tensors: tensors.pop(tensor))
        if (folder / INDEX).exists():
            change_json(INDEX, lambda index: index["weight_map"].pop(tensor))(folder)

    return damage


def add_tensor(tensor: str, like: str) -> Damage:
    """A copy of another tensor under a new name, beside it."""

    def damage(folder: Path) -> None:
        file = file_with(folder, like)
        change_tensors(file, lambda tensors: tensors.update({tensor: tensors[like]}))
        if (folder / INDEX).exists():
            change_json(INDEX, lambda index: index["weight_map"].update({tensor: file.name}))(
                folder
            )

    return damage


def drop_row(tensor: str, axis: int = 0) -> Damage:
    """Make a tensor one row (or, in a stack, one row of each matrix) shorter."""

    def damage(folder: Path) -> None:
        def shorten(tensors: dict[str, Any]) -> None:
            dtype, shape, raw = tensors[tensor]
            blocks = 1
            for size in shape[:axis]:
                blocks *= size
            size = len(raw) // blocks
            kept = size - size // shape[axis]
            raw = b"".join(raw[i * size : i * size + kept] for i in range(blocks))
            tensors[tensor] = [dtype, [*shape[:axis], shape[axis] - 1, *shape[axis + 1 :]], raw]

        change_tensors(file_with(folder, tensor), shorten)

    return damage


def overwrite_values(tensor: str, pattern: bytes, start: int = 0) -> Damage:
    """Put ``pattern`` over a tensor's bytes from ``start`` on."""

    def damage(folder: Path) -> None:
        def patch(tensors: dict[str, Any]) -> None:
            raw = tensors[tensor][2]
            tensors[tensor][2] = raw[:start] + pattern + raw[start + len(pattern) :]

        change_tensors(file_with(folder, tensor), patch)

    return damage


def change_json(name: str, change: Callable[[dict[str, Any]], Any]) -> Damage:
    """Rewrite a JSON file of the folder after ``change`` has had its content."""

    def damage(folder: Path) -> None:
        file = folder / name
        content = json.loads(file.read_text())
        change(content)
        file.write_text(json.dumps(content))

    return damage


def set_key(*path: str, to: Any) -> Damage:
    """Set a key of config.json, nested ones too."""

    def change(config: dict[str, Any]) -> None:
        for key in path[:-1]:
            config = config[key]
        config[path[-1]] = to

    return change_json("config.json", change)


def remove_key(*path: str) -> Damage:
    """Take a key out of config.json."""

    def change(config: dict[str, Any]) -> None:
        for key in path[:-1]:
            config = config[key]
        del config[path[-1]]

    return change_json("config.json", change)


def in_index(tensor: str, file: str | None) -> Damage:
    """Let the index say that a tensor is in another file, or say nothing of it."""

    def change(index: dict[str, Any]) -> None:
        del index["weight_map"][tensor]
        if file is not None:
            index["weight_map"][tensor] = file

    return change_json(INDEX, change)


def remove(*patterns: str) -> Damage:
    """Delete files."""

    def damage(folder: Path) -> None:
        files = [file for pattern in patterns for file in folder.glob(pattern)]
        assert files
        for file in files:
            file.unlink()

    return damage


def replace(name: str, content: bytes | str) -> Damage:
    """Give a file another content."""

    def damage(folder: Path) -> None:
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return damage


def cut(name: str, keep: int) -> Damage:
    """Keep the first bytes of a file; negative: cut so many off its end."""

    def damage(folder: Path) -> None:
        file = folder / name
        file.write_bytes(file.read_bytes()[:keep])

    return damage


def pipe(name: str) -> Damage:
    """Put a named pipe, to which nobody writes, in place of a file."""

    def damage(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return damage


def retype(tensor: str, dtype: str, size: int) -> Damage:
    """Give a tensor another type, of ``size`` bytes, with zeros for values."""

    def damage(folder: Path) -> None:
        def change(tensors: dict[str, Any]) -> None:
            _, shape, _ = tensors[tensor]
            tensors[tensor] = [dtype, shape, bytes(size * math.prod(shape))]

        change_tensors(file_with(folder, tensor), change)

    return damage

"""Safetensors headers: what is read, and that nothing damaged or hostile is believed."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from turboquant_mlx.checkpoint.headers import (
    MAX_HEADER_BYTES,
    header_length,
    parse_header,
    read_header,
    tensor_bytes,
)
from turboquant_mlx.errors import CheckpointError

TENSORS = {
    "a": {"dtype": "F16", "shape": [2, 3], "data_offsets": [0, 12]},
    "b": {"dtype": "U32", "shape": [4], "data_offsets": [12, 28]},
}


def write(path: Path, header: Any, data: bytes = bytes(28)) -> Path:
    """A safetensors file with any header; text is taken as it is."""
    text = header if isinstance(header, str) else json.dumps(header)
    raw = text.encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    message = caught.value.message
    assert str(path) in message
    assert "\n" not in message and not message.endswith(".")
    return message


# --- reading ------------------------------------------------------------------------------------


def test_places_are_counted_from_the_start_of_the_data(tmp_path):
    arrays = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "y": np.array(7, dtype=np.int64)}
    path = tmp_path / "model.safetensors"
    save_file(arrays, path, metadata={"format": "pt"})
    header = read_header(path)
    assert header.metadata == {"format": "pt"}
    assert header.file_bytes == path.stat().st_size
    raw = path.read_bytes()[header.data_offset :]
    for name, array in arrays.items():
        info = header.tensors[name]
        assert info.shape == array.shape and info.nbytes == array.nbytes and info.size == array.size
        assert raw[info.start : info.end] == array.tobytes()


def test_tensors_come_in_the_order_of_the_data(tmp_path):
    header = read_header(write(tmp_path / "m", {"b": TENSORS["b"], "a": TENSORS["a"]}))
    assert list(header.tensors) == ["a", "b"]


def test_a_file_without_tensors_and_tensors_without_elements_are_fine(tmp_path):
    assert read_header(write(tmp_path / "m", {}, b"")).tensors == {}
    empty = {"dtype": "F32", "shape": [0, 4], "data_offsets": [0, 0]}
    header = read_header(write(tmp_path / "m", {"empty": empty, **TENSORS}))
    assert header.tensors["empty"].nbytes == 0


def test_padding_behind_the_json_belongs_to_the_header(tmp_path):
    assert read_header(write(tmp_path / "m", json.dumps(TENSORS) + "   ")).tensors["b"].size == 4


def test_a_remote_header_is_checked_without_a_file():
    raw = json.dumps(TENSORS).encode()
    size = 8 + len(raw) + 28
    assert header_length(struct.pack("<Q", len(raw)), size, "owner/name") == len(raw)
    assert parse_header(raw, size, "owner/name").data_offset == 8 + len(raw)
    with pytest.raises(CheckpointError, match="owner/name"):
        parse_header(raw, size - 1, "owner/name")


@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes"),
    [
        ("BF16", (3, 5), 30),
        ("F4", (2, 3), 3),
        ("F6_E2M3", (4,), 3),
        ("U8", (), 1),
        ("F64", (0,), 0),
    ],
)
def test_bytes_of_a_tensor(dtype, shape, nbytes):
    assert tensor_bytes(dtype, shape) == nbytes


# --- damage -------------------------------------------------------------------------------------


def test_absent_file_and_folder(tmp_path):
    assert "does not exist" in refused(tmp_path / "absent")
    assert "is not a file" in refused(tmp_path)


@pytest.mark.parametrize("size", [0, 1, 7])
def test_file_shorter_than_a_length(tmp_path, size):
    (tmp_path / "m").write_bytes(bytes(size))
    assert "truncated" in refused(tmp_path / "m")


def test_every_truncation_is_noticed(tmp_path):
    whole = write(tmp_path / "whole", TENSORS).read_bytes()
    path = tmp_path / "m"
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        refused(path)


def test_truncated_data_names_the_tensor(tmp_path):
    path = write(tmp_path / "m", TENSORS, bytes(27))
    message = refused(path)
    assert "truncated" in message and "tensor b" in message


@pytest.mark.parametrize("length", [MAX_HEADER_BYTES + 1, 1 << 40, (1 << 64) - 1])
def test_absurd_header_length(tmp_path, length):
    (tmp_path / "m").write_bytes(struct.pack("<Q", length) + bytes(100))
    assert "not a safetensors file" in refused(tmp_path / "m")


def test_header_longer_than_the_file(tmp_path):
    (tmp_path / "m").write_bytes(struct.pack("<Q", 1000) + b"{}")
    assert "truncated" in refused(tmp_path / "m")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "garbage",
        "{",
        '{"a": }',
        "[" * 100_000,
        '{"a":' * 50_000,
        '{"a": ' + "9" * 5000 + "}",
    ],
)
def test_header_that_is_not_json(tmp_path, text):
    assert "not JSON" in refused(write(tmp_path / "m", text))


def test_header_in_no_known_encoding(tmp_path):
    (tmp_path / "m").write_bytes(struct.pack("<Q", 4) + b"\xff\xfe\xfa\xfb")
    assert "not JSON" in refused(tmp_path / "m")


@pytest.mark.parametrize("text", ["[]", "3", "null", '"x"'])
def test_header_that_is_no_object(tmp_path, text):
    assert "not a JSON object" in refused(write(tmp_path / "m", text, b""))


def test_name_given_twice(tmp_path):
    entry = json.dumps(TENSORS["a"])
    message = refused(write(tmp_path / "m", f'{{"a": {entry}, "a": {entry}}}', bytes(12)))
    assert "names a twice" in message


@pytest.mark.parametrize("metadata", [[], "x", {"a": 1}, {"a": None}])
def test_metadata_that_is_no_object_of_texts(tmp_path, metadata):
    header = {"__metadata__": metadata or [1], **TENSORS}
    assert "__metadata__" in refused(write(tmp_path / "m", header))


@pytest.mark.parametrize(
    "entry",
    [
        None,
        [],
        {},
        {"dtype": "F16", "shape": [2, 3]},
        {"dtype": "F16", "shape": [2, 3], "data_offsets": [0, 12], "more": 1},
    ],
)
def test_entry_of_the_wrong_form(tmp_path, entry):
    assert "tensor a" in refused(write(tmp_path / "m", {"a": entry}, bytes(12)))


@pytest.mark.parametrize("dtype", ["F15", "f16", "", None, 16, ["F16"]])
def test_unknown_type(tmp_path, dtype):
    entry = {**TENSORS["a"], "dtype": dtype}
    message = refused(write(tmp_path / "m", {"a": entry}, bytes(12)))
    assert "tensor a" in message and "data type" in message


@pytest.mark.parametrize(
    "shape",
    [[-2, -3], [2.0, 3], ["2", 3], [True, 6], "23", None, 6, [2, [3]], [1] * 1000, [1 << 70]],
)
def test_impossible_shape(tmp_path, shape):
    entry = {**TENSORS["a"], "shape": shape}
    message = refused(write(tmp_path / "m", {"a": entry}, bytes(12)))
    assert "tensor a" in message and "shape" in message and len(message) < 1000


@pytest.mark.parametrize(
    "offsets", [[12, 0], [-12, 0], [0], [0, 12, 24], [0.0, 12], "0", None, [0, None], [0, 1 << 70]]
)
def test_impossible_offsets(tmp_path, offsets):
    entry = {**TENSORS["a"], "data_offsets": offsets}
    message = refused(write(tmp_path / "m", {"a": entry}, bytes(12)))
    assert "tensor a" in message and "data_offsets" in message


def test_size_that_does_not_fit_type_and_shape(tmp_path):
    entry = {**TENSORS["a"], "data_offsets": [0, 13]}
    message = refused(write(tmp_path / "m", {"a": entry}, bytes(13)))
    assert "tensor a" in message and "12 bytes" in message and "13" in message


def test_product_of_a_shape_that_would_overflow_64_bits(tmp_path):
    entry = {"dtype": "F32", "shape": [1 << 32, 1 << 32], "data_offsets": [0, 0]}
    assert "tensor a" in refused(write(tmp_path / "m", {"a": entry}, b""))


def test_half_bytes_that_do_not_fill_a_byte(tmp_path):
    entry = {"dtype": "F4", "shape": [3], "data_offsets": [0, 1]}
    assert "whole bytes" in refused(write(tmp_path / "m", {"a": entry}, b"\0"))


def test_overlapping_tensors(tmp_path):
    header = {"a": TENSORS["a"], "b": {**TENSORS["b"], "data_offsets": [8, 24]}}
    message = refused(write(tmp_path / "m", header, bytes(24)))
    assert "tensor b overlaps a" in message


def test_two_names_for_the_same_bytes(tmp_path):
    header = {"a": TENSORS["a"], "b": TENSORS["a"]}
    assert "overlaps" in refused(write(tmp_path / "m", header, bytes(12)))


def test_hole_between_tensors(tmp_path):
    header = {"a": TENSORS["a"], "b": {**TENSORS["b"], "data_offsets": [16, 32]}}
    assert "4 bytes before tensor b" in refused(write(tmp_path / "m", header, bytes(32)))


def test_bytes_behind_the_last_tensor(tmp_path):
    assert "3 bytes at the end" in refused(write(tmp_path / "m", TENSORS, bytes(31)))


def test_names_are_shown_without_control_characters(tmp_path):
    name = "a\x1b[31m\n" + "x" * 500
    message = refused(write(tmp_path / "m", {name: {}}, b""))
    assert "\x1b" not in message and len(message) < 400 + len(str(tmp_path))


def test_random_damage_is_an_error_or_harmless_and_never_a_crash(tmp_path):
    """A few hundred broken headers, each from a seed of its own."""
    whole = write(tmp_path / "whole", TENSORS).read_bytes()
    path = tmp_path / "m"
    for seed in range(400):
        rng = np.random.default_rng(seed)
        raw = bytearray(whole)
        for _ in range(rng.integers(1, 4)):
            raw[rng.integers(len(raw))] = rng.integers(256)
        path.write_bytes(raw)
        try:
            header = read_header(path)
        except CheckpointError:
            continue
        assert all(info.end <= header.file_bytes for info in header.tensors.values())

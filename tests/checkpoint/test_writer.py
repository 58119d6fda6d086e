"""Writing a model folder: whole or not at all, whatever happens on the way."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import load_file

from turboquant_mlx.checkpoint import target as target_module
from turboquant_mlx.checkpoint import writer as writer_module
from turboquant_mlx.checkpoint.headers import DTYPE_BITS, read_header
from turboquant_mlx.checkpoint.source import inspect_folder
from turboquant_mlx.checkpoint.writer import FolderWriter, check_space, check_target
from turboquant_mlx.errors import OutputError, QuantizationError

CONFIG = {"model_type": "llama", "hidden_size": 4}
ARRAYS = {
    "a": np.arange(5, dtype=np.uint8),
    "b": np.arange(6, dtype=np.float32).reshape(2, 3),
    "c": np.arange(3, dtype=np.float16),
    "d": np.arange(8, dtype=np.uint32).reshape(2, 2, 2),
}
TYPES = {"uint8": "U8", "float32": "F32", "float16": "F16", "uint32": "U32"}


def declare_all(writer: FolderWriter) -> None:
    for name, array in ARRAYS.items():
        writer.declare(name, TYPES[str(array.dtype)], array.shape)


def write_model(path: Path, config=CONFIG, **options) -> None:
    with FolderWriter(path, **options) as writer:
        declare_all(writer)
        for name, array in ARRAYS.items():
            writer.add(name, array)
        writer.add_bytes("tokenizer.json", "{}")
        writer.commit(config)


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


def nothing_else(folder: Path, *names: str) -> None:
    """Only these names are in a folder, hidden ones counted."""
    assert sorted(file.name for file in folder.iterdir()) == sorted(names)


# --- what is written ----------------------------------------------------------------------------


def test_a_small_model_is_one_file_with_an_index(tmp_path):
    write_model(tmp_path / "m")
    nothing_else(tmp_path, "m")
    nothing_else(
        tmp_path / "m",
        "config.json",
        "model.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    )
    assert json.loads((tmp_path / "m" / "config.json").read_text()) == CONFIG
    folder = inspect_folder(tmp_path / "m")
    assert set(folder.tensors) == set(ARRAYS)
    assert read_header(folder.weight_files[0]).metadata == {"format": "mlx"}


def test_other_libraries_read_the_tensors(tmp_path):
    write_model(tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    theirs = load_file(file)
    for name, value in mx.load(str(file)).items():
        assert np.array_equal(np.array(value), ARRAYS[name])
        assert np.array_equal(theirs[name], ARRAYS[name])
        assert theirs[name].dtype == ARRAYS[name].dtype and theirs[name].shape == value.shape


def test_every_tensor_lies_at_a_multiple_of_its_element_size(tmp_path):
    write_model(tmp_path / "m")
    header = read_header(tmp_path / "m" / "model.safetensors")
    for info in header.tensors.values():
        assert (header.data_offset + info.start) % (DTYPE_BITS[info.dtype] // 8) == 0


def test_shards_are_filled_in_the_order_of_declaration(tmp_path):
    write_model(tmp_path / "m", max_shard_bytes=30)
    folder = inspect_folder(tmp_path / "m")
    shards = {name: file.name for name, file in folder.file_of.items()}
    assert shards == {
        "a": "model-00001-of-00003.safetensors",  # 5 bytes, and b has 24
        "b": "model-00001-of-00003.safetensors",
        "c": "model-00002-of-00003.safetensors",  # 6 bytes, and d has 32
        "d": "model-00003-of-00003.safetensors",  # larger than a shard may be: alone
    }
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == shards
    assert index["metadata"] == {"total_size": 67}


def test_the_index_holds_the_number_of_parameters(tmp_path):
    with FolderWriter(tmp_path / "m") as writer:
        writer.declare("a", "U8", (5,))
        writer.add("a", ARRAYS["a"])
        writer.commit(CONFIG, total_parameters=40)
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 5, "total_parameters": 40}


def test_the_same_input_gives_the_same_bytes(tmp_path):
    write_model(tmp_path / "one", max_shard_bytes=30)
    write_model(tmp_path / "two", max_shard_bytes=30)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_arrays_of_mlx_and_bfloat16(tmp_path):
    value = mx.array([[1.5, -2.0], [0.25, 1e30]], dtype=mx.bfloat16)
    with FolderWriter(tmp_path / "m") as writer:
        writer.declare("x", "BF16", (2, 2))
        writer.declare("patterns", "BF16", (2, 2))
        writer.declare("scalar", "F32", ())
        writer.declare("empty", "F16", (0, 3))
        writer.add("x", value)
        writer.add("patterns", np.array(value.view(mx.uint16)))
        writer.add("scalar", np.array(3.0, dtype=np.float32))
        writer.add("empty", mx.zeros((0, 3), dtype=mx.float16))
        writer.commit(CONFIG)
    read = mx.load(str(tmp_path / "m" / "model.safetensors"))
    assert mx.array_equal(read["x"], value) and mx.array_equal(read["patterns"], value)
    assert read["scalar"].item() == 3.0 and read["empty"].shape == (0, 3)


def test_arrays_that_are_not_contiguous(tmp_path):
    array = np.arange(12, dtype=np.uint32).reshape(3, 4)
    with FolderWriter(tmp_path / "m") as writer:
        writer.declare("x", "U32", (4, 3))
        writer.add("x", array.T)
        writer.commit(CONFIG)
    assert np.array_equal(load_file(tmp_path / "m" / "model.safetensors")["x"], array.T)


def test_a_tensor_in_parts_and_tensors_in_another_order(tmp_path):
    with FolderWriter(tmp_path / "m", max_shard_bytes=30) as writer:
        declare_all(writer)
        for name in reversed(ARRAYS):
            for part in ARRAYS[name]:
                writer.add_part(name, np.atleast_1d(part))
        writer.commit(CONFIG)
    write_model(tmp_path / "whole", max_shard_bytes=30)
    (tmp_path / "whole" / "tokenizer.json").unlink()
    assert contents(tmp_path / "m") == contents(tmp_path / "whole")


def test_a_file_beside_the_model_is_not_in_the_index(tmp_path):
    with FolderWriter(tmp_path / "m") as writer:
        writer.declare("a", "U8", (5,))
        writer.declare("mtp.norm", "F16", (3,), file="mtp.safetensors")
        writer.add("a", ARRAYS["a"])
        writer.add("mtp.norm", ARRAYS["c"])
        writer.commit(CONFIG)
    assert set(inspect_folder(tmp_path / "m").tensors) == {"a"}
    assert np.array_equal(load_file(tmp_path / "m" / "mtp.safetensors")["mtp.norm"], ARRAYS["c"])


def test_copies_follow_links(tmp_path):
    (tmp_path / "blob").write_bytes(b"vocabulary" * 1000)
    (tmp_path / "tokenizer.model").symlink_to("blob")
    with FolderWriter(tmp_path / "m") as writer:
        writer.add_copy(tmp_path / "tokenizer.model")
        writer.add_copy(tmp_path / "tokenizer.model", "other.model")
        writer.commit(CONFIG)
    for name in ("tokenizer.model", "other.model"):
        copied = tmp_path / "m" / name
        assert copied.read_bytes() == b"vocabulary" * 1000 and not copied.is_symlink()


def test_the_folder_has_the_permissions_of_any_new_folder(tmp_path):
    write_model(tmp_path / "m")
    (tmp_path / "plain").mkdir()
    assert (tmp_path / "m").stat().st_mode == (tmp_path / "plain").stat().st_mode


# --- use that would write a wrong folder --------------------------------------------------------


def test_tensors_that_do_not_match_their_declaration(tmp_path):
    with FolderWriter(tmp_path / "m") as writer:
        declare_all(writer)
        for name, wrong in [
            ("b", ARRAYS["b"].T),
            ("b", ARRAYS["b"].view(np.uint32)),
            ("b", ARRAYS["b"][:1]),
            ("b", mx.zeros((3, 2))),
            ("b", bytes(23)),
            ("unknown", ARRAYS["b"]),
        ]:
            with pytest.raises(ValueError, match=name):
                writer.add(name, wrong)
        with pytest.raises(ValueError, match="longer"):
            writer.add_part("c", bytes(7))
        writer.add("b", ARRAYS["b"])
        with pytest.raises(ValueError, match="twice"):
            writer.add("b", ARRAYS["b"])
    nothing_else(tmp_path)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32", "F64"])
def test_values_that_are_not_finite(tmp_path, dtype, value):
    types = {"F16": "f2", "BF16": "f4", "F32": "f4", "F64": "f8"}
    largest = {"F16": 65504.0, "BF16": 3.38e38, "F32": 3.4e38, "F64": 1.79e308}[dtype]
    values = np.full(2_000_000, largest, dtype=types[dtype])

    def write(name: str) -> None:
        data = values.view("u2")[1::2] if dtype == "BF16" else values
        with FolderWriter(tmp_path / name) as writer:
            writer.declare("x", dtype, values.shape)
            writer.add("x", data)
            writer.commit(CONFIG)

    write("finite")
    values[-1] = value
    with pytest.raises(QuantizationError, match="tensor x has values that are not finite"):
        write("infinite")
    nothing_else(tmp_path, "finite")


def test_declarations_come_first_and_once(tmp_path):
    with FolderWriter(tmp_path / "m") as writer:
        writer.declare("a", "U8", (5,))
        with pytest.raises(ValueError, match="twice"):
            writer.declare("a", "U8", (5,))
        writer.add("a", ARRAYS["a"])
        with pytest.raises(ValueError, match="after the first"):
            writer.declare("b", "U8", (5,))


def test_incomplete_models_are_not_committed(tmp_path):
    for given in ([], ["a", "b", "c"]):
        with pytest.raises(ValueError, match="at the end"), FolderWriter(tmp_path / "m") as writer:
            declare_all(writer)
            for name in given:
                writer.add(name, ARRAYS[name])
            writer.commit(CONFIG)
        nothing_else(tmp_path)
    with pytest.raises(ValueError, match="3 of its 5"), FolderWriter(tmp_path / "m") as writer:
        writer.declare("a", "U8", (5,))
        writer.add_part("a", bytes(3))
        writer.commit(CONFIG)
    nothing_else(tmp_path)


@pytest.mark.parametrize("name", ["../x", "/x", "a/b", ".", "..", "", ".hidden", "a\\b"])
def test_file_names_stay_in_the_folder(tmp_path, name):
    with FolderWriter(tmp_path / "m") as writer:
        with pytest.raises(ValueError, match="file name"):
            writer.add_bytes(name, b"")
        with pytest.raises(ValueError, match="file name"):
            writer.declare("a", "U8", (5,), file=name or "..")
    nothing_else(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "tokenizer.json"])
def test_a_file_is_written_once(tmp_path, name):
    with FolderWriter(tmp_path / "m") as writer:
        writer.add_bytes("tokenizer.json", b"")
        with pytest.raises(ValueError, match="twice"):
            writer.add_bytes(name, b"")


# --- the target ---------------------------------------------------------------------------------


def refused(path: Path, **options) -> OutputError:
    with pytest.raises(OutputError) as caught:
        FolderWriter(path, **options)
    with pytest.raises(OutputError) as checked:
        check_target(path, **options)
    assert checked.value.message == caught.value.message
    assert str(path) in caught.value.message and not caught.value.message.endswith(".")
    return caught.value


def test_a_target_that_exists_is_refused(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "precious").write_text("x")
    error = refused(tmp_path / "m")
    assert "exists" in error.message and "--overwrite" in error.hint
    nothing_else(tmp_path, "m")
    assert contents(tmp_path / "m") == {"precious": b"x"}


def test_only_a_model_folder_is_overwritten(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "precious").write_text("x")
    assert "not a model folder" in refused(tmp_path / "home", overwrite=True).message
    (tmp_path / "file").write_text("x")
    assert "is a file" in refused(tmp_path / "file", overwrite=True).message
    (tmp_path / "empty").mkdir()
    write_model(tmp_path / "empty", overwrite=True)
    assert inspect_folder(tmp_path / "empty").config == CONFIG


def test_parent_that_is_absent_or_not_a_folder(tmp_path):
    assert "no folder" in refused(tmp_path / "absent" / "m").message
    (tmp_path / "file").write_text("")
    assert "no folder" in refused(tmp_path / "file" / "m").message


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_parent_that_is_not_writable(tmp_path):
    tmp_path.chmod(0o500)
    try:
        assert "not writable" in refused(tmp_path / "m").message
    finally:
        tmp_path.chmod(0o700)


def test_too_little_space_is_noticed_before_anything_is_written(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=60)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    check_space(tmp_path, 60)
    with pytest.raises(OutputError, match="not enough space"):
        check_space(tmp_path, 61)
    with FolderWriter(tmp_path / "m") as writer:
        declare_all(writer)
        assert writer.tensor_bytes == 67
        with pytest.raises(OutputError, match="not enough space"):
            writer.check_space()
        with pytest.raises(OutputError, match="not enough space"):
            writer.add("a", ARRAYS["a"])
        nothing_else(writer.path)
    nothing_else(tmp_path)


# --- overwriting --------------------------------------------------------------------------------

NEW = {"model_type": "llama", "hidden_size": 5}


def test_overwrite_replaces_a_model(tmp_path):
    write_model(tmp_path / "m")
    (tmp_path / "m" / "old-file").write_text("")
    write_model(tmp_path / "m", NEW, overwrite=True)
    assert inspect_folder(tmp_path / "m").config == NEW
    assert not (tmp_path / "m" / "old-file").exists()
    nothing_else(tmp_path, "m")


def test_the_old_model_is_there_until_the_new_one_is(tmp_path):
    write_model(tmp_path / "m")
    before = contents(tmp_path / "m")
    with FolderWriter(tmp_path / "m", overwrite=True) as writer:
        declare_all(writer)
        writer.add("a", ARRAYS["a"])
        assert contents(tmp_path / "m") == before
    assert contents(tmp_path / "m") == before
    nothing_else(tmp_path, "m")


def test_the_old_model_comes_back_when_the_new_one_cannot_be_moved(tmp_path, monkeypatch):
    write_model(tmp_path / "m")
    before = contents(tmp_path / "m")
    rename = os.rename

    def failing(source, destination):
        if ".partial-" in str(source):
            raise OSError(errno.EIO, "Input/output error")
        rename(source, destination)

    monkeypatch.setattr(target_module.os, "rename", failing)
    with pytest.raises(OutputError, match="Input/output error"):
        write_model(tmp_path / "m", NEW, overwrite=True)
    assert contents(tmp_path / "m") == before
    nothing_else(tmp_path, "m")


def test_overwriting_a_link_replaces_what_it_points_at(tmp_path):
    (tmp_path / "disk").mkdir()
    write_model(tmp_path / "disk" / "m")
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "m")
    write_model(tmp_path / "link", NEW, overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert inspect_folder(tmp_path / "disk" / "m").config == NEW
    nothing_else(tmp_path / "disk", "m")


def test_a_target_that_appears_meanwhile_is_unharmed(tmp_path):
    with (
        pytest.raises(OutputError, match="exists"),
        FolderWriter(tmp_path / "m") as writer,
    ):
        (tmp_path / "m").mkdir()
        (tmp_path / "m" / "precious").write_text("x")
        writer.commit(CONFIG)
    assert contents(tmp_path / "m") == {"precious": b"x"}
    nothing_else(tmp_path, "m")


# --- interruptions ------------------------------------------------------------------------------


def test_leaving_without_commit_leaves_nothing(tmp_path):
    with FolderWriter(tmp_path / "m") as writer:
        declare_all(writer)
        writer.add("a", ARRAYS["a"])
    nothing_else(tmp_path)


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_any_exception_leaves_nothing_and_passes_on(tmp_path, kind):
    with pytest.raises(kind), FolderWriter(tmp_path / "m") as writer:
        declare_all(writer)
        writer.add("a", ARRAYS["a"])
        raise kind
    nothing_else(tmp_path)


def fail_after(monkeypatch, calls: int, code: int) -> None:
    """Let the disk fail at the n-th write."""
    write, left = writer_module.write_bytes, iter(range(calls))

    def failing(file, data):
        if next(left, None) is None:
            file.write(data[: len(data) // 2])
            raise OSError(code, os.strerror(code))
        write(file, data)

    monkeypatch.setattr(writer_module, "write_bytes", failing)


# three headers, four tensors, tokenizer.json, index, config.json
WRITES = 10


@pytest.mark.parametrize("calls", range(WRITES))
def test_a_full_disk_leaves_nothing_wherever_it_strikes(tmp_path, monkeypatch, calls):
    fail_after(monkeypatch, calls, errno.ENOSPC)
    with pytest.raises(OutputError) as caught:
        write_model(tmp_path / "m", max_shard_bytes=30)
    assert caught.value.message.startswith("no space left on the disk: ")
    assert str(tmp_path / "m") in caught.value.message and caught.value.hint
    nothing_else(tmp_path)


def test_the_writes_counted_above_are_all_there_are(tmp_path, monkeypatch):
    fail_after(monkeypatch, WRITES, errno.ENOSPC)
    write_model(tmp_path / "m", max_shard_bytes=30)


@pytest.mark.parametrize("calls", range(WRITES))
def test_a_full_disk_does_not_harm_the_model_to_be_replaced(tmp_path, monkeypatch, calls):
    write_model(tmp_path / "m")
    before = contents(tmp_path / "m")
    fail_after(monkeypatch, calls, errno.ENOSPC)
    with pytest.raises(OutputError):
        write_model(tmp_path / "m", NEW, overwrite=True, max_shard_bytes=30)
    assert contents(tmp_path / "m") == before
    nothing_else(tmp_path, "m")


def test_other_failures_name_the_file_and_the_reason(tmp_path, monkeypatch):
    fail_after(monkeypatch, 2, errno.EIO)
    with pytest.raises(OutputError, match=r"model\.safetensors.*Input/output error"):
        write_model(tmp_path / "m")
    nothing_else(tmp_path)


def test_a_source_file_that_cannot_be_read_is_named(tmp_path):
    with (
        pytest.raises(OutputError, match=r"tokenizer\.model cannot be read"),
        FolderWriter(tmp_path / "m") as writer,
    ):
        writer.add_copy(tmp_path / "tokenizer.model")
    nothing_else(tmp_path)


def test_a_full_disk_met_by_other_libraries_is_the_same_error(tmp_path):
    with (
        pytest.raises(OutputError, match="no space left"),
        FolderWriter(tmp_path / "m") as writer,
    ):
        (writer.path / "tokenizer.json").write_text("{")
        raise OSError(errno.ENOSPC, "No space left on device")
    nothing_else(tmp_path)


KILLED = """
import sys
import numpy as np
from turboquant_mlx.checkpoint import target, writer
stage = sys.argv[2]
def stop(*args):
    print("now", flush=True)
    sys.stdin.read()
with writer.FolderWriter(sys.argv[1], overwrite=True) as folder:
    folder.declare("a", "U8", (5,))
    folder.declare("b", "U8", (5,))
    folder.add("a", np.zeros(5, np.uint8))
    if stage == "tensors":
        stop()
    folder.add("b", np.zeros(5, np.uint8))
    folder.add_bytes("tokenizer.json", "{}")
    if stage == "before config":
        real_write = writer.write_bytes
        def write(file, data):
            if file.name.endswith("config.json"):
                stop()
            real_write(file, data)
        writer.write_bytes = write
    if stage == "between renames":
        real_rename = target.os.rename
        def rename(source, destination):
            if ".partial-" in str(source):
                stop()
            real_rename(source, destination)
        target.os.rename = rename
    folder.commit({"model_type": "llama", "hidden_size": 6})
"""


def kill_at(stage: str, target: Path) -> None:
    source = Path(__file__).parents[2] / "src"
    path = os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(target), stage],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with process:
        assert process.stdout.readline() == b"now\n"
        process.send_signal(signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize("stage", ["tensors", "before config"])
def test_kill_9_leaves_no_folder_that_looks_whole(tmp_path, stage):
    kill_at(stage, tmp_path / "m")
    [left] = tmp_path.iterdir()
    assert left.name.startswith(".m.partial-")
    config = left / "config.json"
    assert not config.exists() or config.stat().st_size == 0
    # and the next conversion to the same place cleans up
    write_model(tmp_path / "m")
    nothing_else(tmp_path, "m")


def test_kill_9_in_the_middle_of_an_overwrite_keeps_the_old_model(tmp_path):
    write_model(tmp_path / "m")
    before = contents(tmp_path / "m")
    kill_at("tensors", tmp_path / "m")
    assert contents(tmp_path / "m") == before
    kill_at("between renames", tmp_path / "m")
    assert not (tmp_path / "m").exists()
    # the next conversion puts the old model back before it does anything else
    assert "exists" in refused_after_cleaning(tmp_path / "m")
    assert contents(tmp_path / "m") == before
    nothing_else(tmp_path, "m")


def refused_after_cleaning(path: Path) -> str:
    with pytest.raises(OutputError) as caught:
        FolderWriter(path)
    return caught.value.message


def test_what_belongs_to_a_living_process_is_left_alone(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with process:
        (tmp_path / f".m.partial-{process.pid}").mkdir()
        (tmp_path / ".m.partial-x").mkdir()
        (tmp_path / ".other.partial-999999999").mkdir()
        write_model(tmp_path / "m")
        names = [f".m.partial-{process.pid}", ".m.partial-x", ".other.partial-999999999", "m"]
        nothing_else(tmp_path, *names)


def test_two_writers_of_one_process_do_not_mix(tmp_path):
    with FolderWriter(tmp_path / "m"), pytest.raises(OutputError, match="cannot be made"):
        FolderWriter(tmp_path / "m")
    nothing_else(tmp_path)


def test_a_left_over_of_an_earlier_process_with_our_number_is_removed(tmp_path):
    left = tmp_path / f".m.partial-{os.getpid()}"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"")
    write_model(tmp_path / "m")
    nothing_else(tmp_path, "m")


def test_a_large_tensor_is_written_without_a_second_copy_in_memory(tmp_path):
    array = np.ones(32 * 2**20, np.uint8)
    with FolderWriter(tmp_path / "m") as writer:
        writer.declare("x", "U8", array.shape)
        tracemalloc.start()
        writer.add("x", array)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        writer.commit(CONFIG)
    assert peak < 2**20

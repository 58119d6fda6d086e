"""The cache of the 16-bit model's predictions: found again, never stale, never too large."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from turboquant_mlx.checkpoint.source import inspect_folder
from turboquant_mlx.errors import OptionError, OutputError
from turboquant_mlx.evaluate import reference as module
from turboquant_mlx.evaluate.reference import (
    LiveReference,
    ReferenceCache,
    cache_key,
    default_cache_folder,
)
from turboquant_mlx.evaluate.text import Chunks

VOCABULARY = 50
CHUNKS = Chunks(np.arange(30, dtype=np.int32).reshape(3, 10), skip=1, available=3)
SIZE = 2 * 3 * 8 * VOCABULARY


def forward(ids: np.ndarray) -> np.ndarray:
    """Logits that depend on the tokens alone."""
    return np.sin(np.outer(ids + 1, np.arange(1, VOCABULARY + 1))).astype(np.float32)


def fill(cache: ReferenceCache, key: str) -> None:
    with cache.store(key, CHUNKS, VOCABULARY) as write:
        for i in range(3):
            write(LiveReference(forward, CHUNKS).log_probs(i))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_stored_is_what_the_model_gives(tmp_path):
    cache = ReferenceCache(tmp_path / "new" / "folder", 10**6)
    assert cache.find("key", CHUNKS) is None
    fill(cache, "key")
    stored, live = cache.find("key", CHUNKS), LiveReference(forward, CHUNKS)
    assert stored is not None
    for i in range(3):
        assert stored.log_probs(i).shape == (8, VOCABULARY)
        np.testing.assert_array_equal(stored.log_probs(i), live.log_probs(i))
    assert names(cache.folder) == ["logprobs-key.npy"]


def test_a_damaged_or_foreign_file_counts_as_absent(tmp_path):
    cache = ReferenceCache(tmp_path, 10**6)
    fill(cache, "key")
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    assert cache.find("key", CHUNKS) is None
    file.write_bytes(b"something else")
    assert cache.find("key", CHUNKS) is None
    np.save(tmp_path / "logprobs-key.npy", np.zeros((3, 7, VOCABULARY), np.float16))
    assert cache.find("key", CHUNKS) is None


def test_an_interrupted_run_leaves_nothing(tmp_path):
    cache = ReferenceCache(tmp_path, 10**6)
    with pytest.raises(KeyboardInterrupt), cache.store("key", CHUNKS, VOCABULARY) as write:
        write(np.zeros((8, VOCABULARY), np.float16))
        raise KeyboardInterrupt
    assert names(tmp_path) == []


def test_what_a_killed_run_left_is_removed(tmp_path):
    (tmp_path / f".logprobs-a.partial-{2**30}").write_bytes(b"left over")
    alive = f".logprobs-b.partial-{os.getppid()}"
    (tmp_path / alive).write_bytes(b"still being written")
    fill(ReferenceCache(tmp_path, 10**6), "key")
    assert names(tmp_path) == [alive, "logprobs-key.npy"]


def test_the_least_recently_used_files_make_room(tmp_path):
    cache = ReferenceCache(tmp_path, 2 * (SIZE + 200))
    for age, key in enumerate(("old", "older", "oldest")):
        fill(ReferenceCache(tmp_path, 10**6), key)
        os.utime(tmp_path / f"logprobs-{key}.npy", (1000 - age, 1000 - age))
    assert cache.find("oldest", CHUNKS)  # which makes it the newest
    fill(cache, "new")
    assert names(tmp_path) == ["logprobs-new.npy", "logprobs-oldest.npy"]


def test_a_limit_that_is_too_small_for_one_file(tmp_path):
    assert ReferenceCache(tmp_path, SIZE).has_room(CHUNKS, VOCABULARY)
    assert not ReferenceCache(tmp_path, SIZE - 1).has_room(CHUNKS, VOCABULARY)
    assert not ReferenceCache(tmp_path, 0).has_room(CHUNKS, VOCABULARY)


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path, monkeypatch):
    cache = ReferenceCache(tmp_path, 10**6)
    usage = module.shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(module.shutil, "disk_usage", lambda _: usage._replace(free=100))
        with pytest.raises(OutputError, match=r"no room in the cache .*0\.00 GB free"):
            fill(cache, "key")

    class Full:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def write(self, data):
            if memoryview(data).nbytes > 200:
                raise OSError(errno.ENOSPC, "No space left on device")
            return self.file.write(data)

    real = Path.open
    monkeypatch.setattr(Path, "open", lambda self, *a: Full(real(self, *a)))
    with pytest.raises(OutputError, match="no space left on the disk"):
        fill(cache, "key")
    monkeypatch.undo()
    assert names(tmp_path) == []


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written"):
        fill(ReferenceCache(tmp_path / "file" / "cache", 10**6), "key")


# --- the key ------------------------------------------------------------------------------------


def test_the_key_follows_everything_that_counts(source, tmp_path, monkeypatch):
    folder = inspect_folder(source)
    key = cache_key(folder, CHUNKS, "cpu")
    assert cache_key(inspect_folder(source), CHUNKS, "cpu") == key

    others = {cache_key(folder, CHUNKS, "gpu")}
    shifted = Chunks(CHUNKS.ids + 1, CHUNKS.skip, CHUNKS.available)
    others.add(cache_key(folder, shifted, "cpu"))
    others.add(cache_key(folder, Chunks(CHUNKS.ids, 0, CHUNKS.available), "cpu"))
    reshaped = Chunks(CHUNKS.ids.reshape(5, 6), CHUNKS.skip, CHUNKS.available)
    others.add(cache_key(folder, reshaped, "cpu"))

    copy = tmp_path / "copy"
    copy.mkdir()
    for file in source.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    times = weights.stat()
    data[-1] ^= 1
    weights.write_bytes(data)
    others.add(cache_key(inspect_folder(copy), CHUNKS, "cpu"))
    # the same size and time, other weights: seen by the samples
    data[: len(data)] = data[:-5000] + bytes(b ^ 1 for b in data[-5000:])
    weights.write_bytes(data)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    others.add(cache_key(inspect_folder(copy), CHUNKS, "cpu"))
    config = copy / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    others.add(cache_key(inspect_folder(copy), CHUNKS, "cpu"))
    monkeypatch.setattr(module, "LAYOUT", 2)
    others.add(cache_key(folder, CHUNKS, "cpu"))
    assert len(others) == 8 and key not in others


def test_the_default_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_folder() == tmp_path / "turboquant-mlx-kit" / "evaluate"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_cache_folder() == tmp_path / "home/.cache/turboquant-mlx-kit/evaluate"
    monkeypatch.setenv("XDG_CACHE_HOME", "~nobody-of-this-name/x")
    with pytest.raises(OptionError, match=r"no home folder for the cache \(~nobody"):
        default_cache_folder()

"""Finding a model folder and checking that its files agree; the hub, played by a local server."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from turboquant_mlx.checkpoint import source as source_module
from turboquant_mlx.checkpoint.source import (
    has_tokenizer,
    inspect_folder,
    refuse_names_not_text,
    resolve,
)
from turboquant_mlx.errors import (
    CheckpointError,
    ModelNotFoundError,
    TurboQuantError,
    UnsupportedModelError,
)

FIRST = "model-00001-of-00002.safetensors"
SECOND = "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def array(n: int) -> np.ndarray:
    return np.arange(n, dtype=np.float32)


@pytest.fixture
def single(tmp_path) -> Path:
    """A model in one file, without an index."""
    path = tmp_path / "single"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    save_file({"a": array(3), "b": array(5)}, path / "model.safetensors")
    return path


@pytest.fixture
def sharded(tmp_path) -> Path:
    """A model in two files, with an index."""
    path = tmp_path / "sharded"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    save_file({"a": array(3)}, path / FIRST)
    save_file({"b": array(5), "c": array(1)}, path / SECOND)
    write_index(path, {"a": FIRST, "b": SECOND, "c": SECOND})
    return path


def write_index(path: Path, weight_map) -> None:
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def refused(path: Path, kind: type[TurboQuantError] = CheckpointError) -> str:
    with pytest.raises(kind) as caught:
        inspect_folder(path)
    message = caught.value.message
    assert str(path) in message
    assert "\n" not in message and not message.endswith(".")
    return message


# --- whole models -------------------------------------------------------------------------------


def test_model_in_one_file(single):
    folder = inspect_folder(single)
    assert folder.path == single and folder.model_type == "llama" and folder.index is None
    assert folder.weight_files == [single / "model.safetensors"]
    assert {name: info.shape for name, info in folder.tensors.items()} == {"a": (3,), "b": (5,)}
    assert folder.weight_bytes == 8 * 4


def test_model_in_shards(sharded):
    folder = inspect_folder(str(sharded))
    assert folder.weight_files == [sharded / FIRST, sharded / SECOND]
    assert folder.file_of == {"a": sharded / FIRST, "b": sharded / SECOND, "c": sharded / SECOND}
    info, header = folder.tensors["b"], folder.headers[sharded / SECOND]
    data = (sharded / SECOND).read_bytes()[header.data_offset :]
    assert data[info.start : info.end] == array(5).tobytes()


def test_shards_may_be_links_as_in_the_cache_of_the_hub(sharded, tmp_path):
    (sharded / FIRST).rename(tmp_path / "blob")
    (sharded / FIRST).symlink_to(tmp_path / "blob")
    assert set(inspect_folder(sharded).tensors) == {"a", "b", "c"}


def test_names_that_are_not_text(single):
    refuse_names_not_text(inspect_folder(single))
    try:
        (single / "model.safetensors").rename(single / "model-\udcff.safetensors")
    except OSError:
        pytest.skip("the file system takes UTF-8 only")
    with pytest.raises(CheckpointError, match="safetensors: the name is not valid UTF-8"):
        refuse_names_not_text(inspect_folder(single))


def test_other_safetensors_files_are_left_alone(single):
    (single / "mtp.safetensors").write_bytes(b"not looked at")
    (single / "adapters.safetensors").write_bytes(b"not looked at")
    assert set(inspect_folder(single).tensors) == {"a", "b"}


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "qwen.tiktoken"]
)
def test_tokenizers_in_the_usual_formats(single, name):
    assert not has_tokenizer(single)
    (single / name).write_text("")
    assert has_tokenizer(single)


# --- not a model --------------------------------------------------------------------------------


def test_absent_folder(tmp_path):
    assert "no such folder" in refused(tmp_path / "absent", ModelNotFoundError)


def test_folder_without_config(tmp_path):
    assert "is not a model folder" in refused(tmp_path, ModelNotFoundError)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("\x00\x01", "not valid JSON"),
        ("[]", "not a JSON object"),
        ("{}", "model_type"),
        ('{"model_type": 3}', "model_type"),
        ('{"model_type": ""}', "model_type"),
    ],
)
def test_config_that_describes_nothing(single, text, problem):
    (single / "config.json").write_text(text)
    assert problem in refused(single)


def test_config_of_absurd_size(single, monkeypatch):
    size = (single / "config.json").stat().st_size
    monkeypatch.setattr(source_module, "MAX_CONFIG_BYTES", size)
    inspect_folder(single)
    monkeypatch.setattr(source_module, "MAX_CONFIG_BYTES", size - 1)
    assert f"config.json: {size:,} bytes are too many" in refused(single)


def test_folder_without_weights(single):
    (single / "model.safetensors").unlink()
    assert "no weight file" in refused(single)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.gguf", "weights.npz"])
def test_weights_in_another_format(single, name):
    (single / "model.safetensors").unlink()
    (single / name).write_bytes(b"")
    assert name in refused(single, UnsupportedModelError)


def test_weight_file_without_tensors(single):
    save_file({}, single / "model.safetensors")
    assert "no tensors" in refused(single)


# --- incomplete and damaged models --------------------------------------------------------------


def test_truncated_shard(sharded):
    raw = (sharded / SECOND).read_bytes()
    (sharded / SECOND).write_bytes(raw[:-1])
    message = refused(sharded)
    assert "truncated" in message and SECOND in message


def test_corrupt_shard(sharded):
    (sharded / FIRST).write_bytes(b"\xff" * 100)
    assert FIRST in refused(sharded)


def test_shard_that_the_index_names_is_absent(sharded):
    (sharded / FIRST).unlink()
    message = refused(sharded)
    assert FIRST in message and "missing" in message


def test_shard_that_is_a_broken_link(sharded):
    (sharded / FIRST).unlink()
    (sharded / FIRST).symlink_to("nowhere")
    assert FIRST in refused(sharded)


def test_shard_that_its_neighbours_names_promise_is_absent(sharded):
    (sharded / INDEX).unlink()
    assert set(inspect_folder(sharded).tensors) == {"a", "b", "c"}
    (sharded / SECOND).unlink()
    assert SECOND in refused(sharded)


def test_absurd_number_of_shards(single):
    (single / "model.safetensors").rename(single / "model-00001-of-99999999999999.safetensors")
    assert "99999999999999" in refused(single)


def test_weight_file_that_the_index_does_not_name(sharded):
    save_file({"d": array(1)}, sharded / "model-stray.safetensors")
    assert "model-stray.safetensors" in refused(sharded)


@pytest.mark.parametrize(
    "name",
    [
        "../x.safetensors",
        "../sharded/" + FIRST,
        "/etc/x.safetensors",
        "sub/x.safetensors",
        "..\\x.safetensors",
        "..",
        "",
        "x.bin",
        "x\0.safetensors",
        7,
        None,
        ["x.safetensors"],
    ],
)
def test_index_that_leads_out_of_the_folder(sharded, name):
    (sharded.parent / "x.safetensors").write_bytes((sharded / FIRST).read_bytes())
    write_index(sharded, {"a": name, "b": SECOND, "c": SECOND})
    message = refused(sharded)
    assert "tensor a" in message and "not a safetensors file in the folder" in message


def test_index_with_a_name_that_mlx_lm_does_not_read(sharded):
    (sharded / FIRST).rename(sharded / "weights.safetensors")
    write_index(sharded, {"a": "weights.safetensors", "b": SECOND, "c": SECOND})
    assert "weights.safetensors" in refused(sharded, UnsupportedModelError)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": 1}']
)
def test_index_that_maps_nothing(sharded, text):
    (sharded / INDEX).write_text(text)
    assert INDEX in refused(sharded)


def test_tensor_of_the_index_is_missing(sharded):
    write_index(sharded, {"a": FIRST, "b": SECOND, "c": SECOND, "lost": SECOND})
    assert "tensor lost is missing" in refused(sharded)


def test_tensor_is_not_in_the_index(sharded):
    write_index(sharded, {"a": FIRST, "b": SECOND})
    assert "tensor c" in refused(sharded)


def test_tensor_is_in_another_file_than_the_index_says(sharded):
    write_index(sharded, {"a": FIRST, "b": FIRST, "c": SECOND})
    message = refused(sharded)
    assert "tensor b" in message and FIRST in message and SECOND in message


def test_tensor_is_in_two_files(sharded):
    save_file({"a": array(3), "c": array(1)}, sharded / FIRST)
    message = refused(sharded)
    assert "tensor c is in two files" in message


# --- what the user typed ------------------------------------------------------------------------


def test_local_folders_are_taken_as_they_are(single, monkeypatch):
    monkeypatch.chdir(single.parent)
    assert resolve(single) == single
    assert resolve(str(single)) == single
    assert resolve("single") == Path("single")
    assert resolve("./single/").samefile(single)
    monkeypatch.setenv("HOME", str(single.parent))
    assert resolve("~/single") == single


LOCAL_NAMES = [
    "missing",
    "missing/",
    "./missing",
    "../missing/model",
    "/missing",
    "/missing/model",
    "~/missing",
    "~missing/model",
    "a/b/c",
    "owner/",
    "owner/name/",
    ".hidden/name",
    "owner/.name",
    "owner/na me",
    "owner/näme",
    "owner\\name",
    "x" * 5000,
    "nul\0byte",
    "",
    " ",
]


@pytest.mark.parametrize("name", LOCAL_NAMES)
def test_what_looks_like_a_path_is_never_asked_for_on_the_network(name, monkeypatch):
    import huggingface_hub

    def no_network(*args, **kwargs):
        raise AssertionError("asked the hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_network)
    with pytest.raises(ModelNotFoundError) as caught:
        resolve(name)
    message = caught.value.message
    assert ("no such folder" in message and len(message) < 300) or "no model is named" in message
    assert "repo id" not in message.lower()


def test_paths_are_never_asked_for_on_the_network(monkeypatch):
    with pytest.raises(ModelNotFoundError, match="no such folder: owner/name"):
        resolve(Path("owner/name"))


def test_a_file_is_not_a_folder(single):
    with pytest.raises(ModelNotFoundError, match=r"is a file"):
        resolve(single / "config.json")


# --- the hub ------------------------------------------------------------------------------------

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "pytorch_model.bin": b"not wanted",
    "README.md": b"---\nlicense: mit\n---\n",
}


class FakeHub(BaseHTTPRequestHandler):
    """The few answers of the hub that a download needs."""

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        self.server.seen.append(self.path)
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/owner/absent"):
            self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif path.startswith("/api/models/owner/private"):
            self.answer(401, b"{}", {"X-Error-Message": "Invalid username or password."})
        elif path.startswith("/api/models/owner/gated"):
            self.answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif path.startswith("/api/models/owner/broken"):
            self.answer(418, b"{}", {})
        elif path == "/api/models/owner/name/revision/main":
            siblings = [{"rfilename": name} for name in FILES]
            body = {"id": "owner/name", "modelId": "owner/name", "sha": COMMIT}
            self.answer(200, json.dumps({**body, "siblings": siblings}).encode(), {})
        elif path.startswith("/api/models/owner/name/revision/"):
            self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif path == f"/api/models/owner/name/tree/{COMMIT}":
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": etag(data)}
                for name, data in FILES.items()
            ]
            self.answer(200, json.dumps(tree).encode(), {})
        elif path.startswith(f"/owner/name/resolve/{COMMIT}/"):
            data = FILES[path.rpartition("/")[2]]
            self.answer(200, data, {"ETag": f'"{etag(data)}"', "X-Repo-Commit": COMMIT})
        else:
            self.answer(404, b"{}", {})

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@contextmanager
def fake_hub() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    server.seen = []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


PROGRAM = """
import json, sys
from turboquant_mlx.checkpoint.source import resolve
from turboquant_mlx.errors import TurboQuantError
for question in json.loads(sys.argv[1]):
    try:
        print(json.dumps({"path": str(resolve(**question))}))
    except TurboQuantError as error:
        print(json.dumps({"error": type(error).__name__, "message": error.message}))
assert "mlx" not in sys.modules and "transformers" not in sys.modules
"""
NOBODY = "http://127.0.0.1:9"


def ask(endpoint: str, home: Path, *names: str, offline: bool = False, **options) -> list[str]:
    """What ``resolve`` says, path or error, in a process of its own.

    The hub's client reads its settings when it is imported.
    """
    source = Path(__file__).parents[2] / "src"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(source), environment.get("PYTHONPATH", "")])
    if offline:
        environment["HF_HUB_OFFLINE"] = "1"
    questions = [{"path_or_repo": name, **options} for name in names]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(questions)],
        env=environment,
        cwd=home,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    answers = []
    for answer in map(json.loads, done.stdout.splitlines()):
        if "error" in answer:
            assert answer["error"] == "ModelNotFoundError"
            assert "\n" not in answer["message"] and not answer["message"].endswith(".")
        answers.append(answer.get("path") or answer["message"])
    return answers


def address(server: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


def test_a_repository_is_downloaded_once_and_then_found_without_the_hub(tmp_path):
    with fake_hub() as server:
        [answer] = ask(address(server), tmp_path, "owner/name")
    path = Path(answer)
    wanted = {name: data for name, data in FILES.items() if name != "pytorch_model.bin"}
    assert {file.name: file.read_bytes() for file in path.iterdir()} == wanted
    assert not any("pytorch_model.bin" in request for request in server.seen)
    assert ask(NOBODY, tmp_path, "owner/name") == [answer]
    assert ask(NOBODY, tmp_path, "owner/name", offline=True) == [answer]
    assert ask(NOBODY, tmp_path, "owner/name", allow_download=False) == [answer]
    (path / "model.safetensors").unlink()
    [message] = ask(NOBODY, tmp_path, "owner/name", offline=True)
    assert message.startswith("the model owner/name is only partly downloaded")


def test_each_refusal_of_the_hub_is_one_clear_line(tmp_path):
    (tmp_path / "owner" / "local").mkdir(parents=True)
    with fake_hub() as server:
        absent, private, gated, broken, local = ask(
            address(server),
            tmp_path,
            "owner/absent",
            "owner/private",
            "owner/gated",
            "owner/broken",
            "owner/local",
        )
        [revision] = ask(address(server), tmp_path, "owner/name", revision="v9")
    assert absent == "no such folder, and no such model on the hub: owner/absent"
    assert private == "no such folder, and the hub does not let you read owner/private"
    assert gated == "the model owner/gated is gated, and its owner has not given you access"
    assert "owner/broken" in broken and "418" in broken
    assert revision == "the model owner/name has no revision v9"
    # a folder of that name comes before the hub
    assert local == "owner/local" and not any("local" in request for request in server.seen)


def test_no_network(tmp_path):
    [message] = ask(NOBODY, tmp_path, "owner/name")
    assert message.startswith("no such folder, and the hub cannot be reached for owner/name (")


def test_the_offline_switch_is_respected_and_named(tmp_path):
    with fake_hub() as server:
        [message] = ask(address(server), tmp_path, "owner/name", offline=True)
    assert message == "no such folder, and the hub is switched off (HF_HUB_OFFLINE): owner/name"
    assert server.seen == []


def test_a_repository_that_must_not_be_downloaded(tmp_path):
    with fake_hub() as server:
        [message] = ask(address(server), tmp_path, "owner/name", allow_download=False)
    assert message == "no such folder, and it was never downloaded: owner/name"
    assert server.seen == []

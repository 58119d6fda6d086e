"""A model of the hub is described from headers alone; every damage is an error with a name."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

import tiny
from turboquant_mlx.checkpoint.source import inspect_folder

KILOBYTE = 1000
SHARDS = 3


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "llama"
    # large enough that its weights are much more than the first bytes of its shards
    tiny.build_source(
        folder, "llama", shards=SHARDS, hidden_size=512, intermediate_size=1024, head_dim=64
    )
    return folder


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model*.safetensors"))


def header_bytes(file: Path) -> int:
    with file.open("rb") as handle:
        return 8 + struct.unpack("<Q", handle.read(8))[0]


class TestFromTheHub:
    def test_says_the_same_as_the_folder_itself(self, hub, ask, source):
        hub.add("owner/llama", source)
        local = ask("plan", "--model", str(source), "--json").json
        remote = ask("plan", "--model", "owner/llama", "--json", endpoint=hub.endpoint).json
        assert remote["model"]["source"] == "huggingface"
        for key in ("total_bytes", "resident_bytes", "precision", "type", "n_layers"):
            assert remote["model"][key] == local["model"][key]
        assert remote["projection"] == local["projection"]
        assert remote["model"]["total_bytes"] == inspect_folder(source).weight_bytes

    def test_reads_small_files_headers_and_at_most_100_kilobytes_per_shard(self, hub, ask, source):
        repository = hub.add("owner/llama", source)
        answer = ask("plan", "--model", "owner/llama", "--json", endpoint=hub.endpoint)
        assert answer.code == 0
        for file in shards(source):
            assert repository.sent[file.name] <= header_bytes(file) + 100 * KILOBYTE
            assert repository.sent[file.name] < file.stat().st_size
        assert set(repository.sent) == {
            "config.json",
            "model.safetensors.index.json",
            *(file.name for file in shards(source)),
        }
        assert answer.json["model"]["read_from_hub_bytes"] == sum(repository.sent.values())

    def test_a_conversion_is_projected_without_a_download(self, hub, ask, source):
        repository = hub.add("owner/llama", source)
        arguments = ("--convert", "bits=3,extras", "--json")
        local = ask("plan", "--model", str(source), *arguments).json
        remote = ask("plan", "--model", "owner/llama", *arguments, endpoint=hub.endpoint).json
        assert remote["conversion"] == local["conversion"]
        assert sum(repository.sent.values()) < 0.5 * inspect_folder(source).weight_bytes

    def test_a_header_longer_than_the_first_request_is_read_to_its_end(self, hub, ask, tmp_path):
        folder = tmp_path / "long"
        tiny.build_source(folder, "llama", num_hidden_layers=80, hidden_size=128)
        assert header_bytes(folder / "model.safetensors") > 64 * 1024
        repository = hub.add("owner/long", folder)
        answer = ask("plan", "--model", "owner/long", "--json", endpoint=hub.endpoint)
        assert answer.json["model"]["total_bytes"] == inspect_folder(folder).weight_bytes
        expected = header_bytes(folder / "model.safetensors")
        assert repository.sent["model.safetensors"] == max(expected, 64 * 1024)

    def test_a_server_without_ranges_is_left_when_the_header_is_there(self, hub, ask, source):
        hub.add("owner/llama", source)
        hub.ranges = False
        answer = ask("plan", "--model", "owner/llama", "--json", endpoint=hub.endpoint)
        assert answer.json["model"]["total_bytes"] == inspect_folder(source).weight_bytes

    def test_a_revision_is_asked_for_by_name(self, hub, ask, source):
        hub.add("owner/llama", source)
        known = ask("plan", "--model", "owner/llama@v1", "--json", endpoint=hub.endpoint)
        assert known.code == 0
        unknown = ask("plan", "--model", "owner/llama@v9", endpoint=hub.endpoint)
        assert unknown.code == 1
        assert unknown.err == "error: the model owner/llama has no revision v9\n"

    def test_an_unknown_repository_is_one_line_and_exit_code_1(self, hub, ask):
        answer = ask("plan", "--model", "owner/absent", endpoint=hub.endpoint)
        assert answer.code == 1
        assert "no such model on the hub: owner/absent" in answer.err

    def test_a_missing_shard_is_named(self, hub, ask, source):
        repository = hub.add("owner/llama", source)
        gone = shards(source)[1].name
        del repository.files[gone]
        answer = ask("plan", "--model", "owner/llama", endpoint=hub.endpoint)
        assert answer.code == 1
        assert f"weight file {gone} is missing" in answer.err


class TestPartialCache:
    @pytest.fixture
    def snapshot(self, tmp_path, source) -> Path:
        """A folder of the hub's cache that holds everything but one shard."""
        folder = tmp_path / "hf" / "hub" / "models--owner--llama" / "snapshots" / "abc123"
        folder.mkdir(parents=True)
        for file in source.iterdir():
            if file != shards(source)[-1]:
                (folder / file.name).write_bytes(file.read_bytes())
        return folder

    def test_what_is_missing_is_looked_up_and_not_left_out_of_the_sum(
        self, hub, ask, source, snapshot
    ):
        hub.add("owner/llama", source)
        # the cache knows commits by their hash; the fake hub has only one
        from_hub = snapshot.with_name("0123456789abcdef0123456789abcdef01234567")
        snapshot.rename(from_hub)
        answer = ask("plan", "--model", str(from_hub), "--json", endpoint=hub.endpoint)
        assert answer.json["model"]["total_bytes"] == inspect_folder(source).weight_bytes
        assert any("only partly downloaded" in note for note in answer.json["notes"])
        # shards that are here are not read from there
        sent = hub.repositories["owner/llama"].sent
        assert shards(source)[-1].name in sent
        assert shards(source)[0].name not in sent

    def test_offline_it_is_an_error(self, ask, snapshot):
        answer = ask("plan", "--model", str(snapshot), offline=True)
        assert answer.code == 1
        assert "partly downloaded" in answer.err or "HF_HUB_OFFLINE" in answer.err

    def test_a_folder_elsewhere_with_a_missing_shard_is_damaged(self, ask, source, tmp_path):
        folder = tmp_path / "copy"
        folder.mkdir()
        for file in source.iterdir():
            if file != shards(source)[0]:
                (folder / file.name).write_bytes(file.read_bytes())
        answer = ask("plan", "--model", str(folder))
        assert answer.code == 1
        assert f"weight file {shards(source)[0].name} is missing" in answer.err


def damaged(raw: bytes, change) -> bytes:
    """A safetensors file with its JSON header changed."""
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + raw[8 + length :]


def widen_last(header) -> None:
    last = max(header, key=lambda name: header[name].get("data_offsets", [0, 0])[1])
    header[last]["data_offsets"][1] += 8


def overlap(header) -> None:
    names = sorted(header, key=lambda name: header[name].get("data_offsets", [0, 0])[0])
    first, second = names[-2:]
    size = header[second]["data_offsets"][1] - header[second]["data_offsets"][0]
    start = header[first]["data_offsets"][0]
    header[second]["data_offsets"] = [start, start + size]


def overflow(header) -> None:
    name = next(name for name in header if name != "__metadata__")
    header[name]["shape"] = [2**61, 2**61]


class TestHostileFiles:
    """The same words from a folder and from the hub, and never more read than asked for."""

    DAMAGES = (
        (lambda raw: struct.pack("<Q", 2**60) + raw[8:], "its header would have"),
        (lambda raw: struct.pack("<Q", len(raw)) + raw[8:], "truncated, the header needs"),
        (lambda raw: raw[:8] + b"{" * (len(raw) - 8), "the header is not JSON"),
        (lambda raw: raw[:-10], "truncated, tensor"),
        (lambda raw: raw[:5], "truncated, 5 bytes cannot hold a header"),
        (lambda raw: damaged(raw, widen_last), "the file gives it"),
        (lambda raw: damaged(raw, overlap), "overlaps"),
        (lambda raw: damaged(raw, overflow), "takes"),
    )

    @pytest.mark.parametrize("number", range(len(DAMAGES)))
    def test_is_an_error_that_names_the_file(self, number, hub, ask, source, tmp_path):
        change, words = self.DAMAGES[number]
        folder = tmp_path / "damaged"
        folder.mkdir()
        for file in source.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        target = shards(folder)[0]
        target.write_bytes(change(target.read_bytes()))
        hub.add("owner/damaged", folder)
        for model in (str(folder), "owner/damaged"):
            answer = ask("plan", "--model", model, endpoint=hub.endpoint)
            assert answer.code == 1
            assert answer.out == ""
            assert target.name in answer.err
            assert words in answer.err

    def test_an_index_that_points_out_of_the_folder_is_refused(self, hub, ask, source):
        repository = hub.add("owner/llama", source)
        index = json.loads(repository.files["model.safetensors.index.json"])
        name = next(iter(index["weight_map"]))
        index["weight_map"][name] = "../../elsewhere.safetensors"
        repository.files["model.safetensors.index.json"] = json.dumps(index).encode()
        answer = ask("plan", "--model", "owner/llama", endpoint=hub.endpoint)
        assert answer.code == 1
        assert "not a safetensors file in the folder" in answer.err

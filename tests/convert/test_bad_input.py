"""What turboquant-convert refuses: one line that says what is wrong, exit code 2, nothing left."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any, BinaryIO

import pytest

import damage as d
import tiny
from converting import Conversion, Workshop, contents, convert, manifest_of, run
from processes import end_of, listen_to_ctrl_c
from turboquant_mlx.checkpoint import target as target_module
from turboquant_mlx.checkpoint import writer as writer_module
from turboquant_mlx.checkpoint.source import inspect_folder
from turboquant_mlx.errors import ModelNotFoundError

SHARD = "model-00001-of-00003.safetensors"
UP = "model.layers.1.mlp.up_proj.weight"
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
NAN = b"\xc0\x7f"  # in bfloat16
INFINITY = b"\x80\x7f"


def assert_refused(done: Conversion, *says: str, hint: str | None = None) -> None:
    """One line ``error: ...``, at most one ``hint: ...``, exit code 2 and no result."""
    assert done.code == 2
    assert done.out == ""
    said = [line for line in done.messages if not line.startswith(("note: ", "warning: "))]
    error, *rest = said
    assert error.startswith("error: ")
    for words in says:
        assert words in error
    assert not error.endswith(".") or error.endswith(" ...")
    assert len(rest) <= 1
    assert all(line.startswith("hint: ") for line in rest)
    if hint is not None:
        assert hint in rest[0]
    assert "Traceback" not in done.err


# --- the source ---------------------------------------------------------------------------------

# (what is wrong, the damage, words of the error); the source has three shards and an index
DAMAGED = [
    ("a shard is missing", d.remove(SHARD), [SHARD, "is missing"]),
    ("a shard is cut off", d.cut(SHARD, -100), [SHARD, "truncated, tensor model.layers.0"]),
    ("a shard is empty", d.replace(SHARD, b""), [SHARD, "truncated"]),
    ("a shard ends in its header", d.cut(SHARD, 50), [SHARD, "truncated"]),
    ("a shard is something else", d.replace(SHARD, b"<!DOCTYPE html>" * 99), [SHARD, "not a safe"]),
    (
        "a header of absurd length",
        d.replace(SHARD, struct.pack("<Q", 2**60) + b"{}"),
        [SHARD, "its header would have 1152921504606846976 bytes"],
    ),
    ("a header that is no JSON", d.replace(SHARD, struct.pack("<Q", 8) + b"{'a': 1}"), [SHARD]),
    (
        "tensors that overlap",
        d.change_header("lm_head.weight", data_offsets=[2, 2 + tiny.VOCAB_SIZE * 128 * 2]),
        [SHARD, "lm_head.weight"],
    ),
    (
        "offsets beyond the file",
        d.change_header("lm_head.weight", data_offsets=[0, 2**40]),
        [SHARD, "lm_head.weight"],
    ),
    (
        "a shape that its bytes do not have",
        d.change_header("lm_head.weight", shape=[2**31, 2**31]),
        [SHARD, "lm_head.weight"],
    ),
    ("an unknown type", d.change_header("lm_head.weight", dtype="Q7"), [SHARD, "lm_head", "Q7"]),
    ("an index out of the folder", d.in_index(UP, "../x.safetensors"), ["index", UP, "../x.safet"]),
    ("an absolute name in the index", d.in_index(UP, "/x.safetensors"), [UP, "/x.safetensors"]),
    (
        "an index that names an absent file",
        d.in_index(UP, "model-00009-of-00003.safetensors"),
        ["model-00009-of-00003.safetensors", "is missing"],
    ),
    ("an index without a tensor", d.in_index(UP, None), [UP, "is not in the index"]),
    ("an index that is wrong about a tensor", d.in_index(UP, SHARD), [UP, "the index says in"]),
    ("an index that is no JSON", d.replace(d.INDEX, "{"), [d.INDEX, "not valid JSON"]),
    ("an index without a map", d.replace(d.INDEX, "{}"), [d.INDEX, "there is no weight_map"]),
    ("a tensor is missing", d.remove_tensor(UP), ["tensors are missing", UP]),
    (
        "a tensor is surplus",
        d.add_tensor("model.layers.1.mlp.extra_proj.weight", like=UP),
        ["fit nothing in the model", "model.layers.1.mlp.extra_proj.weight"],
    ),
    ("a tensor of another shape", d.drop_row(UP), ["(192, 128)", "(191, 128)", UP]),
    ("a weight that is not finite", d.overwrite_values(UP, NAN, 4000), [UP[:-7], "not finite"]),
    (
        "a norm that is not a number",
        d.overwrite_values("model.norm.weight", NAN),
        ["model.norm.weight has values that are not numbers"],
    ),
    (
        "an infinite norm",
        d.overwrite_values("model.norm.weight", INFINITY),
        ["tensor model.norm.weight has values that are not finite"],
    ),
    (
        "an infinite embedding",
        d.overwrite_values("model.embed_tokens.weight", INFINITY, 4000),
        ["tensor model.embed_tokens.weight has values that are not finite"],
    ),
    ("a stray weight file", d.replace("model-x.safetensors", b""), ["model-x.safetensors"]),
    ("only weights of another format", d.remove("*.safetensors"), ["is missing"]),
    ("no config", d.remove("config.json"), ["is not a model folder", "config.json"]),
    ("a config that is no JSON", d.cut("config.json", 99), ["config.json", "not valid JSON"]),
    ("a config that is a list", d.replace("config.json", "[]"), ["config.json", "not a JSON obj"]),
    ("a config that is bytes", d.replace("config.json", b"\xff\x00\xfe"), ["config.json"]),
    ("a config of great depth", d.replace("config.json", '{"a":' * 99_999), ["config.json"]),
    ("no model type", d.remove_key("model_type"), ["config.json", "there is no model_type"]),
    (
        "an unknown model type",
        d.set_key("model_type", to="zzz"),
        ["model type 'zzz' is not supported by the installed mlx-lm"],
    ),
    ("a module that is no model", d.set_key("model_type", to="base"), ["'base' is not supported"]),
    ("a path as model type", d.set_key("model_type", to="../x"), ["'../x' is not supported"]),
    ("a config without a key", d.remove_key("hidden_size"), ["config.json lacks hidden_size"]),
    (
        "a width in words",
        d.set_key("hidden_size", to="128"),
        ["config.json: hidden_size '128' is not a positive whole number"],
    ),
    (
        "a negative width",
        d.set_key("hidden_size", to=-128),
        ["config.json: hidden_size -128 is not a positive whole number"],
    ),
    (
        "no heads",
        d.set_key("num_attention_heads", to=0),
        ["config.json: num_attention_heads 0 is not a positive whole number"],
    ),
    (
        "no layers",
        d.set_key("num_hidden_layers", to=0),
        ["config.json: num_hidden_layers 0 is not a positive whole number"],
    ),
    (
        "ten million layers",
        d.set_key("num_hidden_layers", to=10**7),
        ["config.json: num_hidden_layers is 10000000, but the weight files hold only"],
    ),
    (
        "an infinite epsilon",
        d.set_key("rms_norm_eps", to=float("inf")),
        ["config.json: rms_norm_eps is inf, not a finite number"],
    ),
    (
        "a negative rotary base",
        d.set_key("rope_theta", to=-10000.0),
        ["config.json: rope_theta is -10000.0, not a finite number above 0"],
    ),
    (
        "packed weights that are plain",
        d.set_key("quantization_config", to={"quant_method": "awq", "bits": 4}),
        ["quantization_config says awq, but no tensor of the weight files is packed"],
    ),
    ("a config with more layers", d.set_key("num_hidden_layers", to=3), ["missing", "layers.2."]),
    ("a config with fewer layers", d.set_key("num_hidden_layers", to=1), ["nothing", "layers.1."]),
    (
        "two rotary bases",
        d.change_json("config.json", lambda c: c.update(rope_theta=1.0)),
        ["config.json", "rope_theta"],
    ),
    (
        "a quantization that is a list",
        d.set_key("quantization", to=[4]),
        ["config.json: quantization is not an object"],
    ),
    (
        "a text_config that is a number",
        d.set_key("text_config", to=5),
        ["text_config is not an ob"],
    ),
    (
        "complex numbers",
        d.retype("model.norm.weight", "C64", 8),
        ["model.norm.weight is complex64"],
    ),
    (
        "a pipe in place of a file",
        d.pipe("generation_config.json"),
        ["generation_config.json: is n"],
    ),
    ("no tokenizer", d.remove("tokenizer*"), ["has no tokenizer"]),
    ("a broken tokenizer", d.replace("tokenizer.json", "{"), ["tokenizer", "cannot be read"]),
    (
        "a broken tokenizer config",
        d.replace("tokenizer_config.json", "{"),
        ["tokenizer", "cannot be read"],
    ),
    ("half a tokenizer", d.remove("tokenizer.json"), ["tokenizer", "cannot be read"]),
    (
        "broken generation defaults",
        d.replace("generation_config.json", "{"),
        ["generation_config.json", "not valid JSON"],
    ),
    (
        "generation defaults that are a list",
        d.replace("generation_config.json", "[]"),
        ["generation_config.json: not a JSON object"],
    ),
]


@pytest.fixture(scope="module")
def in_shards(workshop: Workshop) -> Path:
    return workshop.source("llama", shards=3)


@pytest.mark.parametrize(
    ("damage", "says"), [case[1:] for case in DAMAGED], ids=[case[0] for case in DAMAGED]
)
def test_a_damaged_source(
    in_shards: Path, tmp_path: Path, damage: d.Damage, says: list[str]
) -> None:
    source, place = tmp_path / "source", tmp_path / "place"
    shutil.copytree(in_shards, source)
    place.mkdir()
    damage(source)
    assert_refused(convert(source, place / "out"), *says)
    assert list(place.iterdir()) == []


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (d.remove_tensor(EXPERT), [EXPERT]),
        (d.drop_row(EXPERT), [EXPERT, "is shaped unlike its kin"]),
        (d.overwrite_values(EXPERT, NAN), ["model.layers.1.mlp.switch_mlp.up_proj", "not finite"]),
    ],
    ids=["missing", "of another shape", "not finite"],
)
def test_a_damaged_expert(moe: Path, tmp_path: Path, damage: d.Damage, says: list[str]) -> None:
    source = tmp_path / "source"
    shutil.copytree(moe, source)
    damage(source)
    assert_refused(convert(source, tmp_path / "out"), *says)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_number_that_no_written_config_can_hold(workshop: Workshop, tmp_path: Path) -> None:
    """Transformers 5 and mlx-lm name its place differently; the written folder has mlx-lm's."""
    source = tmp_path / "source"
    shutil.copytree(workshop.source("gpt_oss"), source)
    config = (source / "config.json").read_text()
    assert '"truncate": false' in config
    (source / "config.json").write_text(config.replace('"truncate": false', '"truncate": 1e400'))
    done = convert(source, tmp_path / "out")
    assert_refused(done, "config.json: rope_scaling.truncate is inf, not a finite number")


def test_a_norm_that_dtype_cannot_hold(llama: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(llama, source)
    d.overwrite_values("model.norm.weight", b"\x00\x7e")(source)  # 4e37, too much for float16
    done = convert(source, tmp_path / "out", "--dtype", "float16")
    assert_refused(done, "model.norm.weight has values that are not finite", hint="--dtype")
    assert convert(source, tmp_path / "out").code == 0


@pytest.mark.parametrize("name", ["nothing/here", "./nothing", "nothing", "~/nothing-here/x", " "])
def test_a_source_that_does_not_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    done = convert(name, tmp_path / "out")
    assert_refused(done, "no such folder" if name.strip() else "no model is named")
    assert "must be in the form" not in done.err
    assert list(tmp_path.iterdir()) == []


def test_a_source_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert_refused(convert(tmp_path / "file", tmp_path / "out"), "is a file, not a model folder")


def test_a_source_in_another_format(llama: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(llama, source)
    (source / "model.safetensors").rename(source / "model.gguf")
    done = convert(source, tmp_path / "out")
    assert_refused(done, "only weights in another format (model.gguf)", hint="safetensors")


# --- options and target -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--bits", "5"], "argument --bits/-b: invalid choice: 5"),
        (["--bits", "three"], "argument --bits/-b: invalid int value: 'three'"),
        (["--group-size", "48"], "argument --group-size/-g: invalid choice: 48"),
        (["--streaming", "--dtype", "float16"], "--dtype is not supported together with"),
        (["--expert-layer-tiers", "/nothing.json"], "no such tiers file: /nothing.json"),
        (["--unknown"], "unrecognized arguments: --unknown"),
    ],
    ids=" ".join,
)
def test_options_that_cannot_be(llama: Path, tmp_path: Path, flags: list[str], says: str) -> None:
    assert_refused(convert(llama, tmp_path / "out", *flags), says)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flag", ["--balance-text", "--feedback-text", "--expert-layer-tiers"])
def test_a_pipe_in_place_of_a_file(llama: Path, tmp_path: Path, flag: str) -> None:
    """As a named pipe, which nobody may ever write to, or what the shell puts for ``<(...)``."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    needs = ["--error-feedback"] if flag == "--feedback-text" else []
    reading, writing = os.pipe()
    try:
        for name in (pipe, Path(f"/dev/fd/{reading}"), Path("/dev/zero")):
            done = convert(llama, tmp_path / "out", *needs, flag, str(name))
            says = f"argument {flag}: {name} is a pipe or a device (save what comes out of it"
            assert_refused(done, says)
    finally:
        os.close(reading)
        os.close(writing)
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_a_target_that_exists(llama: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    assert convert(llama, target).code == 0
    before = contents(target)
    assert_refused(convert(llama, target), f"{target} exists already", hint="--overwrite")
    assert contents(target) == before


def test_overwrite_replaces_nothing_but_models(llama: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "letters.txt").write_text("dear")
    assert_refused(convert(llama, target, "--overwrite"), "is not a model folder")
    assert contents(target) == {"letters.txt": b"dear"}


@pytest.mark.parametrize("name", ["source", "link"])
def test_the_source_is_never_overwritten(llama: Path, tmp_path: Path, name: str) -> None:
    source = tmp_path / "source"
    shutil.copytree(llama, source)
    (tmp_path / "link").symlink_to(source)
    before = contents(source)
    done = convert(source, tmp_path / name, "--overwrite")
    assert_refused(done, "is the source itself", hint="choose another --mlx-path")
    assert contents(source) == before


def test_a_source_inside_of_the_target_is_not_overwritten(llama: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    shutil.copytree(llama, target)
    shutil.copytree(llama, target / "deep" / "source")
    done = convert(target / "deep" / "source", target, "--overwrite")
    assert_refused(done, "another model is in it", str(target / "deep" / "source"))
    assert contents(target / "deep" / "source") == contents(llama)


def test_a_target_that_is_a_link_in_a_circle(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to("out")
    assert_refused(convert(llama, tmp_path / "out"), "is a link in a circle")


def test_a_target_whose_name_is_no_text(llama: Path, tmp_path: Path) -> None:
    name = os.fsencode(tmp_path / "out") + b"\xff"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "turboquant_mlx.convert", "--no-balance"),
            *("--hf-path", str(llama), "--mlx-path", os.fsdecode(name)),
        ],
        capture_output=True,
    )
    assert done.returncode == 2
    assert b"is not valid UTF-8" in done.stderr
    assert b"Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_target_in_no_folder(llama: Path, tmp_path: Path) -> None:
    done = convert(llama, tmp_path / "not" / "there")
    assert_refused(done, "cannot be made, there is no folder")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_target_in_a_folder_that_is_not_writable(llama: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert_refused(convert(llama, tmp_path / "out"), "is not writable")


# --- the disk -----------------------------------------------------------------------------------

Usage = namedtuple("Usage", "total used free")


def test_too_little_space_is_known_before_the_work(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    monkeypatch.setattr(writer_module, "write_bytes", lambda file, data: written.append(1))
    monkeypatch.setattr(
        target_module.shutil, "disk_usage", lambda _: Usage(2**30, 2**30 - 10_000, 10_000)
    )
    done = convert(llama, tmp_path / "out")
    assert_refused(done, "not enough space", "0.01 MB free")
    assert written == []
    assert list(tmp_path.iterdir()) == []


class FullDisk:
    """Takes so many writes and then is full."""

    def __init__(self, room: int):
        self.room = room
        self.writes = 0
        self.write = writer_module.write_bytes

    def __call__(self, file: BinaryIO, data: memoryview) -> None:
        self.writes += 1
        if self.writes > self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.write(file, data)


@pytest.fixture(scope="module")
def writes(llama: Path, workshop: Workshop) -> int:
    """How many writes a conversion takes."""
    disk = FullDisk(room=10**9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer_module, "write_bytes", disk)
        assert convert(llama, workshop.root / "counted").code == 0
    return disk.writes


@pytest.mark.parametrize("where", ["first", "early", "middle", "late", "last"])
def test_a_disk_that_fills_up(
    llama: Path,
    tmp_path: Path,
    writes: int,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
) -> None:
    room = {"first": 0, "early": 5, "middle": writes // 2, "late": writes - 4, "last": writes - 1}
    monkeypatch.setattr(writer_module, "write_bytes", FullDisk(room[where]))
    done = convert(llama, tmp_path / "out")
    assert_refused(done, "no space left", hint="nothing was left behind")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_leaves_the_old_model(
    llama: Path, tmp_path: Path, writes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out"
    assert convert(llama, target).code == 0
    before = contents(target)
    monkeypatch.setattr(writer_module, "write_bytes", FullDisk(writes // 2))
    assert_refused(convert(llama, target, "--bits", "4", "--overwrite"), "no space left")
    assert contents(target) == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_source_that_changes_while_it_is_read(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    shutil.copytree(llama, source)
    file = source / "model.safetensors"

    def cut_the_source(handle: BinaryIO, data: memoryview) -> None:
        if file.stat().st_size > 100_000:
            with file.open("r+b") as opened:
                opened.truncate(100_000)
        handle.write(data)

    monkeypatch.setattr(writer_module, "write_bytes", cut_the_source)
    assert_refused(convert(source, tmp_path / "out"), str(source), "cannot be read to its end")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


# --- the process --------------------------------------------------------------------------------

# The command, but it stops at its twelfth write and says so.
PROGRAM = """
import sys, time
from turboquant_mlx.checkpoint import writer

write, writes = writer.write_bytes, []

def stop_at_the_twelfth(file, data):
    writes.append(1)
    if len(writes) == 12:
        print("stopped", flush=True)
        time.sleep(60)
    write(file, data)

writer.write_bytes = stop_at_the_twelfth
from turboquant_mlx.convert.command import main
sys.exit(main(sys.argv[1:]))
"""


def start(source: Path, target: Path, *flags: str) -> subprocess.Popen[bytes]:
    """A conversion in a process of its own, stopped in the middle of the weights."""
    arguments = ["--hf-path", str(source), "--mlx-path", str(target), *flags]
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=listen_to_ctrl_c,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"stopped\n"
    return process


def test_ctrl_c_leaves_everything_as_it_was(llama: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    assert convert(llama, target).code == 0
    before = contents(target)
    process = start(llama, target, "--bits", "4", "--overwrite")
    assert len(list(tmp_path.iterdir())) == 2
    process.send_signal(signal.SIGINT)
    code, err = end_of(process)
    assert code == 130
    assert err.endswith(b"interrupted\n")
    assert b"Traceback" not in err
    assert contents(target) == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_ctrl_c_that_a_library_keeps_to_itself_still_ends(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deaf(*args: Any) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        write(*args)

    write = writer_module.write_bytes
    monkeypatch.setattr(writer_module, "write_bytes", deaf)
    result = convert(llama, tmp_path / "out")
    assert result.code == 130
    assert result.err.endswith("interrupted\n")
    assert list(tmp_path.iterdir()) == []


def test_a_request_to_end_leaves_nothing_behind(llama: Path, tmp_path: Path) -> None:
    process = start(llama, tmp_path / "out")
    process.terminate()
    code, _ = end_of(process)
    assert code == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


def test_weights_that_the_source_links_to_are_not_overwritten(llama: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "out"
    assert convert(llama, target).code == 0
    shutil.copytree(llama, source)
    (source / "model.safetensors").rename(target / "weights.bin")
    (source / "model.safetensors").symlink_to(target / "weights.bin")
    before = contents(target)
    result = convert(source, target, "--overwrite")
    assert result.code == 2
    assert "weights.bin, which the source links to" in result.err
    assert contents(target) == before


def test_kill_leaves_no_folder_that_looks_whole(llama: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    process = start(llama, target)
    process.kill()
    process.communicate(timeout=30)
    assert not target.exists()
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".out.partial-")
    assert not (left / "config.json").exists()
    with pytest.raises(ModelNotFoundError, match="not a model folder"):
        inspect_folder(left)

    assert convert(llama, target).code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert len(manifest_of(target).modules) == 15


def run_process(*arguments: str, **options: Any) -> Conversion:
    """The command as users start it."""
    done = subprocess.run(
        [sys.executable, "-m", "turboquant_mlx.convert", *arguments],
        capture_output=True,
        text=True,
        **options,
    )
    return Conversion(Path(), done.returncode, done.stdout, done.stderr)


def test_a_file_size_limit_is_an_error_like_any_other(llama: Path, tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    arguments = ["--hf-path", str(llama), "--mlx-path", str(tmp_path / "out")]
    done = run_process(*arguments, preexec_fn=limit)
    assert_refused(done, "model.safetensors", "File too large")
    assert list(tmp_path.iterdir()) == []


def test_an_error_in_a_real_process(in_shards: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(in_shards, source)
    d.cut(SHARD, -1)(source)
    done = run_process("--hf-path", str(source), "--mlx-path", str(tmp_path / "out"))
    assert_refused(done, SHARD, "truncated")
    same = run(tmp_path / "out", ["--hf-path", str(source), "--mlx-path", str(tmp_path / "out")])
    assert done.messages == same.messages


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux")
def test_standard_output_that_is_full(llama: Path, tmp_path: Path) -> None:
    arguments = ["--no-balance", "--hf-path", str(llama), "--mlx-path", str(tmp_path / "out")]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "turboquant_mlx.convert", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert_refused(Conversion(Path(), done.returncode, "", done.stderr), "writing failed: No space")


def test_a_usage_error_is_one_line(llama: Path, tmp_path: Path) -> None:
    done = convert(llama, tmp_path / "out", "--no\nsuch\x1b[31m")
    assert_refused(done, "unrecognized arguments: --no such\\x1b[31m")

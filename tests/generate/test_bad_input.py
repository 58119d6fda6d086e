"""turboquant-generate on damaged folders: one line that names the damage, never an answer.

A model that runs with one tensor missing answers nonsense, and nobody can see why. So everything
that a folder promises is checked before the first weight is used.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mlx_lm.convert import convert as stock_convert

import damage as d
import tiny
from turboquant_mlx.checkpoint.loader import load_model
from turboquant_mlx.checkpoint.schema import MANIFEST_KEY, ModuleEntry
from turboquant_mlx.checkpoint.source import inspect_folder
from turboquant_mlx.convert.pipeline import convert
from turboquant_mlx.errors import CheckpointError

PREDECESSOR = Path(__file__).parents[1] / "fixtures" / "predecessor"
ASK = ("--prompt", "why does ice float?", "--temp", "0", "--max-tokens", "2", "--min-tokens", "2")

# q leads the rotation group of q, k and v
Q = "model.layers.0.self_attn.q_proj"
V = "model.layers.0.self_attn.v_proj"
DOWN = "model.layers.1.mlp.down_proj"
EMBEDDING = "model.embed_tokens"


def manifest(*path: str, to: object) -> d.Damage:
    return d.set_key(MANIFEST_KEY, *path, to=to)


def module(path: str, key: str, to: object) -> d.Damage:
    return manifest("modules", path, key, to=to)


# (what is wrong, the damage, words of the error)
DAMAGED = [
    # tensors
    ("codes are missing", d.remove_tensor(f"{V}.codes"), [f"{V}.codes", "is missing"]),
    ("scales are missing", d.remove_tensor(f"{V}.scales"), [f"{V}.scales", "is missing"]),
    ("a table is missing", d.remove_tensor(f"{V}.table"), [f"{V}.table", "is missing"]),
    ("signs are missing", d.remove_tensor(f"{Q}.multiplier"), [f"{Q}.multiplier", "is missing"]),
    ("a sketch is missing", d.remove_tensor(f"{V}.qjl_codes"), [f"{V}.qjl_codes", "is missing"]),
    ("norms are missing", d.remove_tensor(f"{V}.qjl_norms"), [f"{V}.qjl_norms", "is missing"]),
    (
        "signs of the sketch are missing",
        d.remove_tensor(f"{Q}.qjl_multiplier"),
        [f"{Q}.qjl_multiplier", "is missing"],
    ),
    (
        "scales of the embedding are missing",
        d.remove_tensor(f"{EMBEDDING}.scales"),
        [f"{EMBEDDING}.scales", "is missing"],
    ),
    ("a norm is missing", d.remove_tensor("model.norm.weight"), ["missing", "model.norm.weight"]),
    ("a bias is missing", d.remove_tensor(f"{V}.bias"), [f"{V}.bias", "is missing"]),
    (
        "a second multiplier in a group",
        d.add_tensor(f"{V}.multiplier", like=f"{Q}.multiplier"),
        [f"{V}.multiplier", "belongs to nothing"],
    ),
    (
        "a weight beside its codes",
        d.add_tensor(f"{V}.weight", like=f"{V}.codes"),
        [f"{V}.weight", "belongs to nothing"],
    ),
    (
        "a tensor of a module that is not there",
        d.add_tensor("model.layers.7.mlp.up_proj.codes", like=f"{V}.codes"),
        ["fit nothing in the model", "model.layers.7.mlp.up_proj.codes"],
    ),
    ("codes of another shape", d.drop_row(f"{V}.codes"), [f"{V}.codes", "[63, 12]", "[64, 12]"]),
    ("codes of another width", d.drop_row(f"{V}.codes", axis=1), [f"{V}.codes", "[64, 11]"]),
    ("scales of another shape", d.drop_row(f"{V}.scales", axis=1), [f"{V}.scales", "[64, 1]"]),
    ("signs of another length", d.drop_row(f"{Q}.multiplier"), [f"{Q}.multiplier", "[127]"]),
    ("a table of another length", d.drop_row(f"{V}.table"), [f"{V}.table", "[7]", "[8]"]),
    ("a norm of another length", d.drop_row("model.norm.weight"), ["model.norm.weight"]),
    (
        "codes of another type",
        d.change_header(f"{V}.codes", dtype="F32"),
        [f"{V}.codes", "F32", "U32"],
    ),
    (
        "a norm of whole numbers",
        d.change_header("model.norm.weight", dtype="I16"),
        ["model.norm.weight", "I16", "floating point"],
    ),
    # manifest
    ("9 bits", module(V, "bits", to=9), [V, "9"]),
    ("5 bits where the files have 3", module(V, "bits", to=5), [V, "5"]),
    ("bits in words", module(V, "bits", to="three"), [V, "bits"]),
    ("another group size", module(V, "group_size", to=32), [f"{V}.scales", "[64, 4]"]),
    ("a group size that does not divide", module(V, "group_size", to=48), [V, "48"]),
    ("an unknown kind", module(V, "kind", to="spline"), [V, "spline"]),
    ("an unknown code", module(V, "code", to="octal"), [V, "octal"]),
    ("an unknown scale layout", module(V, "scale_layout", to="float12"), [V, "float12"]),
    ("an unknown key", module(V, "colour", to="red"), [V, "colour"]),
    ("a missing key", d.remove_key(MANIFEST_KEY, "modules", V, "shape"), [V, "shape"]),
    ("another shape", module(V, "shape", to=[32, 128]), [V, "32"]),
    ("a rotation that does not divide", module(Q, "rotation_block", to=96), [Q, "96"]),
    ("another rotation than its group's", module(V, "rotation_block", to=64), [V, "64"]),
    ("an absent group", module(V, "rotation_group", to="model.nothing"), [V, "model.nothing"]),
    ("a group without a leader", module(V, "rotation_group", to=DOWN), [V, DOWN]),
    ("another bias", module(V, "bias", to=False), [f"{V}.bias"]),
    ("no sketch", module(V, "qjl", to=False), [V, "qjl"]),
    ("a forgotten module", d.remove_key(MANIFEST_KEY, "modules", V), [V]),
    (
        "a module that the model does not have",
        lambda folder: rename_module(folder, DOWN, "model.layers.1.mlp.out_proj"),
        ["model.layers.1.mlp.out_proj"],
    ),
    ("a later format", manifest("format_version", to=2), ["format version 2", "up to 1"]),
    ("a format in words", manifest("format_version", to="1"), ["format_version '1'"]),
    (
        "a head in a file that is absent",
        manifest("mtp", to={"file": "mtp.safetensors", "tensors": 3}),
        ["mtp.safetensors is missing, the manifest names it"],
    ),
    ("no modules", d.remove_key(MANIFEST_KEY, "modules"), ["modules"]),
    ("a manifest that is a list", d.set_key(MANIFEST_KEY, to=[]), [MANIFEST_KEY]),
    ("no manifest", d.remove_key(MANIFEST_KEY), ["config.json has no 'turboquant' block"]),
    # files
    ("a missing shard", d.remove("model-00002-*"), ["model-00002-of-", "is missing"]),
    ("a truncated shard", lambda folder: d.cut(second_shard(folder), -10)(folder), ["truncated"]),
    ("an empty shard", lambda folder: d.replace(second_shard(folder), b"")(folder), ["truncated"]),
    ("a stray weight file", d.replace("model-x.safetensors", b""), ["model-x.safetensors"]),
    (
        "an index out of the folder",
        d.in_index(f"{V}.codes", "../x.safetensors"),
        [f"{V}.codes", "../x.safetensors"],
    ),
    ("an index without a tensor", d.in_index(f"{V}.codes", None), [f"{V}.codes", "not in the"]),
    ("no config", d.remove("config.json"), ["is not a model folder", "config.json"]),
    ("half a config", d.cut("config.json", 500), ["config.json", "not valid JSON"]),
    ("another model type", d.set_key("model_type", to="zzz"), ["'zzz' is not supported"]),
    ("another number of layers", d.set_key("num_hidden_layers", to=1), ["layers.1."]),
    ("no layers", d.set_key("num_hidden_layers", to=0), ["num_hidden_layers 0 is not a positive"]),
    (
        "ten million layers",
        d.set_key("num_hidden_layers", to=10**7),
        ["num_hidden_layers is 10000000, but the weight files hold only"],
    ),
    ("another width", d.set_key("hidden_size", to=256), ["256"]),
    ("a negative width", d.set_key("hidden_size", to=-128), ["hidden_size -128 is not a positive"]),
    ("an epsilon in words", d.set_key("rms_norm_eps", to="1e-6"), ["rms_norm_eps is '1e-6', not"]),
    (
        "a base that is no number",
        d.set_key("rope_theta", to=float("nan")),
        ["rope_theta is nan, not a finite number above 0"],
    ),
    ("no tokenizer", d.remove("tokenizer*"), ["has no tokenizer"]),
    ("a broken tokenizer", d.replace("tokenizer.json", "{"), ["tokenizer", "cannot be read"]),
    ("broken defaults", d.replace("generation_config.json", "{"), ["generation_config.json"]),
    (
        "defaults that are a list",
        d.replace("generation_config.json", "[]"),
        ["generation_config.json: not a JSON object"],
    ),
]


def second_shard(folder: Path) -> str:
    return inspect_folder(folder).weight_files[1].name


def rename_module(folder: Path, old: str, new: str) -> None:
    """Call a module by another name everywhere in the folder."""

    def renamed(names: dict) -> None:
        for name in [name for name in names if name.rpartition(".")[0] == old]:
            names[name.replace(old, new)] = names.pop(name)

    for file in folder.glob("*.safetensors"):
        d.change_tensors(file, renamed)
    d.change_json(d.INDEX, lambda index: renamed(index["weight_map"]))(folder)

    def change(config: dict) -> None:
        modules = config[MANIFEST_KEY]["modules"]
        modules[new] = {**modules.pop(old), "rotation_group": new}

    d.change_json("config.json", change)(folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted model with everything that the format knows, in several shards."""
    place = tmp_path_factory.mktemp("converted")
    tiny.build_source(place / "source", "qwen2")
    options = {"codec": "scalar", "group_size": 64, "use_qjl": True, "quantize_extras": True}
    convert(place / "source", place / "whole", max_shard_bytes=60_000, **options)
    assert len(inspect_folder(place / "whole").weight_files) > 2
    return place / "whole"


def test_the_whole_folder_answers(run, whole):
    result = run("--model", str(whole), *ASK)
    assert result.code == 0
    assert "generated: 2 tokens" in result.err


@pytest.mark.parametrize(
    ("damage", "says"), [case[1:] for case in DAMAGED], ids=[case[0] for case in DAMAGED]
)
def test_a_damaged_folder(run, whole, tmp_path, damage, says):
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    damage(folder)
    result = run("--model", str(folder), *ASK)
    assert (result.code, result.out) == (2, "")
    error, *hint = [line for line in result.err.splitlines() if not line.startswith("note: ")]
    assert error.startswith("error: ")
    assert str(folder) in error or "model type" in error
    for words in says:
        assert words in error
    assert not error.endswith(".") or error.endswith(" ...")
    assert len(hint) <= 1
    assert all(line.startswith("hint: ") for line in hint)


def test_a_manifest_of_more_modules_than_the_files_hold(whole, tmp_path, monkeypatch):
    """Found by their names, before any entry is looked at: there may be very many."""
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    d.change_json(
        "config.json",
        lambda config: config[MANIFEST_KEY]["modules"].update(
            {f"model.layers.{i}.mlp.up_proj": {"kind": "linear"} for i in range(2, 1000)}
        ),
    )(folder)
    read = []
    monkeypatch.setattr(ModuleEntry, "from_dict", lambda *arguments: read.append(arguments))
    with pytest.raises(CheckpointError, match=r"layers\.2\.mlp\.up_proj\.codes is missing"):
        load_model(folder)
    assert read == []


def test_plain_weights_that_are_said_to_be_packed(run, source, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(source, folder)
    for block, says in (
        ({"quant_method": "awq"}, "quantization_config says awq, but no tensor of the weight"),
        ("awq", "config.json: quantization_config is not an object"),
    ):
        d.set_key("quantization_config", to=block)(folder)
        done = run("--model", str(folder), *ASK)
        assert (done.code, done.out) == (2, "")
        assert f"error: {folder}: " in done.err
        assert says in done.err


@pytest.mark.parametrize(
    ("tensor", "dtype", "size", "is_said"),
    [
        ("model.layers.0.mlp.up_proj.weight", "I8", 1, "int8"),
        ("model.layers.1.self_attn.o_proj.weight", "F8_E4M3", 1, "uint8"),
        ("model.embed_tokens.weight", "U32", 4, "uint32"),
        ("lm_head.weight", "C64", 8, "complex64"),
        ("model.norm.weight", "BOOL", 1, "bool"),
    ],
)
def test_plain_weights_that_are_not_floating_point(
    run, source, tmp_path, tensor, dtype, size, is_said
):
    folder = tmp_path / "model"
    shutil.copytree(source, folder)
    d.retype(tensor, dtype, size)(folder)
    done = run("--model", str(folder), *ASK)
    assert (done.code, done.out) == (2, "")
    assert f"error: {folder}: {tensor} is {is_said}, not floating point\n" in done.err


@pytest.mark.parametrize("mode", ["affine", "mxfp4", "nvfp4"])
def test_weights_that_mlx_quantized_are_fine(run, source, tmp_path, mode):
    folder = tmp_path / "model"
    assert stock_convert(str(source), str(folder), quantize=True, q_mode=mode) is None
    assert run("--model", str(folder), *ASK).code == 0


@pytest.mark.parametrize("token", [tiny.VOCAB_SIZE, 400_000_000])
def test_tokens_that_the_model_has_no_embedding_for(run, source, whole, tmp_path, token):
    added = {"id": token, "content": "<|far|>", "normalized": False, "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip"), False)

    def change(tokens: dict) -> None:
        tokens["model"]["vocab"]["<|far|>"] = token
        tokens["added_tokens"].append(added | flags)

    for name, original in (("plain", source), ("ours", whole)):
        folder = tmp_path / name
        shutil.copytree(original, folder)
        d.change_json("tokenizer.json", change)(folder)
        assert run("--model", str(folder), *ASK).code == 0
        done = run("--model", str(folder), *ASK[2:], "--prompt", "hi <|far|> there")
        assert (done.code, done.out) == (2, "")
        assert f"error: {folder}: the tokenizer gives the token {token} ('<|far|>')" in done.err
        assert f"but the model has tokens up to {tiny.VOCAB_SIZE - 1} only" in done.err
        done = run("--model", str(folder), *ASK, "--stop", "<|far|>")
        assert (done.code, done.out) == (2, "")
        assert f"error: --stop '<|far|>' is the token {token}, " in done.err


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("model_type", "x", "model type 'x' is not supported"),
        ("num_hidden_layers", 2.5, "num_hidden_layers 2.5 is not a positive whole number"),
        ("vocab_size", 0, "vocab_size 0 is not a positive whole number"),
        ("head_dim", "x", "head_dim 'x' is not a positive whole number"),
        ("hidden_size", 0, "hidden_size 0 is not a positive whole number"),
        ("rms_norm_eps", None, "config.json does not describe a model of type 'llama'"),
        ("architectures", 8, "config.json does not describe a model of type 'llama'"),
        ("rms_norm_eps", "x", "rms_norm_eps is 'x', not a finite number"),
    ],
)
def test_a_predecessor_folder_with_a_bad_config(run, tmp_path, key, value, says):
    """Its affine modules are looked up in the model, which is built from the config first."""
    folder = tmp_path / "model"
    shutil.copytree(PREDECESSOR / "quantize-extras", folder)
    d.set_key(key, to=value)(folder)
    done = run("--model", str(folder), *ASK)
    assert (done.code, done.out) == (2, "")
    assert "error: " in done.err
    assert says in done.err


def test_a_config_that_only_running_the_model_shows_to_be_bad(run, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(PREDECESSOR / "dense-4bit-g128-qjl", folder)
    d.set_key("rope_theta", to=None)(folder)
    done = run("--model", str(folder), *ASK)
    assert (done.code, done.out) == (2, "")
    assert f"error: {folder}: the model cannot be run: [rope] Neither base" in done.err


def test_a_folder_whose_name_is_not_text(run, source, tmp_path):
    folder = tmp_path / "a\udcffb"
    try:
        shutil.copytree(source, folder)
    except OSError:
        pytest.skip("the file system takes UTF-8 only")
    done = run("--model", str(folder), *ASK)
    assert (done.code, done.out) == (2, "")
    assert "the name is not valid UTF-8, MLX cannot open it\nhint: rename the folder" in done.err


def test_a_damaged_folder_in_a_real_process(whole, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    d.remove_tensor(f"{V}.scales")(folder)
    done = subprocess.run(
        [sys.executable, "-m", "turboquant_mlx.generate", "--model", str(folder), *ASK],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {folder}: tensor {V}.scales is missing\n"


@pytest.mark.parametrize("tensor", [f"{V}.table", f"{Q}.multiplier", "model.norm.weight"])
def test_values_that_are_not_numbers(run, whole, tmp_path, tensor):
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    d.overwrite_values(tensor, b"\xff" * 8)(folder)
    done = run("--model", str(folder), *ASK)
    assert done.code == 2
    assert done.out == ""
    assert f"error: {folder}: the model computes values that are not numbers" in done.err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--stop", "9" * 5000], "is not a token id of this model"),
        (["--stop", "\udcff"], "--stop is not valid UTF-8 text"),
        (["--rep-ctx", str(10**30), "--rep-penalty", "1.1"], "must be at most"),
    ],
    ids=["a stop of many digits", "a stop that is no text", "a context beyond all bounds"],
)
def test_options_beyond_all_bounds(run, whole, options, says):
    done = run("--model", str(whole), *ASK, *options)
    assert done.code == 2
    assert done.out == ""
    assert says in done.err


def test_a_tokenizer_that_fails_on_the_prompt(run, whole, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    d.replace("tokenizer_config.json", '{"model_max_length": "x"}')(folder)
    d.remove("chat_template.jinja")(folder)
    done = run("--model", str(folder), *ASK)
    assert done.code == 2
    assert "error: the model's tokenizer fails: " in done.err


def test_a_text_config_that_is_a_number(run, whole, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    d.set_key("text_config", to=5)(folder)
    assert run("--model", str(folder), *ASK).code == 0


def test_closed_standard_output(whole):
    done = subprocess.run(
        [sys.executable, "-m", "turboquant_mlx.generate", "--model", str(whole), *ASK],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: os.close(1),
    )
    assert done.returncode == 0
    assert "Traceback" not in done.stderr


def test_no_folder_for_temporary_files(whole):
    done = subprocess.run(
        [sys.executable, "-m", "turboquant_mlx.generate", "--model", str(whole), *ASK],
        capture_output=True,
        text=True,
        env=os.environ | {"TMPDIR": "/nothing"},
    )
    # MLX needs it only where it compiles for the CPU
    assert done.returncode in (0, 2)
    assert "Traceback" not in done.stderr

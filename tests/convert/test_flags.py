"""Every option of turboquant-convert changes what it says that it changes, and nothing else.

Each test converts the same source with and without the option and compares stored bytes, manifest
or behaviour. ``EFFECTS`` lists them by option: an option that is added to the parser without a test
here makes ``test_every_option_is_tested`` fail.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest

import tiny
from converting import (
    Workshop,
    arrays,
    config_of,
    contents,
    convert,
    manifest_of,
    modules_that_differ,
    packed_weight,
    run,
    stored,
    write_model,
)
from turboquant_mlx.checkpoint.loader import load_model
from turboquant_mlx.convert import source_model
from turboquant_mlx.convert.command import build_parser
from turboquant_mlx.errors import UnsupportedModelError
from turboquant_mlx.layers.install import set_qjl
from turboquant_mlx.quant.weight import dequantize_weight

EFFECTS: dict[str, list[str]] = {}

# Options that do nothing without another one, or only in a model with experts.
COMPANIONS = {
    "protect_bits": ["--protect-expert-layers", "1"],
    "extras_bits": ["--quantize-extras"],
    "extras_group_size": ["--quantize-extras"],
    # in this model a rotation block is no longer than the longest group
    "rotation": ["--group-size", "32"],
}
CHOICES = [
    (action.dest, action.option_strings[0], [str(choice) for choice in action.choices])
    for action in build_parser()._actions
    if action.choices is not None
]
ON_EXPERTS = [
    ["--ternary-experts"],
    ["--expert-down-bits", "4"],
    ["--protect-expert-layers", "0"],
    ["--protect-expert-layers", "0", "--protect-bits", "4"],
]


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """Without the trellis search, which takes most of the time of a model this small."""
    return Workshop(tmp_path_factory.mktemp("workshop"), codec="scalar")


def shows(*options: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Mark a test as one that shows the effect of these options (names in the namespace)."""

    def register(test: Callable[..., Any]) -> Callable[..., Any]:
        for option in options:
            EFFECTS.setdefault(option, []).append(test.__name__)
        return test

    return register


def quantized(folder: Path, part: str = "") -> set[str]:
    """Quantized modules whose path contains ``part``."""
    return {path for path in manifest_of(folder).modules if part in path}


def experts(folder: Path, *layers: int) -> set[str]:
    paths = quantized(folder, ".switch_mlp.")
    return {p for p in paths if not layers or int(p.split(".")[2]) in layers}


def test_every_option_is_tested() -> None:
    options = {action.dest for action in build_parser()._actions} - {"help"}
    assert set(EFFECTS) == options


@pytest.mark.parametrize(("dest", "flag", "choices"), CHOICES, ids=[dest for dest, *_ in CHOICES])
def test_each_choice_gives_other_bytes(
    workshop: Workshop, moe: Path, dest: str, flag: str, choices: list[str]
) -> None:
    with_it = COMPANIONS.get(dest, [])
    results = [
        contents(workshop.converted(moe, *with_it, flag, choice).folder)["model.safetensors"]
        for choice in choices
    ]
    assert len(set(results)) == len(choices)


# --- source and target ------------------------------------------------------------------------


@shows("hf_path")
def test_hf_path_names_the_source(workshop: Workshop, llama: Path, tmp_path: Path) -> None:
    other = workshop.source("llama", seed=1)
    a, b = (workshop.converted(source, "--codec", "trellis").folder for source in (llama, other))
    assert modules_that_differ(a, b) >= quantized(a)
    target = tmp_path / "c"
    same = run(target, ["--model", str(llama), "--mlx-path", str(target), "--no-balance"])
    assert contents(same.folder)["model.safetensors"] == contents(a)["model.safetensors"]


@shows("mlx_path")
def test_mlx_path_names_the_target(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert convert(llama, Path("here"), "--no-balance").code == 0
    assert run(Path("mlx_model"), ["--hf-path", str(llama), "--no-balance"]).code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "mlx_model"]


@shows("overwrite")
def test_overwrite_replaces_the_whole_folder(llama: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    assert convert(llama, target, "--bits", "2").code == 0
    (target / "left-over.txt").write_text("from the first conversion")
    before = contents(target)
    refused = convert(llama, target, "--bits", "4")
    assert refused.code == 2
    assert refused.messages[-2].startswith(f"error: {target} exists")
    assert contents(target) == before

    assert convert(llama, target, "--bits", "4", "--overwrite").code == 0
    assert manifest_of(target).options["bits"] == 4
    assert "left-over.txt" not in contents(target)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@shows("json")
def test_json_prints_the_summary_for_machines(workshop: Workshop, llama: Path) -> None:
    done = workshop.converted(llama, "--json")
    report = json.loads(done.out)
    plain = workshop.converted(llama)
    assert report["parameters"] == 320_128
    assert report["stored_bytes"] == sum(len(data) for *_, data in stored(done.folder).values())
    assert modules_that_differ(done.folder, plain.folder) == set()
    with pytest.raises(ValueError, match="Expecting value"):
        json.loads(plain.out)


def give_tokenizer_code(folder: Path) -> None:
    """Make the tokenizer a class of its own; running its code sets a variable."""
    code = (
        "import os\n"
        "from transformers import PreTrainedTokenizerFast\n"
        "os.environ['TOKENIZER_CODE_RAN'] = 'yes'\n"
        "class OwnTokenizer(PreTrainedTokenizerFast):\n"
        "    pass\n"
    )
    (folder / "tokenization_own.py").write_text(code)
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config["tokenizer_class"] = "OwnTokenizer"
    config["auto_map"] = {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]}
    file.write_text(json.dumps(config))


def rewrite(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps(config_of(folder) | changes))


@pytest.fixture
def code_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """Whether tokenizer code has run since the last question."""
    # transformers copies such code into its cache and imports it from there
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    monkeypatch.setenv("TOKENIZER_CODE_RAN", "")

    def asked() -> bool:
        ran = bool(os.environ["TOKENIZER_CODE_RAN"])
        os.environ["TOKENIZER_CODE_RAN"] = ""
        return ran

    return asked


@shows("trust_remote_code")
def test_trust_remote_code_lets_tokenizer_code_run(
    tmp_path: Path, code_ran: Callable[[], bool]
) -> None:
    source = tmp_path / "source"
    tiny.build_source(source, "llama")
    give_tokenizer_code(source)
    refused = convert(source, tmp_path / "out")
    assert refused.code == 2
    assert refused.messages[-2].endswith("needs code of its own to run")
    assert refused.messages[-1].startswith("hint: --trust-remote-code allows that")
    assert not code_ran()

    trusted = convert(source, tmp_path / "out", "--trust-remote-code")
    assert trusted.code == 0
    assert code_ran()
    assert "tokenization_own.py" in contents(trusted.folder)


@shows("trust_remote_code")
def test_the_tokenizer_of_a_local_kimi_k3_needs_no_trust(
    tmp_path: Path, code_ran: Callable[[], bool]
) -> None:
    source = tmp_path / "source"
    write_model(source, KIMI_K3)
    give_tokenizer_code(source)
    assert convert(source, tmp_path / "out", "--no-balance").code == 0
    assert code_ran()


@shows("trust_remote_code")
def test_the_tokenizer_of_a_kimi_k3_from_the_hub_needs_trust(
    tmp_path: Path, code_ran: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    write_model(source, KIMI_K3)
    give_tokenizer_code(source)
    monkeypatch.setattr(source_model, "resolve", lambda name: source)
    refused = convert("owner/kimi", tmp_path / "out", "--no-balance")
    assert refused.code == 2
    assert refused.messages[-1].startswith("hint: --trust-remote-code allows that")
    assert not code_ran()
    trusted = convert("owner/kimi", tmp_path / "out", "--no-balance", "--trust-remote-code")
    assert trusted.code == 0
    assert code_ran()


KIMI_K3 = {
    "model_type": "kimi_k3",
    "text_config": {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 32,
        "linear_attn_config": {"kda_layers": [], "full_attn_layers": [1]},
        "vocab_size": tiny.VOCAB_SIZE,
    },
}


@shows("trust_remote_code")
def test_trust_remote_code_lets_a_model_file_run(
    workshop: Workshop, llama: Path, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(llama, source)
    rewrite(source, model_type="own_type", model_file="own_model.py")
    (source / "own_model.py").write_text("from mlx_lm.models.llama import Model, ModelArgs\n")
    refused = convert(source, tmp_path / "out")
    assert refused.code == 2
    assert "needs code of its own (own_model.py)" in refused.messages[-2]
    folder = convert(source, tmp_path / "out", "--no-balance", "--trust-remote-code").folder
    with pytest.raises(UnsupportedModelError, match=r"needs code of its own \(own_model.py\)"):
        load_model(folder)
    ids = mx.array([tiny.token_ids()])
    ours, _ = load_model(folder, trust_remote_code=True)
    stock, _ = mlx_lm.load(str(folder), trust_remote_code=True)
    known, _ = load_model(workshop.converted(llama, "--codec", "trellis").folder)
    assert mx.array_equal(ours(ids), known(ids))
    assert mx.array_equal(stock(ids), known(ids))


@shows("keep_mtp")
def test_keep_mtp_copies_the_head(workshop: Workshop, tmp_path: Path) -> None:
    head = {
        "mtp.fc.weight": mx.random.normal((128, 256)).astype(mx.bfloat16),
        "mtp.layers.0.self_attn.q_proj.weight": mx.random.normal((128, 128)).astype(mx.bfloat16),
        "mtp.norm.weight": mx.ones(128),
    }
    source = tmp_path / "source"
    write_model(source, QWEN3_5, extra=head)
    without, with_it = (workshop.converted(source, *flags) for flags in ([], ["--keep-mtp"]))
    assert any("multi-token-prediction head is dropped" in note for note in without.notes)
    assert "mtp.safetensors" not in contents(without.folder)
    assert without.out.count("mtp ") == 1

    assert modules_that_differ(without.folder, with_it.folder) == set()
    kept = mx.load(str(with_it.folder / "mtp.safetensors"))
    assert kept.keys() == head.keys()
    for name, value in head.items():
        assert kept[name].dtype == value.dtype
        assert mx.array_equal(kept[name], value)
    mtp = manifest_of(with_it.folder).mtp
    assert mtp is not None
    assert (mtp.file, mtp.tensors) == ("mtp.safetensors", 3)
    assert not any("multi-token" in note for note in with_it.notes)
    assert "mtp " not in with_it.out


QWEN3_5 = {
    "model_type": "qwen3_5",
    "text_config": {
        "model_type": "qwen3_5_text",
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "full_attention_interval": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "vocab_size": tiny.VOCAB_SIZE,
        "tie_word_embeddings": False,
    },
}


@shows("keep_mtp")
def test_keep_mtp_without_a_head_says_so(workshop: Workshop, llama: Path) -> None:
    done = workshop.converted(llama, "--keep-mtp")
    assert "note: --keep-mtp has no effect: the source has no such head" in done.notes
    assert modules_that_differ(done.folder, workshop.converted(llama).folder) == set()


@shows("streaming")
def test_streaming_gives_the_same_bytes(workshop: Workshop, moe: Path) -> None:
    plain = workshop.converted(moe, balanced=True)
    streamed = workshop.converted(moe, "--streaming", balanced=True)
    assert stored(plain.folder) == stored(streamed.folder)
    assert manifest_of(plain.folder).modules == manifest_of(streamed.folder).modules


@shows("streaming")
def test_streaming_keeps_no_cache_of_freed_buffers(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[int] = []
    real = mx.set_cache_limit

    def watched(limit: int) -> int:
        limits.append(limit)
        return real(limit)

    monkeypatch.setattr(mx, "set_cache_limit", watched)
    assert convert(llama, tmp_path / "plain", "--no-balance").code == 0
    assert limits == []
    assert convert(llama, tmp_path / "streamed", "--no-balance", "--streaming").code == 0
    assert limits[0] == 0
    assert limits[-1] > 0


# --- how weights are stored ---------------------------------------------------------------------


@shows("bits")
@pytest.mark.parametrize("bits", [2, 4])
def test_bits(workshop: Workshop, moe: Path, bits: int) -> None:
    base = workshop.converted(moe).folder
    changed = workshop.converted(moe, "--bits", str(bits)).folder
    assert modules_that_differ(base, changed) == quantized(base)
    assert {entry.bits for entry in manifest_of(base).modules.values()} == {3}
    assert {entry.bits for entry in manifest_of(changed).modules.values()} == {bits}
    assert config_of(changed)["quantization_config"]["bits"] == bits


@shows("target_bpw")
def test_target_bpw_mixes_widths(workshop: Workshop, moe: Path) -> None:
    done = workshop.converted(moe, "--target-bpw", "3.2", balanced=True)
    assert len({entry.bits for entry in manifest_of(done.folder).modules.values()}) > 1


@shows("codec")
def test_codec_scalar(workshop: Workshop, moe: Path) -> None:
    base = workshop.converted(moe, "--codec", "trellis").folder
    changed = workshop.converted(moe, "--codec", "scalar").folder
    assert modules_that_differ(base, changed) == quantized(base)
    for path, entry in manifest_of(base).modules.items():
        assert (entry.bits, entry.window_bits) == (3, 8)
        # one small scale for each rotation block of a row
        assert (entry.group_size, entry.scale_layout) == (entry.rotation_block, "log8")
        assert stored(base)[f"{path}.table"][1] == (256,)
    assert config_of(base)["quantization_config"]["group_size"] in (64, 128)
    entries = manifest_of(changed).modules.values()
    assert {(e.window_bits, e.group_size, e.scale_layout) for e in entries} == {(3, 32, "log8")}
    assert config_of(changed)["quantization_config"]["group_size"] == 32
    losses = []
    for folder in (base, changed):
        path = "model.layers.0.self_attn.q_proj"
        made = dequantize_weight(packed_weight(folder, path))
        exact = arrays(moe)[f"{path}.weight"].astype(mx.float32)
        losses.append(((made - exact).square().sum() / exact.square().sum()).item())
    assert losses[0] < 0.85 * losses[1]


def test_ternary_experts_are_no_trellis(workshop: Workshop, moe: Path) -> None:
    base = workshop.converted(moe, "--ternary-experts", "--codec", "trellis").folder
    changed = workshop.converted(moe, "--ternary-experts", "--codec", "scalar").folder
    assert modules_that_differ(base, changed) == quantized(base) - experts(base)


@shows("group_size")
@pytest.mark.parametrize("codec", ["trellis", "scalar"])
def test_group_size(workshop: Workshop, moe: Path, codec: str) -> None:
    base = workshop.converted(moe, "--codec", codec, "--group-size", "32").folder
    changed = workshop.converted(moe, "--codec", codec, "--group-size", "64").folder
    assert modules_that_differ(base, changed) == quantized(base)
    for folder, size in ((base, 32), (changed, 64)):
        assert {entry.group_size for entry in manifest_of(folder).modules.values()} == {size}
        scales = stored(folder)["model.layers.0.self_attn.q_proj.scales"]
        assert scales[:2] == ("U8", (128, 128 // size))


@shows("attn_bits")
def test_attn_bits(workshop: Workshop, moe: Path) -> None:
    base = workshop.converted(moe).folder
    changed = workshop.converted(moe, "--attn-bits", "4").folder
    attention = quantized(base, ".self_attn.")
    assert len(attention) == 12
    assert modules_that_differ(base, changed) == attention
    assert {manifest_of(changed).modules[path].bits for path in attention} == {4}


@shows("mlp_bits")
def test_mlp_bits_reach_mlps_and_experts(workshop: Workshop, moe: Path) -> None:
    base = workshop.converted(moe).folder
    changed = workshop.converted(moe, "--mlp-bits", "2").folder
    mlps = quantized(base, ".mlp.")
    assert len(mlps) == 9
    assert modules_that_differ(base, changed) == mlps
    assert {manifest_of(changed).modules[path].bits for path in mlps} == {2}


@shows("mlp_group_size")
def test_mlp_group_size(workshop: Workshop, moe: Path) -> None:
    base = workshop.converted(moe).folder
    changed = workshop.converted(moe, "--mlp-group-size", "16").folder
    mlps = quantized(base, ".mlp.")
    assert modules_that_differ(base, changed) == mlps
    assert {manifest_of(changed).modules[path].group_size for path in mlps} == {16}


@shows("rotation")
def test_rotation_changes_the_blocks(workshop: Workshop, moe: Path) -> None:
    blocks = {}
    for rotation in ("hadamard", "blockwise_hadamard", "none"):
        done = workshop.converted(moe, "--group-size", "32", "--rotation", rotation)
        entries = manifest_of(done.folder).modules.values()
        blocks[rotation] = {(entry.width, entry.rotation_block) for entry in entries}
    # 192 = 12 * 2**4 is one block; a group of 32 holds one block of 32
    assert blocks == {
        "hadamard": {(64, 64), (128, 128), (192, 192)},
        "blockwise_hadamard": {(64, 32), (128, 32), (192, 32)},
        "none": {(64, 1), (128, 1), (192, 1)},
    }
    multipliers = arrays(workshop.converted(moe, "--rotation", "none").folder)
    for name, value in multipliers.items():
        if name.endswith(".multiplier"):
            assert (value > 0).all().item()  # no signs where nothing is mixed


@shows("rotation_seed")
def test_rotation_seed_draws_other_signs(workshop: Workshop, moe: Path) -> None:
    base = workshop.converted(moe).folder
    changed = workshop.converted(moe, "--rotation-seed", "7").folder
    assert modules_that_differ(base, changed) == quantized(base)
    assert manifest_of(base).modules == manifest_of(changed).modules
    before, after = arrays(base), arrays(changed)
    for name in (name for name in before if name.endswith(".multiplier")):
        assert mx.array_equal(mx.abs(before[name]), mx.abs(after[name]))
        assert not mx.array_equal(before[name], after[name])


@shows("balance")
def test_balancing_scales_the_channels(workshop: Workshop, moe: Path) -> None:
    balanced = workshop.converted(moe, balanced=True).folder
    without = workshop.converted(moe).folder
    assert modules_that_differ(balanced, without) == quantized(without)
    assert manifest_of(balanced).modules == manifest_of(without).modules
    scaled, plain = arrays(balanced), arrays(without)
    for name in (name for name in plain if name.endswith(".multiplier")):
        assert set(plain[name].tolist()) == {-1.0, 1.0}
        assert mx.array_equal(mx.sign(scaled[name]), plain[name])
        sizes = mx.abs(scaled[name])
        assert (sizes.max() > 1.1 * sizes.min()).item()


@shows("balance_text")
def test_balance_text_is_what_the_channels_are_measured_on(
    workshop: Workshop, llama: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("0 1 2 3 4 5 6 7 8 9 " * 99)
    base = workshop.converted(llama, balanced=True).folder
    changed = workshop.converted(llama, "--balance-text", str(text), balanced=True).folder
    assert modules_that_differ(base, changed) == quantized(base)
    done = convert(llama, tmp_path / "out", "--balance-text", str(tmp_path / "nothing.txt"))
    assert done.code == 2
    assert "nothing.txt" in done.messages[0]


@shows("error_feedback")
def test_error_feedback_rounds_every_layer_anew(workshop: Workshop, llama: Path) -> None:
    base = workshop.converted(llama).folder
    changed = workshop.converted(llama, "--error-feedback").folder
    assert modules_that_differ(base, changed) == quantized(base)
    assert manifest_of(base).modules == manifest_of(changed).modules
    before, after = arrays(base), arrays(changed)
    for name in (name for name in before if name.endswith(".multiplier")):
        assert mx.array_equal(before[name], after[name])


@shows("feedback_text")
def test_feedback_text_is_what_it_is_made_for(
    workshop: Workshop, llama: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("0 1 2 3 4 5 6 7 8 9 " * 99)
    own = workshop.converted(llama, "--error-feedback").folder
    changed = workshop.converted(llama, "--error-feedback", "--feedback-text", str(text)).folder
    assert modules_that_differ(own, changed) == quantized(own)


@shows("use_qjl")
def test_use_qjl_stores_a_sketch_of_every_weight(workshop: Workshop, moe: Path) -> None:
    base = workshop.converted(moe).folder
    changed = workshop.converted(moe, "--use-qjl").folder
    assert modules_that_differ(base, changed) == quantized(base)
    tensors = stored(changed)
    for path, entry in manifest_of(changed).modules.items():
        assert entry.qjl
        assert tensors[f"{path}.qjl_codes"][1][:-1] == entry.shape[:-1]
    assert experts(changed)  # experts too

    model, _ = load_model(changed)
    ids = mx.array([tiny.token_ids()])
    whole = model(ids)
    assert set_qjl(model, False) == len(quantized(changed))
    assert not mx.array_equal(whole, model(ids))


@shows("dtype")
def test_dtype_casts_the_model_first(workshop: Workshop, tmp_path: Path) -> None:
    source = workshop.source("qwen2", dtype="float32")
    base = workshop.converted(source).folder
    changed = workshop.converted(source, "--dtype", "bfloat16").folder
    assert {kind for kind, *_ in stored(base).values()} == {"U8", "U32", "F16", "F32"}
    assert {kind for kind, *_ in stored(changed).values()} == {"U8", "U32", "F16", "F32", "BF16"}
    before, after = arrays(base), arrays(changed)
    for name in ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.bias"):
        assert after[name].dtype == mx.bfloat16
        assert mx.array_equal(after[name], before[name].astype(mx.bfloat16))
    assert config_of(changed)["dtype"] == "bfloat16"
    # the weights that get quantized are cast as well: as if the source had been bfloat16
    in_bfloat16 = workshop.converted(workshop.source("qwen2", dtype="bfloat16")).folder
    assert modules_that_differ(changed, in_bfloat16) == set()


# --- routed experts -----------------------------------------------------------------------------


@shows("ternary_experts")
def test_ternary_experts(workshop: Workshop, moe: Path) -> None:
    base = workshop.converted(moe).folder
    changed = workshop.converted(moe, "--ternary-experts").folder
    assert modules_that_differ(base, changed) == experts(base)
    entries = manifest_of(changed).modules
    assert {entries[path].code for path in experts(base)} == {"ternary"}
    shape = stored(changed)["model.layers.1.mlp.switch_mlp.up_proj.codes"][1]
    assert shape == (8, 64, 7)  # 128 weights of 20 trits a word


@shows("expert_down_bits")
def test_expert_down_bits(workshop: Workshop, moe: Path) -> None:
    base = workshop.converted(moe, "--ternary-experts").folder
    changed = workshop.converted(moe, "--ternary-experts", "--expert-down-bits", "4").folder
    down = {path for path in experts(base) if path.endswith("down_proj")}
    assert len(down) == 2
    assert modules_that_differ(base, changed) == down
    assert {manifest_of(changed).modules[path].bits for path in down} == {4}


@shows("protect_expert_layers")
def test_protect_expert_layers(workshop: Workshop, moe: Path) -> None:
    flags = ["--ternary-experts", "--mlp-group-size", "32"]
    base = workshop.converted(moe, *flags).folder
    changed = workshop.converted(moe, *flags, "--protect-expert-layers", "2").folder
    assert modules_that_differ(base, changed) == experts(base, 2)
    entries = manifest_of(changed).modules
    assert {(entries[p].code, entries[p].bits) for p in experts(base, 2)} == {("scalar", 3)}
    assert {entries[p].group_size for p in experts(base)} == {32}


@shows("protect_expert_layers")
def test_protecting_a_layer_without_experts_warns(workshop: Workshop, moe: Path) -> None:
    done = workshop.converted(moe, "--ternary-experts", "--protect-expert-layers", "0,2,7")
    assert done.warnings == [
        "warning: --protect-expert-layers: nothing to protect in layers 0, 7, the experts of this "
        "model are in layers 1-2"
    ]


@shows("protect_bits")
def test_protect_bits(workshop: Workshop, moe: Path) -> None:
    flags = ["--mlp-bits", "2", "--protect-expert-layers", "1"]
    base = workshop.converted(moe, *flags).folder
    changed = workshop.converted(moe, *flags, "--protect-bits", "4").folder
    assert modules_that_differ(base, changed) == experts(base, 1)
    assert {manifest_of(changed).modules[path].bits for path in experts(base, 1)} == {4}


@shows("expert_layer_tiers")
def test_expert_layer_tiers(workshop: Workshop, moe: Path, tmp_path: Path) -> None:
    tiers = tmp_path / "tiers.json"
    tiers.write_text('{"1": "ternary", "2": "4"}')
    base = workshop.converted(moe).folder
    changed = workshop.converted(moe, "--expert-layer-tiers", str(tiers)).folder
    assert modules_that_differ(base, changed) == experts(base)
    entries = manifest_of(changed).modules
    assert {entries[path].code for path in experts(base, 1)} == {"ternary"}
    assert {entries[path].bits for path in experts(base, 2)} == {4}


@shows("expert_layer_tiers")
def test_a_tier_for_a_layer_without_experts_is_refused(moe: Path, tmp_path: Path) -> None:
    tiers = tmp_path / "tiers.json"
    tiers.write_text('{"0": "4"}')
    done = convert(moe, tmp_path / "out", "--expert-layer-tiers", str(tiers))
    assert done.code == 2
    assert done.messages == [
        "error: --expert-layer-tiers names layer 0, which has no experts",
        "hint: the experts of this model are in layers 1-2",
    ]


@pytest.mark.parametrize("flags", ON_EXPERTS, ids=" ".join)
def test_expert_options_on_a_dense_model_change_nothing(
    workshop: Workshop, llama: Path, flags: list[str]
) -> None:
    done = workshop.converted(llama, *flags)
    assert f"note: {flags[0]} has no effect on this model: it has no experts" in done.err
    assert modules_that_differ(done.folder, workshop.converted(llama).folder) == set()


# --- everything else ----------------------------------------------------------------------------


@shows("quantize_extras")
def test_quantize_extras_makes_embeddings_affine(workshop: Workshop, moe: Path) -> None:
    base = workshop.converted(moe).folder
    changed = workshop.converted(moe, "--quantize-extras").folder
    assert modules_that_differ(base, changed) == {"model.embed_tokens"}
    entry = manifest_of(changed).modules["model.embed_tokens"]
    assert (entry.kind, entry.bits, entry.group_size) == ("affine_embedding", 4, 64)
    wanted = mx.quantize(arrays(base)["model.embed_tokens.weight"], group_size=64, bits=4)
    got = arrays(changed)
    for suffix, value in zip(("weight", "scales", "biases"), wanted, strict=True):
        assert mx.array_equal(got[f"model.embed_tokens.{suffix}"], value)


@shows("extras_bits")
def test_extras_bits(workshop: Workshop, moe: Path) -> None:
    base = workshop.converted(moe, "--quantize-extras").folder
    changed = workshop.converted(moe, "--quantize-extras", "--extras-bits", "8").folder
    assert modules_that_differ(base, changed) == {"model.embed_tokens"}
    assert manifest_of(changed).modules["model.embed_tokens"].bits == 8


@shows("extras_group_size")
def test_extras_group_size(workshop: Workshop, moe: Path) -> None:
    base = workshop.converted(moe, "--quantize-extras").folder
    changed = workshop.converted(moe, "--quantize-extras", "--extras-group-size", "32").folder
    assert modules_that_differ(base, changed) == {"model.embed_tokens"}
    assert manifest_of(changed).modules["model.embed_tokens"].group_size == 32

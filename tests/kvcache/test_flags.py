"""Every --kv flag of turboquant-generate changes bytes, or is refused with the reason."""

from __future__ import annotations

import re
import shutil

import pytest

from tiny import build_source
from turboquant_mlx.generate import command
from turboquant_mlx.kvcache import spec
from turboquant_mlx.kvcache.spec import VARIABLES

TOKENS = 90


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "llama"
    build_source(path, "llama", dtype="bfloat16")
    return path


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for variable in VARIABLES.values():
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def run(capsys):
    def run(model, *options: str, tokens: int = TOKENS):
        capsys.readouterr()
        argv = ["--model", str(model), "--prompt", "why does ice float?", "--temp", "0"]
        argv += ["--max-tokens", str(tokens), "--min-tokens", str(tokens), *options]
        try:
            code = command.main(argv)
        except SystemExit as stop:
            code = stop.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture(scope="module")
def measured() -> dict[str, float]:
    """What was measured once for all tests."""
    return {}


@pytest.fixture
def usual(folder, run, measured) -> float:
    """kB of a cache of 4 bits."""
    if not measured:
        measured["usual"] = held(run(folder, "--kv-bits", "4")[2])
    return measured["usual"]


def held(err: str) -> float:
    """kB of the report's first figure."""
    number, unit = re.search(r"key-value cache: ([\d.]+) (kB|MB)", err).groups()
    return float(number) * (1000 if unit == "MB" else 1)


def test_the_report_shows_real_bytes_and_what_16_bits_would_take(folder, run):
    code, _, err = run(folder)
    assert code == 0
    assert "not packed" in err
    plain = held(err)
    code, out, err = run(folder, "--kv-bits", "3.5")
    assert code == 0 and out
    assert re.search(r"kB of it spare\), \d+ kB for the same tokens in 16 bits; 2 of 2 layers", err)
    assert held(err) < plain / 3


FLAGS = [
    ("--kv-bits", "2"),
    ("--kv-bits", "8"),
    ("--kv-bits", "small"),
    ("--kv-k-bits", "8", "--kv-v-bits", "2"),
    ("--kv-bits", "4", "--kv-min-tokens", "30"),
    ("--kv-bits", "4", "--kv-group-size", "16"),
    ("--kv-bits", "4", "--kv-quant-scheme", "uniform"),
    ("--kv-bits", "4", "--kv-key-scheme", "uniform", "--kv-group-size", "32"),
    ("--kv-bits", "4", "--kv-value-scheme", "uniform"),
    ("--kv-bits", "4", "--quantized-kv-start", "500"),
]


@pytest.mark.parametrize("options", FLAGS, ids=" ".join)
def test_every_flag_changes_bytes(folder, run, usual, options):
    code, _, err = run(folder, *options)
    assert code == 0
    assert held(err) != usual


def test_no_flag_is_left_out():
    assert {word for options in FLAGS for word in options if word[:2] == "--"} == set(
        spec.FLAGS.values()
    )


VARIED = {
    "KV_BITS": "2",
    "KV_KEY_BITS": "8",
    "KV_VALUE_BITS": "8",
    "KV_QUANT_SCHEME": "uniform",
    "KV_KEY_SCHEME": "uniform",
    "KV_VALUE_SCHEME": "uniform",
    "KV_GROUP_SIZE": "32",
    "QUANTIZED_KV_START": "500",
}


@pytest.mark.parametrize("variable", VARIABLES.values())
def test_every_variable_changes_bytes(folder, run, usual, monkeypatch, variable):
    """And its flag wins over it."""
    monkeypatch.setenv("KV_BITS", "4")
    monkeypatch.setenv(variable, VARIED[variable])
    code, _, err = run(folder)
    assert code == 0
    assert held(err) != usual
    (name,) = (name for name, known in VARIABLES.items() if known == variable)
    flags = {
        "bits": ("--kv-bits", "4"),
        "key_bits": ("--kv-bits", "4"),
        "value_bits": ("--kv-bits", "4"),
        "group_size": ("--kv-group-size", "64"),  # the whole head
        "start": ("--quantized-kv-start", "0"),
    }
    option = flags.get(name, (spec.FLAGS[name], "turboquant"))
    assert held(run(folder, *option)[2]) == usual


def test_variables_do_as_flags_do(folder, run, usual, monkeypatch):
    flagged = held(run(folder, "--kv-k-bits", "8", "--kv-v-bits", "3", "--kv-group-size", "32")[2])
    monkeypatch.setenv("KV_BITS", "4")
    assert held(run(folder)[2]) == usual
    monkeypatch.delenv("KV_BITS")
    monkeypatch.setenv("KV_KEY_BITS", "8")
    monkeypatch.setenv("KV_VALUE_BITS", "3")
    monkeypatch.setenv("KV_GROUP_SIZE", "32")
    assert held(run(folder)[2]) == flagged
    assert held(run(folder, "--kv-bits", "2")[2]) < flagged
    assert "not packed" in run(folder, "--kv-bits", "0")[2]


def test_packing_that_did_not_happen_is_said(folder, run):
    _, _, err = run(folder, "--kv-bits", "4", "--quantized-kv-start", "500")
    assert "to be packed" in err
    assert "note: nothing was packed: a sequence is packed when it has 500 tokens" in err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--kv-bits", "9"), "--kv-bits: 9 bits are not supported"),
        (("--kv-bits", "3.3"), "3.3 bits"),
        (("--kv-bits", "tiny"), "'tiny' is neither a number of bits nor a preset"),
        (("--kv-k-bits", "8"), "--kv-k-bits needs --kv-v-bits"),
        (("--kv-bits", "4", "--kv-v-bits", "3"), "exclude each other"),
        (("--kv-min-tokens", "4"), "--kv-min-tokens has no effect"),
        (("--kv-group-size", "64"), "--kv-group-size has no effect"),
        (("--quantized-kv-start", "1"), "--quantized-kv-start has no effect"),
        (("--kv-key-scheme", "uniform"), "--kv-key-scheme has no effect"),
        (("--kv-bits", "4", "--kv-group-size", "24"), "a group of 24 values is not supported"),
        (("--kv-bits", "4", "--kv-min-tokens", "-1"), "not a whole number: '-1'"),
        (("--kv-bits", "4", "--kv-min-tokens", "٣"), "not a whole number: '٣'"),
        (("--kv-bits", "٣"), "--kv-bits: '٣' is not a number of bits"),
        (("--kv-bits", "4", "--kv-min-tokens", "9" * 30), "--kv-min-tokens must be a whole number"),
        (
            ("--kv-bits", "4", "--quantized-kv-start", "9" * 30),
            "--quantized-kv-start must be a whole number from 0 to 2147483647, not 99999",
        ),
        (("--kv-bits", "3.5", "--kv-quant-scheme", "uniform"), "no width of the uniform scheme"),
        (
            (
                *("--kv-bits", "4", "--kv-quant-scheme", "uniform"),
                *("--kv-key-scheme", "turboquant", "--kv-value-scheme", "uniform"),
            ),
            "--kv-quant-scheme has no effect beside --kv-key-scheme and --kv-value-scheme",
        ),
    ],
)
def test_what_cannot_apply_is_refused_before_anything_is_loaded(run, options, words, monkeypatch):
    monkeypatch.setattr(command, "load_model", lambda *a, **k: pytest.fail("a model was loaded"))
    code, out, err = run("anywhere", *options)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and words in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ("KV_BITS=seven", "KV_BITS: 'seven' is neither a number of bits nor a preset"),
        ("KV_BITS=0 KV_KEY_BITS=8", "KV_BITS of 0 and KV_KEY_BITS exclude each other"),
        ("KV_GROUP_SIZE=64", "KV_GROUP_SIZE has no effect: the key-value cache is not packed"),
        ("QUANTIZED_KV_START=5", "QUANTIZED_KV_START has no effect"),
        ("KV_BITS=4 QUANTIZED_KV_START=" + "9" * 30, "QUANTIZED_KV_START must be a whole number"),
    ],
)
def test_a_variable_that_cannot_apply_is_refused_too(run, monkeypatch, variables, words):
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))
    code, _, err = run("anywhere")
    assert code == 2
    assert err.startswith(f"error: {words}")


def test_0_bits_turn_off_whatever_the_variables_say(folder, run, monkeypatch):
    monkeypatch.setenv("KV_GROUP_SIZE", "64")
    assert "not packed" in run(folder, "--kv-bits", "0", tokens=2)[2]
    monkeypatch.setenv("KV_BITS", "0")
    assert "not packed" in run(folder, tokens=2)[2]


def test_a_group_that_is_longer_than_a_head_is_noted(folder, run):
    """Not refused: a model may have heads of several sizes."""
    code, _, err = run(folder, "--kv-bits", "4", "--kv-group-size", "256", tokens=2)
    assert code == 0
    assert "note: --kv-group-size 256 is more than a head of this model has: all 64" in err


def test_a_group_that_does_not_fit_the_model_is_refused_with_what_does(run, tmp_path):
    build_source(tmp_path / "m", "llama", head_dim=48, dtype="float32")
    code, out, err = run(tmp_path / "m", "--kv-bits", "4", "--kv-group-size", "32")
    assert (code, out) == (2, "")
    assert err.splitlines()[-2:] == [
        "error: a group of 32 values does not divide this model's head size 48",
        "hint: --kv-group-size takes for it: 16, or leave it out",
    ]


def test_layers_left_alone_are_told(run, tmp_path):
    """A window of 8 tokens is too short to be packed; one of 48 is packed."""
    build_source(tmp_path / "m", "gemma3_text", dtype="float32")
    code, _, err = run(tmp_path / "m", "--kv-bits", "4")
    assert code == 0
    assert "note: 1 of 2 layers are packed; left as they are: 1 RotatingKVCache" in err
    assert "1 of 2 layers packed" in err
    build_source(tmp_path / "longer", "gemma3_text", dtype="float32", sliding_window=48)
    code, _, err = run(tmp_path / "longer", "--kv-bits", "4")
    assert code == 0
    assert "2 of 2 layers packed" in err and "left as they are" not in err


def test_a_model_trained_with_quantization_awareness_keeps_its_cache(run, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "llama-qat-4bit")
    code, _, err = run(tmp_path / "llama-qat-4bit", "--kv-bits", "4", tokens=2)
    assert code == 0
    assert "was trained with quantization awareness: its key-value cache stays in 16 bits" in err
    assert "not packed" in err


def test_a_model_without_anything_to_pack_is_refused(run, folder, monkeypatch):
    from mlx_lm.models import cache as mlx_lm_cache

    monkeypatch.setattr(
        mlx_lm_cache, "make_prompt_cache", lambda model: [mlx_lm_cache.RotatingKVCache(20)] * 2
    )
    code, out, err = run(folder, "--kv-bits", "4")
    assert (code, out) == (2, "")
    assert "cannot be packed: its layers have RotatingKVCache" in err

"""Sampling settings: the command line over generation_config.json over "off"."""

import json

import pytest

from turboquant_mlx.errors import CheckpointError
from turboquant_mlx.generate.defaults import Sampling, read_generation_config, resolve_sampling

FILE = {"top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05, "temperature": 0.3}


def resolve(config, **options):
    return resolve_sampling(config, vocabulary=288, **{"temp": 0.7, **options})


def test_without_any_file_everything_is_off():
    assert resolve({}) == Sampling(temp=0.7, top_p=0.0, top_k=0, rep_penalty=0.0, rep_ctx=256)


def test_the_models_file_gives_the_defaults_except_the_temperature():
    assert resolve(FILE) == Sampling(temp=0.7, top_p=0.95, top_k=20, rep_penalty=1.05, rep_ctx=256)


def test_options_win_over_the_file():
    sampling = resolve(FILE, temp=1.5, top_p=0.5, top_k=3, rep_penalty=1.2, rep_ctx=64)
    assert sampling == Sampling(temp=1.5, top_p=0.5, top_k=3, rep_penalty=1.2, rep_ctx=64)


def test_zero_turns_a_default_of_the_file_off():
    assert resolve(FILE, top_p=0.0, top_k=0, rep_penalty=0.0) == resolve({})


def test_one_is_another_off_for_top_p_and_the_penalty():
    assert resolve(FILE, top_p=1.0, rep_penalty=1.0, top_k=0) == resolve({})


@pytest.mark.parametrize(
    "config",
    [
        {"top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0},
        {"top_p": 1, "top_k": -1, "repetition_penalty": 1},
        {"top_p": None, "top_k": None, "repetition_penalty": None},
    ],
)
def test_the_spellings_of_off_that_files_use(config):
    assert resolve(config) == resolve({})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("top_p", "0.9"),
        ("top_p", 1.5),
        ("top_p", -0.5),
        ("top_p", float("nan")),
        ("top_p", True),
        ("top_k", 2.5),
        ("top_k", "many"),
        ("top_k", 10**400),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", float("inf")),
        ("repetition_penalty", 10**400),
        ("repetition_penalty", [1.0]),
    ],
)
def test_nonsense_in_the_file_is_named_and_can_be_overridden(key, value):
    with pytest.raises(CheckpointError, match=f"generation_config.json: {key} is") as error:
        resolve({key: value})
    flag = {"top_p": "--top-p", "top_k": "--top-k", "repetition_penalty": "--rep-penalty"}[key]
    assert error.value.hint.startswith(flag)
    option = flag[2:].replace("-", "_")
    assert resolve({key: value}, **{option: 0}) == resolve({})


def test_a_top_k_that_keeps_every_token_is_off():
    assert resolve({}, top_k=287).top_k == 287
    sampling = resolve({}, top_k=288)
    assert sampling.top_k == 0
    assert sampling.notices == ["--top-k 288 has no effect: the vocabulary has 288 tokens"]
    # The model's own file is not the user's business.
    assert resolve({"top_k": 50_000}) == resolve({})
    assert resolve({"top_k": 50_000}).notices == []


def test_options_that_cannot_have_an_effect_are_noted():
    assert resolve({}, rep_ctx=10).notices == [
        "--rep-ctx has no effect without a repetition penalty"
    ]
    assert resolve(FILE, rep_ctx=10).notices == []
    assert resolve(FILE, temp=0).notices == []
    assert resolve({}, temp=0, top_p=0.9, top_k=5).notices == [
        "--top-p has no effect with --temp 0",
        "--top-k has no effect with --temp 0",
    ]
    assert resolve({}, temp=0, seed=0).notices == ["--seed has no effect with --temp 0"]
    assert resolve({}, temp=1, seed=0).notices == []


def test_the_settings_in_effect_can_be_said_shortly():
    assert resolve(FILE).describe() == (
        "temp 0.7, top-p 0.95, top-k 20, repetition penalty 1.05 over 256 tokens"
    )
    assert resolve(FILE, temp=0, rep_penalty=0).describe() == "greedy"


def test_a_folder_without_the_file_has_no_defaults(tmp_path):
    assert read_generation_config(tmp_path) == {}


def test_the_file_is_read(tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps(FILE))
    assert read_generation_config(tmp_path) == FILE


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff\xfe"])
def test_a_damaged_file_is_named(tmp_path, content):
    (tmp_path / "generation_config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        read_generation_config(tmp_path)

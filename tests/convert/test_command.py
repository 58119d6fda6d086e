"""turboquant-convert: what it hands to the conversion, what it prints, how it fails.

The conversion itself is replaced by a recorder.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from turboquant_mlx.convert.command import build_parser, main
from turboquant_mlx.convert.options import ConvertOptions
from turboquant_mlx.convert.report import ConvertReport
from turboquant_mlx.errors import OutputError

REPORT = ConvertReport(
    output_path="out dir",
    source="src",
    parameters=1000,
    source_bytes=2000,
    stored_bytes=500,
    quantized_weights=900,
    quantized_bytes=400,
    bits_per_weight=3.55,
    notices=["something to know"],
    warnings=["something to act on"],
)

# Every option of the contract with a value that is not its default.
CONTRACT: list[tuple[list[str], dict[str, Any]]] = [
    (["--bits", "4"], {"bits": 4}),
    (["-b", "2"], {"bits": 2}),
    (["--group-size", "32"], {"group_size": 32}),
    (["-g", "128"], {"group_size": 128}),
    (["--rotation", "blockwise_hadamard"], {"rotation": "blockwise_hadamard"}),
    (["--rotation", "none"], {"rotation": "none"}),
    (["--rotation-seed", "7"], {"rotation_seed": 7}),
    (["--use-qjl"], {"use_qjl": True}),
    (["--dtype", "float16"], {"dtype": "float16"}),
    (["--attn-bits", "4"], {"attn_bits": 4}),
    (["--mlp-bits", "2"], {"mlp_bits": 2}),
    (["--mlp-group-size", "16"], {"mlp_group_size": 16}),
    (["--ternary-experts"], {"ternary_experts": True}),
    (["--expert-down-bits", "4"], {"expert_down_bits": 4}),
    (["--streaming"], {"streaming": True}),
    (["--protect-expert-layers", "0-2,7"], {"protect_expert_layers": (0, 1, 2, 7)}),
    (
        ["--protect-expert-layers", "0", "--protect-bits", "4"],
        {"protect_expert_layers": (0,), "protect_bits": 4},
    ),
    (["--quantize-extras"], {"quantize_extras": True}),
    (["--quantize-extras", "--extras-bits", "8"], {"quantize_extras": True, "extras_bits": 8}),
    (
        ["--quantize-extras", "--extras-group-size", "32"],
        {"quantize_extras": True, "extras_group_size": 32},
    ),
    (["--keep-mtp"], {"keep_mtp": True}),
    (["--trust-remote-code"], {"trust_remote_code": True}),
    (["--target-bpw", "3.25"], {"target_bpw": 3.25}),
    (["--codec", "scalar"], {"codec": "scalar"}),
    (["--error-feedback"], {"error_feedback": True}),
    (
        ["--error-feedback", "--feedback-text", "some.txt"],
        {"error_feedback": True, "feedback_text": "some.txt"},
    ),
    (["--no-balance"], {"balance": False}),
    (["--balance-text", "some.txt"], {"balance_text": "some.txt"}),
]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The conversions that were asked for."""
    recorded: list[dict[str, Any]] = []

    def convert(
        hf_path: str, mlx_path: str, *, say: Callable[[str, str], None], **options: Any
    ) -> ConvertReport:
        recorded.append({"hf_path": hf_path, "mlx_path": mlx_path, **options})
        say("note", "something to know")
        say("warning", "something to act on")
        return REPORT

    fake = SimpleNamespace(convert=convert)
    monkeypatch.setitem(sys.modules, "turboquant_mlx.convert.pipeline", fake)
    return recorded


@pytest.mark.parametrize("flag", ["--hf-path", "--model"])
def test_the_least_that_must_be_given(calls: list[dict[str, Any]], flag: str) -> None:
    assert main([flag, "some/model"]) == 0
    assert calls == [
        {"hf_path": "some/model", "mlx_path": "mlx_model", "overwrite": False, "progress": True}
    ]


@pytest.mark.parametrize(("arguments", "options"), CONTRACT)
def test_every_option_reaches_the_conversion(
    calls: list[dict[str, Any]], arguments: list[str], options: dict[str, Any]
) -> None:
    assert main(["--hf-path", "src", *arguments]) == 0
    given = {
        k: v
        for k, v in calls[0].items()
        if k not in ("hf_path", "mlx_path", "overwrite", "progress")
    }
    assert given == options
    ConvertOptions(**given)


def test_every_field_of_the_options_has_a_flag() -> None:
    flags = {action.dest for action in build_parser()._actions}
    assert {f.name for f in fields(ConvertOptions)} <= flags
    covered = {name for _, options in CONTRACT for name in options} | {"expert_layer_tiers"}
    assert covered == {f.name for f in fields(ConvertOptions)}


def test_the_tiers_file_is_read(calls: list[dict[str, Any]], tmp_path: Path) -> None:
    path = tmp_path / "tiers.json"
    path.write_text('{"tiers": {"0": "4", "1": "ternary"}}')
    assert main(["--hf-path", "src", "--expert-layer-tiers", str(path)]) == 0
    assert calls[0]["expert_layer_tiers"] == {0: "4", 1: "ternary"}


def test_target_and_overwrite(calls: list[dict[str, Any]]) -> None:
    assert main(["--hf-path", "src", "--mlx-path", "there", "--overwrite"]) == 0
    assert (calls[0]["mlx_path"], calls[0]["overwrite"]) == ("there", True)


def test_the_summary_goes_to_stdout_and_messages_to_stderr(
    calls: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--hf-path", "src"])
    out, err = capsys.readouterr()
    assert out.startswith(REPORT.format_table())
    assert "turboquant-generate --model 'out dir' --prompt" in out
    assert err == "note: something to know\nwarning: something to act on\n"


def test_json_is_the_whole_of_stdout(
    calls: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--hf-path", "src", "--json"]) == 0
    assert "json" not in calls[0]
    assert json.loads(capsys.readouterr().out) == REPORT.to_dict()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: --hf-path/--model"),
        (["--hf-path", "src", "--bits", "5"], "argument --bits/-b: invalid choice: 5"),
        (["--hf-path", "src", "-g", "16"], "argument --group-size/-g: invalid choice: 16"),
        (["--hf-path", "src", "--bit", "4"], "unrecognized arguments: --bit 4"),
        (["--hf-path", "src", "--upload", "x"], "unrecognized arguments: --upload x"),
        (
            ["--hf-path", "src", "--protect-expert-layers", "5-2"],
            "argument --protect-expert-layers: the layer range '5-2' runs backwards",
        ),
        (
            ["--hf-path", "src", "--expert-layer-tiers", "absent.json"],
            "argument --expert-layer-tiers: no such tiers file: absent.json",
        ),
    ],
)
def test_bad_usage(
    calls: list[dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"error: {message}")
    assert err.endswith("hint: turboquant-convert --help lists every option\n")
    assert not out
    assert not calls


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--protect-bits", "3"], "--protect-bits has no effect without --protect-expert-layers"),
        (["--extras-bits", "4"], "--extras-bits has no effect without --quantize-extras"),
        (
            ["--extras-group-size", "64"],
            "--extras-group-size has no effect without --quantize-extras",
        ),
        (
            ["--streaming", "--dtype", "float16"],
            "--dtype is not supported together with --streaming",
        ),
    ],
)
def test_a_bad_combination_is_refused_before_any_work(
    calls: list[dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    assert main(["--hf-path", "src", *arguments]) == 2
    assert capsys.readouterr().err.splitlines()[0] == f"error: {message}"
    assert not calls


def test_an_error_is_one_line_and_a_hint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def convert(*_: Any, **__: Any) -> None:
        raise OutputError("mlx_model exists", hint="--overwrite replaces it")

    fake = SimpleNamespace(convert=convert)
    monkeypatch.setitem(sys.modules, "turboquant_mlx.convert.pipeline", fake)
    assert main(["--hf-path", "src"]) == 2
    out, err = capsys.readouterr()
    assert err == "error: mlx_model exists\nhint: --overwrite replaces it\n"
    assert not out


def test_help_explains_every_option_and_shows_an_example() -> None:
    parser = build_parser()
    assert all(action.help for action in parser._actions)
    text = parser.format_help()
    assert "example:\n  turboquant-convert --hf-path" in text
    assert parser.description is not None
    assert parser.description.splitlines()[0].endswith(".")


def test_help_answers_at_once() -> None:
    """Best of three: the machine may be busy. The goal is half a second."""
    best = min(time_of_help() for _ in range(3))
    assert best < 0.5


def time_of_help() -> float:
    started = time.perf_counter()
    command = [sys.executable, "-m", "turboquant_mlx.convert", "--help"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.startswith("usage: turboquant-convert")
    return time.perf_counter() - started

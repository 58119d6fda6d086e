"""The default context, and caches that wait in 16 bits before they are packed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import tiny
import turboquant_mlx
from turboquant_mlx.kvcache.spec import KVSpec
from turboquant_mlx.plan.command import main
from turboquant_mlx.plan.doctor.check import counted
from turboquant_mlx.plan.doctor.command import main as doctor
from turboquant_mlx.plan.headers import ModelFiles, open_model
from turboquant_mlx.plan.machine import GIB, Machine, with_overrides
from turboquant_mlx.plan.projection import Plan, Request, plan_model

MADE_FOR = 4096
MACHINES = [with_overrides(None, 16, None), Machine("cpu", "", 16 * GIB)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("context") / "llama"
    tiny.build_source(path, "llama")
    return path


@pytest.fixture(scope="module")
def model(folder) -> ModelFiles:
    return open_model(str(folder))


def plan(model: ModelFiles, machine: Machine, kv: KVSpec | None, context: int = 4096) -> Plan:
    return plan_model(model, machine, Request(context, kv, prefill_step_size=128))


@pytest.mark.parametrize("machine", MACHINES, ids=["metal", "cpu"])
class TestWaiting:
    def test_tokens_that_wait_count_with_their_packed_copies(self, model, machine):
        plain = plan(model, machine, None).projection
        late = plan(model, machine, KVSpec(4, 4, start=4095)).projection
        soon = plan(model, machine, KVSpec(4, 4)).projection
        assert late.kv == soon.kv  # what is left at the end
        assert soon.peak < plain.peak < late.peak
        assert "16-bit cache until 4095 tokens are packed" in late.workspace.basis

    def test_a_short_wait_takes_less_than_the_end(self, model, machine):
        short = plan(model, machine, KVSpec(4, 4, start=64)).projection
        assert short.peak == plan(model, machine, KVSpec(4, 4)).projection.peak

    @pytest.mark.parametrize(
        ("kv", "said"),
        [
            (KVSpec(4, 4, start=5000), "at 5000 tokens (--quantized-kv-start 5000)"),
            (KVSpec(4, 4, min_tokens=5000), "at 5032 tokens (--kv-min-tokens 5000)"),
        ],
    )
    def test_a_packing_that_never_begins_is_said_and_not_counted(self, model, machine, kv, said):
        found = plan(model, machine, kv)
        assert found.projection.peak == plan(model, machine, None).projection.peak
        assert found.projection.kv.basis.startswith("16-bit at 4096 tokens")
        assert "packed" not in found.projection.kv_note
        assert found.verdict.flags == ("--prefill-step-size", "128")
        [note] = found.notes
        assert said in note
        assert not plan(model, machine, kv, context=6000).notes

    def test_windows_are_packed_before_the_start(self, model, machine):
        config = {**model.config, "model_type": "gpt_oss", "sliding_window": 512}
        config["layer_types"] = ["sliding_attention", "full_attention"]
        windows = replace(model, config=config)
        found = plan(windows, machine, KVSpec(4, 4, start=5000))
        assert not found.notes
        assert found.projection.kv_note == "1 full, 1 window; 1 packed as K4/V4"
        later = plan(windows, machine, KVSpec(4, 4, start=5000), context=6000)
        assert later.projection.kv_note == "1 full, 1 window; 2 packed as K4/V4"


class TestDefault:
    @pytest.fixture(params=[main, doctor], ids=["plan", "doctor"])
    def values(self, request, folder, capsys):
        def run(*arguments: str) -> dict:
            request.param(["--model", str(folder), "--ram-gb", "16", "--json", *arguments])
            found = json.loads(capsys.readouterr().out)
            return found.get("plan", found)

        return run

    def test_is_no_more_than_the_model_was_made_for(self, values):
        found = values()
        assert found["projection"]["context"] == MADE_FOR
        assert "(what the model was made for)" in found["projection"]["basis"]["key-value cache"]
        assert not any("beyond" in text for text in found["warnings"])

    def test_a_given_one_is_kept_with_its_warning(self, values):
        found = values("--context", "16384")
        assert found["projection"]["context"] == 16384
        assert any("beyond the 4096 tokens" in text for text in found["warnings"])
        assert "made for" not in values("--context", "4096")["projection"]["basis"].__str__()

    def test_models_that_say_nothing_get_the_usual_one(self, model):
        config = {k: v for k, v in model.config.items() if k != "max_position_embeddings"}
        request = Request(default_context=True)
        found = plan_model(replace(model, config=config), MACHINES[0], request)
        assert found.projection.request.context == 16384

    def test_python_too(self, folder):
        assert turboquant_mlx.plan(str(folder), ram_gb=16).projection.request.context == MADE_FOR
        given = turboquant_mlx.plan(str(folder), ram_gb=16, context=16384)
        assert given.projection.request.context == 16384


def test_a_hub_out_of_reach_comes_with_a_hint(ask):
    answer = ask("plan", "--model", "owner/name", "--json")
    error = answer.json["error"]
    assert answer.code == 1
    assert error["kind"] == "ModelNotFoundError"
    assert error["message"].startswith("no such folder, and the hub cannot be reached for owner/na")
    assert error["hint"] == "check the network connection, or give the path of a local folder"


def test_the_doctor_counts_in_the_right_number(folder, capsys):
    doctor(["--model", str(folder), "--ram-gb", "16"])
    out = capsys.readouterr().out
    assert "  1 weight file, complete and of the length its header says: " in out
    assert (counted(0, "warning"), counted(1, "warning")) == ("0 warnings", "1 warning")

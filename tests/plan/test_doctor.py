"""turboquant-doctor: every damage fails a check that names it, and what is whole passes."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path

import jsonschema
import pytest

import damage as d
import tiny
from converting import Workshop
from turboquant_mlx.plan.doctor import environment
from turboquant_mlx.plan.doctor.command import main

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = json.loads((ROOT / "docs" / "reference" / "plan.schema.json").read_text())
PEER = ROOT / "tests" / "fixtures" / "predecessor"

Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def workshop(tmp_path_factory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def converted(workshop) -> Path:
    return workshop.converted(workshop.source("llama"), "--bits", "3").folder


@pytest.fixture
def doctor(capsys):
    """Run the command: (exit code, checks by id, everything printed on standard output)."""

    def run(*arguments: str) -> tuple[int, dict[str, dict], str]:
        code = main([*arguments, "--json"])
        out = capsys.readouterr().out
        values = json.loads(out)
        jsonschema.validate(values, SCHEMA)
        return code, {check["id"]: check for check in values["checks"]}, out

    return run


def copy(folder: Path, target: Path) -> Path:
    shutil.copytree(folder, target)
    return target


class TestWholeModels:
    def test_ours(self, doctor, converted):
        code, checks, _ = doctor("--model", str(converted))
        assert code == 0
        for name in (
            "model.files",
            "model.manifest",
            "model.type",
            "model.loads",
            "model.tokenizer",
            "model.chat_template",
            "fit.projection",
        ):
            assert checks[name]["status"] == "pass", checks[name]

    def test_an_unconverted_source_is_no_failure(self, doctor, workshop):
        assert doctor("--model", str(workshop.source("qwen3_moe")))[0] == 0

    def test_no_gpu_is_a_warning(self, doctor, converted):
        code, checks, _ = doctor("--model", str(converted))
        assert checks["env.backend"]["status"] in ("warn", "pass")
        assert code == 0

    def test_what_will_not_fit_is_a_failure(self, doctor, converted):
        code, checks, _ = doctor("--model", str(converted), "--wired-gb", "0.1", "--ram-gb", "1")
        assert code == 1
        assert checks["fit.projection"]["status"] == "fail"


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def stray(folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder / "model-xyz.safetensors")


# (what is wrong, how it is done, the check that fails, words of its message)
DAMAGES = [
    ("truncated file", truncate, "model.files", "model.safetensors: truncated"),
    ("stray file", stray, "model.files", "model-xyz.safetensors"),
    ("codes missing", d.remove_tensor(f"{Q}.codes"), "model.", f"{Q}.codes"),
    ("scales missing", d.remove_tensor(f"{Q}.scales"), "model.", f"{Q}.scales"),
    ("signs missing", d.remove_tensor(f"{Q}.multiplier"), "model.", f"{Q}.multiplier"),
    ("table missing", d.remove_tensor(f"{Q}.table"), "model.", f"{Q}.table"),
    ("wrong packed width", d.drop_row(f"{Q}.codes", 1), "model.", f"{Q}.codes"),
    ("embedding missing", d.remove_tensor("model.embed_tokens.weight"), "model.", "embed_tokens"),
    ("norm missing", d.remove_tensor("model.norm.weight"), "model.", "model.norm"),
]


class TestDamage:
    @pytest.mark.parametrize("number", range(len(DAMAGES)), ids=[row[0] for row in DAMAGES])
    def test_fails_and_is_named(self, number, doctor, converted, tmp_path):
        _, damage, name, words = DAMAGES[number]
        folder = copy(converted, tmp_path / "m")
        damage(folder)
        code, checks, _ = doctor("--model", str(folder))
        assert code == 1
        found = [c for c in checks.values() if c["status"] == "fail"]
        assert len(found) == 1
        assert found[0]["id"].startswith(name)
        assert words in found[0]["message"]

    def test_a_missing_shard_fails(self, doctor, workshop, tmp_path):
        folder = copy(workshop.source("llama", shards=3), tmp_path / "m")
        gone = sorted(folder.glob("model-*.safetensors"))[1]
        gone.unlink()
        code, checks, _ = doctor("--model", str(folder))
        assert code == 1
        assert gone.name in checks["model.files"]["message"]

    def test_a_missing_tokenizer_fails(self, doctor, converted, tmp_path):
        folder = copy(converted, tmp_path / "m")
        for file in folder.glob("tokenizer*"):
            file.unlink()
        code, checks, _ = doctor("--model", str(folder))
        assert code == 1
        assert checks["model.tokenizer"]["message"] == "there are no tokenizer files"

    def test_a_damaged_tokenizer_fails(self, doctor, converted, tmp_path):
        folder = copy(converted, tmp_path / "m")
        (folder / "tokenizer.json").write_text("{")
        code, checks, _ = doctor("--model", str(folder))
        assert code == 1
        assert checks["model.tokenizer"]["status"] == "fail"

    def test_an_unknown_model_type_fails(self, doctor, workshop, tmp_path):
        folder = copy(workshop.source("llama"), tmp_path / "m")
        d.set_key("model_type", to="something_new")(folder)
        code, checks, _ = doctor("--model", str(folder))
        assert code == 1
        assert "something_new" in checks["model.type"]["message"]

    def test_code_of_the_models_own_is_a_warning(self, doctor, workshop, tmp_path):
        folder = copy(workshop.source("llama"), tmp_path / "m")
        (folder / "tokenization_own.py").write_text("")
        code, checks, _ = doctor("--model", str(folder))
        assert code == 0
        assert checks["model.code"]["status"] == "warn"


OLD_DAMAGES = [
    ("signs missing", d.remove_tensor(f"{Q}.signs"), f"{Q}.signs"),
    ("scales missing", d.remove_tensor(f"{Q}.scales"), f"{Q}.scales"),
    ("codes missing", d.remove_tensor(f"{Q}.weight"), f"{Q}.weight"),
    ("codebook missing", d.remove_tensor(f"{Q}.codebook"), Q),
    ("wrong packed width", d.drop_row(f"{Q}.weight", 1), Q),
    ("embedding missing", d.remove_tensor("model.embed_tokens.weight"), "embed_tokens"),
    ("norm missing", d.remove_tensor("model.norm.weight"), "model.norm"),
]


class TestThePredecessorsFolders:
    @pytest.mark.parametrize(
        "folder", sorted(path for path in PEER.iterdir() if path.is_dir()), ids=lambda p: p.name
    )
    def test_whole_ones_pass(self, folder, doctor):
        code, checks, _ = doctor("--model", str(folder))
        assert code == 0
        assert checks["model.manifest"]["message"].startswith("predecessor's format")

    @pytest.mark.parametrize("number", range(len(OLD_DAMAGES)), ids=[r[0] for r in OLD_DAMAGES])
    def test_damage_fails_and_is_named(self, number, doctor, tmp_path):
        _, damage, words = OLD_DAMAGES[number]
        folder = copy(PEER / "dense-3bit-g64", tmp_path / "m")
        damage(folder)
        code, checks, _ = doctor("--model", str(folder))
        assert code == 1
        found = [c for c in checks.values() if c["status"] == "fail"]
        assert len(found) == 1
        assert words in found[0]["message"]

    def test_a_missing_shard_fails(self, doctor, tmp_path):
        folder = copy(PEER / "sharded", tmp_path / "m")
        gone = sorted(folder.glob("model-*.safetensors"))[0]
        gone.unlink()
        code, checks, _ = doctor("--model", str(folder))
        assert code == 1
        assert gone.name in checks["model.files"]["message"]


class TestEnvironment:
    def test_ranges_are_those_of_the_project(self):
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        wanted = [*project["dependencies"], *project["optional-dependencies"]["vlm"]]
        for name, bounds in (environment.RANGES | environment.OPTIONAL_RANGES).items():
            assert name + bounds in wanted

    @pytest.mark.parametrize(
        ("version", "inside"),
        [("0.32.4", True), ("0.32.9", True), ("0.33", False), ("0.32.3", False), ("0.40.1", False)],
    )
    def test_versions_are_compared_by_numbers(self, version, inside):
        assert environment.in_range(version, ">=0.32.4,<0.33") is inside

    def test_a_second_package_of_the_same_import_name_fails(self, monkeypatch):
        monkeypatch.setattr(
            "importlib.metadata.packages_distributions",
            lambda: {"turboquant_mlx": ["turboquant-mlx-full", "turboquant-mlx-kit"]},
        )
        check = environment.check_duplicates()
        assert check.status == "fail"
        assert "turboquant-mlx-full and turboquant-mlx-kit" in check.message

    def test_a_disk_that_is_too_small_fails(self, tmp_path):
        assert environment.check_disk(tmp_path / "not" / "there", 2**62).status == "fail"
        assert environment.check_disk(tmp_path, 1).status == "pass"


class TestUsage:
    def test_needs_a_model_or_a_self_test(self, capsys):
        with pytest.raises(SystemExit) as stop:
            main([])
        assert stop.value.code == 2
        err = capsys.readouterr().err
        assert "--model" in err
        assert "--self-test" in err

    @pytest.mark.parametrize(
        "option", [("--context", "5"), ("--kv-bits", "4"), ("--ngram-offload",)]
    )
    def test_what_concerns_a_model_needs_one(self, capsys, option):
        with pytest.raises(SystemExit) as stop:
            main(["--self-test", *option])
        assert stop.value.code == 2
        assert capsys.readouterr().err.startswith(f"error: {option[0]} has no effect without --mod")

    def test_self_test_passes_here(self, doctor):
        code, checks, _ = doctor("--self-test")
        assert code == 0
        names = {name.partition("_")[0] for name in checks if name.startswith("self.")}
        parts = {"rotation", "packing", "decode", "product", "experts", "cache", "attention"}
        assert names == {f"self.{part}" for part in parts}

    def test_text_is_one_line_a_check(self, converted, capsys):
        assert main(["--model", str(converted)]) == 0
        out = capsys.readouterr().out
        assert "ok    model.manifest" in out
        assert " failed" in out


class TestOnTheHub:
    def test_says_that_only_headers_were_checked(self, hub, ask, converted):
        hub.add("owner/small", converted)
        answer = ask("plan.doctor", "--model", "owner/small", "--json", endpoint=hub.endpoint)
        assert answer.code == 0
        checks = {check["id"]: check for check in answer.json["checks"]}
        assert checks["model.remote"]["status"] == "warn"
        assert checks["machine.disk"]["status"] == "pass"
        assert checks["model.manifest"]["status"] == "pass"


class TestChatTemplates:
    def test_one_that_does_not_render_fails(self, doctor, converted, tmp_path):
        folder = copy(converted, tmp_path / "m")
        (folder / "chat_template.jinja").write_text("{% if %}")
        code, checks, _ = doctor("--model", str(folder))
        assert code == 1
        assert checks["model.chat_template"]["status"] == "fail"
        assert "cannot be used" in checks["model.chat_template"]["message"]


class TestTheSelfTest:
    @pytest.mark.parametrize("backend", ["metal", "cuda", "portable"])
    def test_reports_whatever_a_device_refuses_and_goes_on(self, backend):
        # here are neither Metal nor CUDA: their kernels raise, which is the finding
        from turboquant_mlx.kernels.dispatch import force_backend
        from turboquant_mlx.plan.doctor.self_test import self_test

        with force_backend(backend):
            checks = self_test()
        assert len(checks) >= 40
        failures = [check for check in checks if check.status == "fail"]
        assert bool(failures) == (backend != "portable")
        assert all(check.message for check in checks)
        assert all(check.message.startswith(backend) for check in checks if check not in failures)


class TestTypesThatOnlyMlxVlmLoads:
    def test_are_a_warning_and_no_failure(self, doctor, tmp_path):
        pytest.importorskip("mlx_vlm")
        tiny.build_source(tmp_path / "m", "llama")
        config = json.loads((tmp_path / "m" / "config.json").read_text())
        (tmp_path / "m" / "config.json").write_text(json.dumps(config | {"model_type": "mage_vl"}))
        code, checks, _ = doctor("--model", str(tmp_path / "m"), "--ram-gb", "16")
        assert checks["model.type"]["status"] == "warn"
        assert checks["model.loads"]["status"] == "warn"
        assert checks["fit.projection"]["status"] == "pass"
        assert {c["id"] for c in checks.values() if c["status"] == "fail"} <= {"model.tokenizer"}
        assert code == int(checks["model.tokenizer"]["status"] == "fail")

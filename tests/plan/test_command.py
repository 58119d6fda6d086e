"""turboquant-plan at the command line: exit codes, JSON, text, and no MLX where none is needed."""

from __future__ import annotations

import json
import math
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

import tiny
import turboquant_mlx
from converting import Workshop
from turboquant_mlx.checkpoint.source import inspect_folder
from turboquant_mlx.errors import OptionError
from turboquant_mlx.plan.command import main

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = json.loads((ROOT / "docs" / "reference" / "plan.schema.json").read_text())


@pytest.fixture(scope="module")
def workshop(tmp_path_factory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def llama(workshop) -> Path:
    return workshop.source("llama")


@pytest.fixture
def plan(capsys):
    """Run the command in this process: (exit code, standard output, standard error)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        try:
            code = main(list(arguments))
        except SystemExit as stop:
            code = int(stop.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return run


class TestExitCodes:
    def test_0_where_it_runs(self, plan, llama):
        assert plan("--model", str(llama), "--ram-gb", "16")[0] == 0

    def test_1_where_it_does_not(self, plan, llama):
        assert plan("--model", str(llama), "--wired-gb", "0.1", "--ram-gb", "1")[0] == 1

    def test_1_where_there_is_no_model(self, plan, tmp_path):
        code, out, err = plan("--model", str(tmp_path / "absent"))
        assert (code, out) == (1, "")
        assert err == f"error: no such folder: {tmp_path / 'absent'}\n"

    def test_a_bare_name_is_a_folder_and_never_asked_of_the_hub(self, plan):
        code, _, err = plan("--model", "missingdir")
        assert code == 1
        assert err.startswith("error: no such folder: missingdir")

    def test_1_where_files_are_damaged(self, plan, tmp_path):
        tiny.build_source(tmp_path / "m", "llama")
        (tmp_path / "m" / "model.safetensors").write_bytes(b"nothing of the kind")
        code, out, err = plan("--model", str(tmp_path / "m"))
        assert (code, out) == (1, "")
        assert "model.safetensors" in err

    @pytest.mark.parametrize(
        "arguments",
        [
            ("--context", "-5"),
            ("--context", "0"),
            ("--context", "many"),
            ("--kv-bits", "99"),
            ("--kv-bits", "3.3"),
            ("--kv-k-bits", "8"),
            ("--kv-bits", "4", "--kv-k-bits", "8", "--kv-v-bits", "3"),
            ("--kv-min-tokens", "4"),
            ("--prefill-step-size", "0"),
            ("--wired-gb", "-1"),
            ("--ram-gb", "nan"),
            ("--ram-gb", "8", "--wired-gb", "500"),
            ("--convert", "bits=7"),
            ("--convert", "bits=3.0"),
            ("--convert", "group-size=32.0"),
            ("--convert", "balance-text=/nope"),
            ("--nothing",),
        ],
    )
    def test_2_for_bad_usage(self, plan, llama, arguments):
        code, out, err = plan("--model", str(llama), *arguments)
        assert (code, out) == (2, "")
        assert err.startswith("error: ")

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda c: c.pop("turboquant"), "config.json has no 'turboquant' block"),
            (
                lambda c: c["turboquant"].update(modules={}),
                "q_proj.codes belongs to nothing in the manifest",
            ),
            (
                lambda c: c["turboquant"]["modules"].pop("lm_head"),
                "lm_head.codes belongs to nothing in the manifest",
            ),
            (
                lambda c: c["turboquant"].update(mtp={"file": "mtp.safetensors", "tensors": 1}),
                "mtp.safetensors is missing, the manifest names it",
            ),
            (lambda c: c.update(source_model_file=0), "source_model_file 0 is not a Python file"),
            (lambda c: c.update(num_hidden_layers=1), "but config.json: num_hidden_layers is 1"),
            (lambda c: c.update(rms_norm_eps=-1), "rms_norm_eps is -1, not a finite number"),
            (lambda c: c.update(rope_theta=math.nan), "rope_theta is nan, not a finite number"),
            (lambda c: c.update(quantization_config=[1]), "quantization_config is not an object"),
        ],
    )
    def test_1_where_no_command_would_load_it(
        self, plan, workshop, llama, tmp_path, change, message
    ):
        folder = tmp_path / "m"
        shutil.copytree(workshop.converted(llama, "--bits", "3").folder, folder)
        config = json.loads((folder / "config.json").read_text())
        assert plan("--model", str(folder), "--ram-gb", "16")[0] == 0
        change(config)
        (folder / "config.json").write_text(json.dumps(config))
        code, out, err = plan("--model", str(folder), "--ram-gb", "16")
        assert (code, out) == (1, "")
        assert err.startswith(f"error: {folder}: ")
        assert message in err

    def test_a_model_of_unknown_type_is_not_runnable(self, plan, tmp_path):
        folder = tmp_path / "m"
        tiny.build_source(folder, "llama")
        config = json.loads((folder / "config.json").read_text()) | {"model_type": "something_new"}
        (folder / "config.json").write_text(json.dumps(config))
        code, out, _ = plan("--model", str(folder))
        assert code == 1
        assert "UNKNOWN: a part of what it takes is unknown" in out
        assert "something_new" in out


class TestJson:
    def read(self, plan, *arguments: str) -> dict:
        _, out, _ = plan(*arguments, "--json")
        values = json.loads(out)
        jsonschema.validate(values, SCHEMA)
        return values

    def test_follows_the_schema(self, plan, llama, workshop):
        values = self.read(plan, "--model", str(llama), "--ram-gb", "16")
        assert values["schema"] == 2
        assert values["model"]["total_bytes"] == inspect_folder(llama).weight_bytes
        converted = workshop.converted(llama, "--bits", "3").folder
        values = self.read(plan, "--model", str(converted), "--kv-bits", "3.5")
        assert values["model"]["quantization"] == "turboquant"
        assert (values["projection"]["kv_key_bits"], values["projection"]["kv_value_bits"]) == (
            3,
            4,
        )

    def test_follows_it_with_everything_asked_for(self, plan, llama):
        values = self.read(
            plan, "--model", str(llama), "--convert", "bits=3", "--all-bits", "--speed"
        )
        assert values["conversion"]["weight_bytes"] == values["model"]["total_bytes"]
        assert {row["kv"] for row in values["table"]} == {
            "16-bit",
            "K8/V8",
            "K8/V3",
            "K4/V4",
            "K3/V4",
        }
        assert values["speed"]["tokens_per_second"] is None

    def test_knows_the_keys_of_the_predecessor(self, plan, llama):
        values = self.read(plan, "--model", str(llama))
        old = {
            "model": "path name type source quantization bits group_size n_layers n_experts "
            "experts_per_tok is_moe total_bytes expert_bytes resident_bytes ngram_bytes",
            "machine": "assumed wss_estimated ram_bytes wss_bytes",
            "projection": "context kv_bits ngram_offload ngram_offloaded_bytes kv_bytes_per_token "
            "kv_bytes kv_note prefill_step_size prefill_workspace_bytes runtime_reserve_bytes "
            "peak_bytes ceiling_bytes headroom_bytes ram_share",
            "verdict": "mode runnable needs_wired_bump",
        }
        for part, keys in old.items():
            assert set(keys.split()) <= set(values[part])
        assert {"flags", "warnings"} <= set(values)

    def test_errors_are_json_too(self, plan, tmp_path):
        code, out, err = plan("--model", str(tmp_path / "absent"), "--json")
        values = json.loads(out)
        jsonschema.validate(values, SCHEMA)
        assert code == 1
        assert values["error"]["kind"] == "ModelNotFoundError"
        assert values["error"]["message"] in err

    @pytest.mark.parametrize("option", [("--convert", ""), ("--all-bits",)])
    def test_what_the_converter_would_refuse_is_json_with_the_models_name(
        self, plan, tmp_path, option
    ):
        folder = tmp_path / "m"
        config = tiny.build_source(folder, "llama")
        for change, message in (
            ({"text_config": 1}, "config.json: text_config is not an object"),
            ({"rms_norm_eps": -1}, "config.json: rms_norm_eps is -1, not a finite number"),
        ):
            (folder / "config.json").write_text(json.dumps(config | change))
            code, out, err = plan("--model", str(folder), *option, "--json")
            values = json.loads(out)
            jsonschema.validate(values, SCHEMA)
            assert code == 1
            assert values["error"]["message"].startswith(f"{folder}: {message}")
            assert values["error"]["message"] in err

    @pytest.mark.parametrize("arguments", [("--context", "-5"), ("--kv-bits", "99"), ("--what",)])
    def test_usage_errors_are_json_too(self, plan, llama, arguments):
        code, out, err = plan("--model", str(llama), *arguments, "--json")
        values = json.loads(out)
        jsonschema.validate(values, SCHEMA)
        assert code == 2
        assert values["error"]["kind"] == "OptionError"
        assert err.startswith("error: ")


class TestText:
    def test_names_every_term_its_basis_and_the_answer(self, plan, llama):
        _, out, _ = plan("--model", str(llama), "--ram-gb", "16")
        for words in ("weights", "key-value cache", "prefill workspace", "runtime reserve", "peak"):
            assert words in out
        assert "16-bit at 4096 tokens (what the model was made for), from config.json" in out
        assert "FITS: all in memory" in out

    @pytest.mark.parametrize("bits", ["1", "1.5", "balanced"])
    def test_the_line_to_run_with_can_be_pasted(self, plan, llama, bits):
        _, out, _ = plan("--model", str(llama), "--ram-gb", "16", "--kv-bits", bits)
        line = out.split("run with:\n")[1].splitlines()[0]
        assert shlex.split(line, comments=True) == ["--kv-bits", bits]
        assert "  # key-value cache K" in line

    def test_has_no_colour(self, plan, llama):
        assert "\x1b" not in plan("--model", str(llama))[1]

    def test_gb_and_gib_are_never_mixed(self, plan, llama):
        _, out, _ = plan("--model", str(llama), "--ram-gb", "16")
        assert "17.18 GB (16.0 GiB)" in out

    def test_shows_the_line_for_the_wired_limit(self, plan, tmp_path, llama):
        # weights of a few megabytes and a reserve of 0.5 GB: above 0.4 GB, below what 8 GiB give
        _, out, _ = plan("--model", str(llama), "--wired-gb", "0.4", "--ram-gb", "8")
        assert "sudo sysctl iogpu.wired_limit_mb=" in out

    def test_shows_the_projected_conversion(self, plan, llama):
        _, out, _ = plan("--model", str(llama), "--convert", "bits=2")
        assert "converted with bits=2: " in out


class TestPython:
    @pytest.mark.parametrize(
        "values",
        [
            {"kv": 4},
            {"context": "8192"},
            {"prefill_step_size": 2.5},
            {"ram_gb": "16"},
            {"wired_gb": True},
            {"convert": 3},
            {"machine": "a Mac"},
            {"model": None},
        ],
    )
    def test_a_wrong_type_is_an_error_of_ours(self, llama, values):
        with pytest.raises(OptionError):
            turboquant_mlx.plan(**{"model": str(llama), **values})


def test_a_local_plan_loads_neither_mlx_nor_numpy(llama):
    program = (
        "import sys\n"
        "from turboquant_mlx.plan.command import main\n"
        f"code = main(['--model', {str(llama)!r}, '--kv-bits', '4'])\n"
        "heavy = {'mlx', 'mlx_lm', 'transformers', 'huggingface_hub', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class TestHostileConfigs:
    @pytest.fixture
    def changed(self, llama, tmp_path):
        """A copy of the model with other values in its config."""

        def change(**values) -> str:
            folder = tmp_path / "m"
            shutil.copytree(llama, folder)
            config = json.loads((folder / "config.json").read_text()) | values
            (folder / "config.json").write_text(json.dumps(config))
            return str(folder)

        return change

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("num_hidden_layers", "30"),
            ("num_key_value_heads", 0),
            ("num_attention_heads", 0),
            ("hidden_size", -64),
            ("layer_types", "abc"),
            ("text_config", {"model_type": {}}),
        ],
    )
    def test_a_cache_that_cannot_be_told_is_unknown_and_never_zero(
        self, plan, changed, name, value
    ):
        code, out, err = plan("--model", changed(**{name: value}))
        assert (code, err) == (1, "")
        assert "UNKNOWN" in out or "DOES NOT FIT" in out

    @pytest.mark.parametrize("value", [0, 10**400])
    def test_layers_that_no_model_has_are_an_error(self, plan, changed, value):
        code, out, err = plan("--model", changed(num_hidden_layers=value))
        assert (code, out) == (1, "")
        assert "config.json: num_hidden_layers" in err

    def test_a_file_in_the_place_of_a_folder_is_not_asked_of_the_hub(
        self, plan, llama, monkeypatch
    ):
        monkeypatch.chdir(llama.parent)
        code, _, err = plan("--model", f"{llama.name}/config.json")
        assert code == 1
        assert "is a file, not a model folder" in err

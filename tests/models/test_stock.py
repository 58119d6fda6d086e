"""A converted folder loads and runs in the installed, unpatched mlx-lm and mlx-vlm."""

from __future__ import annotations

import json
import subprocess
import sys

import mlx.core as mx
import pytest

import tiny
from distances import cosines
from turboquant_mlx.checkpoint.loader import load_model

LM_TYPES = ("llama", "qwen3_moe", "gemma3_text", "gpt_oss", "deepseek_v3")


def run_module(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *args], capture_output=True, text=True, timeout=120, check=False
    )


class TestMlxLm:
    @pytest.mark.parametrize("model_type", LM_TYPES)
    def test_gives_the_logits_of_our_loader(self, folders, model_type):
        import mlx_lm

        folder, ids = folders.converted(model_type), folders.recording(model_type).ids
        stock, tokenizer = mlx_lm.load(str(folder), trust_remote_code=True)
        ours, _ = load_model(folder)
        assert mx.array_equal(stock(ids), ours(ids))
        assert tokenizer.has_thinking

    def test_refuses_without_the_trust_flag(self, folders):
        import mlx_lm

        with pytest.raises(ValueError, match="trust_remote_code"):
            mlx_lm.load(str(folders.converted("llama")))

    def test_generates_from_the_command_line(self, folders):
        folder = folders.converted("llama")
        result = run_module(
            *("mlx_lm", "generate", "--trust-remote-code", "--model", str(folder)),
            *("--prompt", "why does ice float?", "--max-tokens", "4", "--temp", "0"),
        )
        assert result.returncode == 0, result.stderr
        assert "Generation: 4 tokens" in result.stdout

    def test_label_is_not_taken_for_a_quantization_of_mlx(self, folders):
        config = json.loads((folders.converted("llama") / "config.json").read_text())
        assert "quantization" not in config
        assert config["quantization_config"]["quant_method"] == "turboquant"


class TestMlxVlm:
    @pytest.fixture(autouse=True)
    def _installed(self):
        pytest.importorskip("mlx_vlm", reason="the vlm extra is not installed")

    @pytest.mark.parametrize("model_type", tiny.MODEL_TYPES)
    def test_gives_the_logits_of_our_loader(self, folders, model_type):
        import mlx_vlm

        folder, ids = folders.converted(model_type), folders.recording(model_type).ids
        stock, _ = mlx_vlm.load(str(folder))
        ours, _ = load_model(folder)
        # Their models of one type may differ in the order of operations, so not to the bit.
        assert cosines(stock(ids).logits, ours(ids)).min() > 0.999

    def test_generates_from_the_command_line(self, folders):
        folder = folders.converted("llama")
        result = run_module(
            *("mlx_vlm", "generate", "--model", str(folder)),
            *(
                "--prompt",
                "why does ice float?",
                "--max-tokens",
                "4",
                "--temperature",
                "0",
                "--verbose",
            ),
        )
        assert result.returncode == 0, result.stderr
        assert "Generation: 4 tokens" in result.stdout

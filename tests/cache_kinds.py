"""Which model types stand for which kind of key-value cache."""

from __future__ import annotations

import pytest

# One model type of every kind of cache runs always, all others with the marker "heavy".
ALWAYS = {
    "afm7", "baichuan_m1", "bailing_hybrid", "cohere2", "deepseek_v3", "deepseek_v32", "exaone4",
    "falcon_h1", "gemma3_text", "gemma3n", "gpt_oss", "jamba", "lfm2", "llama", "llama4_text",
    "longcat_flash", "mamba2", "minimax", "phi3", "plamo2", "qwen3", "qwen3_moe", "qwen3_next",
    "recurrent_gemma", "rwkv7", "step3p5",
}  # fmt: skip


def model_types(names):
    """Parameters of a test over these model types."""
    return [
        name if name in ALWAYS else pytest.param(name, marks=pytest.mark.heavy) for name in names
    ]

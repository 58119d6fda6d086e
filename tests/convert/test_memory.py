"""How much memory a streaming conversion needs: as much as its largest parts, not as the model."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
from tiny_files import write_safetensors, write_tokenizer

# The goal for any model: 1.5 GB, the largest decoder layer in 16 bits, and twice the largest
# tensor in float32. The tests are stricter about the first part, which holds Python, MLX and
# blocks of constant size: they measure it on a model that is next to nothing.
GOAL_CONSTANT = 1.5e9
MEASUREMENTS_VARY = 10e6

# The high-water mark of resident memory; ru_maxrss would begin with that of our own process.
PROGRAM = """
import resource, sys
from turboquant_mlx.convert.command import main

code = main(sys.argv[1:])
try:
    lines = open("/proc/self/status").read().splitlines()
    peak = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
except OSError:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(peak, file=sys.stderr)
sys.exit(code)
"""


@dataclass(frozen=True)
class Sizes:
    """Bytes of a source."""

    model: int
    largest_layer: int
    largest_tensor_float32: int

    @property
    def allowance(self) -> int:
        """What the goal permits beyond its constant part."""
        return self.largest_layer + 2 * self.largest_tensor_float32


def write_source(folder: Path, shapes: dict[str, tuple[int, ...]], config: dict[str, Any]) -> None:
    """A source of random bfloat16 weights that are cut from one pool of noise."""
    folder.mkdir()
    largest = max(math.prod(shape) for shape in shapes.values())
    noise = np.random.default_rng(0).standard_normal(largest + 4096, dtype=np.float32)
    noise = (noise.view(np.uint32) >> 16).astype(np.uint16)
    tensors = {
        name: noise[i % 4096 :][: math.prod(shape)].reshape(shape)
        for i, (name, shape) in enumerate(shapes.items())
    }
    write_safetensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)


def dense(folder: Path, layers: int, hidden: int, inner: int) -> Sizes:
    """A llama."""
    heads = hidden // 64
    config = tiny.text_config(
        "llama",
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=64,
    )
    layer = {f"self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"}
    layer |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden)}
    layer |= {"mlp.down_proj": (hidden, inner)}
    return write_layers(folder, config, layer)


def mixture(folder: Path, layers: int, hidden: int, inner: int, experts: int) -> Sizes:
    """A qwen3_moe."""
    heads = hidden // 64
    config = tiny.text_config(
        "qwen3_moe",
        num_hidden_layers=layers,
        hidden_size=hidden,
        moe_intermediate_size=inner,
        num_experts=experts,
        num_attention_heads=heads,
        num_key_value_heads=heads,
    )
    layer: dict[str, tuple[int, ...]] = {f"self_attn.{n}_proj": (hidden, hidden) for n in "qkvo"}
    layer |= {"self_attn.q_norm": (64,), "self_attn.k_norm": (64,), "mlp.gate": (experts, hidden)}
    for e in range(experts):
        layer |= {f"mlp.experts.{e}.{name}_proj": (inner, hidden) for name in ("gate", "up")}
        layer |= {f"mlp.experts.{e}.down_proj": (hidden, inner)}
    return write_layers(folder, config, layer, stack=experts)


def write_layers(
    folder: Path, config: dict[str, Any], layer: dict[str, tuple[int, ...]], stack: int = 1
) -> Sizes:
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    norms = {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for n in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{n}.{k}.weight": v for k, v in (layer | norms).items()}
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}
    write_source(folder, shapes, config)
    return Sizes(
        model=2 * sum(math.prod(shape) for shape in shapes.values()),
        largest_layer=2 * sum(math.prod(shape) for shape in layer.values()),
        largest_tensor_float32=4 * stack * max(math.prod(shape) for shape in layer.values()),
    )


def peak_bytes(source: Path, *flags: str) -> int:
    """Peak resident memory of a process that converts with ``--streaming``."""
    arguments = ["--hf-path", str(source), "--mlx-path", f"{source}-out", "--streaming", *flags]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return int(done.stderr.splitlines()[-1])


def test_memory_does_not_grow_with_the_number_of_layers(tmp_path: Path) -> None:
    short = dense(tmp_path / "short", layers=4, hidden=256, inner=1024)
    long = dense(tmp_path / "long", layers=28, hidden=256, inner=1024)
    assert long.model - short.model > 5 * MEASUREMENTS_VARY
    growth = peak_bytes(tmp_path / "long", "-b", "2") - peak_bytes(tmp_path / "short", "-b", "2")
    assert growth < MEASUREMENTS_VARY


@pytest.mark.heavy
def test_a_large_model_stays_below_the_goal(tmp_path: Path) -> None:
    nothing = dense(tmp_path / "nothing", layers=1, hidden=128, inner=128)
    large = dense(tmp_path / "large", layers=24, hidden=1024, inner=4096)
    constant, peak = peak_bytes(tmp_path / "nothing"), peak_bytes(tmp_path / "large")
    assert nothing.model < MEASUREMENTS_VARY
    assert large.model > 3 * constant
    assert peak - constant < large.allowance
    assert peak < GOAL_CONSTANT + large.allowance


@pytest.mark.heavy
def test_experts_stay_below_the_goal(tmp_path: Path) -> None:
    dense(tmp_path / "nothing", layers=1, hidden=128, inner=128)
    large = mixture(tmp_path / "large", layers=4, hidden=1024, inner=512, experts=32)
    constant, peak = peak_bytes(tmp_path / "nothing"), peak_bytes(tmp_path / "large")
    assert large.model > 2 * constant
    assert peak - constant < large.allowance
    assert peak < GOAL_CONSTANT + large.allowance

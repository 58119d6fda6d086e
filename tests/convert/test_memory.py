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

# The goal for any model: this much for Python, MLX and blocks of constant size, the largest decoder
# layer in 16 bits, and twice the largest tensor in float32. Models of test size are smaller than
# the first part, so the tests also hold the peaks of a shorter and a longer one against each other.
GOAL_CONSTANT = 1.5e9
MEASUREMENTS_VARY = 10e6
RUNS = 3
"""Of small models, whose least peak counts: what threads free late comes on top."""

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


def peak_bytes(source: Path, *flags: str, runs: int = 1) -> int:
    """Least peak resident memory of processes that convert with ``--streaming``."""
    arguments = ["--hf-path", str(source), "--mlx-path", f"{source}-out", "--streaming", *flags]
    peaks = []
    for _ in range(runs):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, *arguments, *(["--overwrite"] if peaks else [])],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stderr.splitlines()[-1]))
    return min(peaks)


@pytest.mark.heavy
def test_memory_does_not_grow_with_the_number_of_layers(tmp_path: Path) -> None:
    short = dense(tmp_path / "short", layers=4, hidden=256, inner=1024)
    long = dense(tmp_path / "long", layers=28, hidden=256, inner=1024)
    assert long.model - short.model > 5 * MEASUREMENTS_VARY
    flags = ("--bits", "2", "--no-balance", "--codec", "scalar")
    peaks = [peak_bytes(tmp_path / name, *flags, runs=RUNS) for name in ("short", "long")]
    assert peaks[1] - peaks[0] < MEASUREMENTS_VARY


def assert_bounded(place: Path, short: Sizes, long: Sizes) -> None:
    """Twice the layers need no more memory, and less than the goal permits.

    The shorter model is long enough already for the allocator to have found its level.
    """
    peak = peak_bytes(place / "long", "--bits", "2")
    assert peak - peak_bytes(place / "short", "--bits", "2") < long.largest_layer
    assert long.model - short.model >= 4 * long.largest_layer
    assert peak < 0.75 * long.model
    assert peak < GOAL_CONSTANT + long.largest_layer + 2 * long.largest_tensor_float32


@pytest.mark.heavy
def test_a_large_model_is_balanced_and_converted_below_the_goal(tmp_path: Path) -> None:
    short = dense(tmp_path / "short", layers=12, hidden=1024, inner=4096)
    long = dense(tmp_path / "long", layers=24, hidden=1024, inner=4096)
    assert_bounded(tmp_path, short, long)


@pytest.mark.heavy
def test_large_experts_are_balanced_and_converted_below_the_goal(tmp_path: Path) -> None:
    short = mixture(tmp_path / "short", layers=4, hidden=512, inner=512, experts=32)
    long = mixture(tmp_path / "long", layers=8, hidden=512, inner=512, experts=32)
    assert_bounded(tmp_path, short, long)

"""Every model type that mlx-lm can build runs with packed caches and stays what it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import _get_classes

from cache_kinds import model_types
from turboquant_mlx.kvcache.install import CacheReport, install, uninstall
from turboquant_mlx.kvcache.spec import KVSpec

CONFIGS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "tiny_configs.json").read_text()
)
PROMPT, TOKENS = 44, 50
# keys of an index stay as they are: what the model's code expects in its hands
INDEXED = ("deepseek_v32", "glm_moe_dsa", "minimax_m3_vl")
# mlx-lm itself ends the process on the CPU, with its own cache
BROKEN = ("phi3small",)


def build(config: dict[str, Any]) -> Any:
    mx.random.seed(1)
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    model.set_dtype(mx.float32)
    return model


def drive(model: Any) -> tuple[np.ndarray, CacheReport, list[Any]]:
    """Logits after a prompt and after each of a few tokens, and what became of the cache."""
    cache = make_prompt_cache(model)
    tokens = mx.random.randint(1, 60, (1, TOKENS), key=mx.random.key(1))
    steps = [model(tokens[:, :PROMPT], cache=cache)[:, -1:]]
    steps += [model(tokens[:, i : i + 1], cache=cache) for i in range(PROMPT, TOKENS)]
    logits = np.array(mx.concatenate(steps, axis=1).astype(mx.float32))
    return logits, CacheReport.of(cache), cache


def distance(a: np.ndarray, b: np.ndarray) -> float:
    a, b = (x - x.mean(-1, keepdims=True) for x in (a, b))
    size = float(np.sqrt((b * b).sum()))
    return float(np.sqrt(((a - b) ** 2).sum())) / (size or 1.0)


@pytest.mark.parametrize("model_type", model_types(n for n in CONFIGS if n not in BROKEN))
def test_runs_with_packed_caches(model_type, monkeypatch):
    model = build(CONFIGS[model_type])
    plain, before, _ = drive(model)
    install(model, KVSpec(8, 8))
    coded, after, _ = drive(model)
    assert after.layers == before.layers
    # nothing that was packed goes back to 16 bits
    assert after.pending == 0
    assert ("KVCache" in after.left) == (model_type in INDEXED)
    if after.packed:
        assert after.held - after.spare < after.plain
    # an index may pick another block for a rounding
    assert distance(coded, plain) < (0.2 if model_type in INDEXED else 0.05)
    # what is left without rounding is how caches and models work together
    monkeypatch.setattr(KVSpec, "warm_tokens", 10**6)
    exact, _, _ = drive(model)
    uninstall(model)
    assert distance(exact, plain) < 1e-4

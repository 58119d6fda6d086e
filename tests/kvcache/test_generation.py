"""Packed caches under mlx-lm's own generation: alone, in batches, with drafts, over many models."""

from __future__ import annotations

import copy
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map
from mlx_lm.generate import BatchGenerator, generate_step, speculative_generate_step
from mlx_lm.models import qwen3
from mlx_lm.models.cache import (
    LRUPromptCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
)

from tiny import MODEL_TYPES, build_source
from turboquant_mlx.checkpoint.loader import load_model
from turboquant_mlx.kvcache.cache import TurboQuantKVCache
from turboquant_mlx.kvcache.install import CacheReport, install, uninstall
from turboquant_mlx.kvcache.spec import KVSpec


@pytest.fixture(scope="module")
def model():
    mx.random.seed(3)
    config = {
        "model_type": "qwen3", "hidden_size": 128, "num_hidden_layers": 4, "vocab_size": 128,
        "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5, "head_dim": 32, "rope_theta": 10000.0,
        "tie_word_embeddings": False, "max_position_embeddings": 1000,
    }  # fmt: skip
    made = qwen3.Model(qwen3.ModelArgs.from_dict(config))
    # sharper than random: likeliest tokens that rounding cannot swap
    made.update(tree_map(lambda p: p * 3 if p.ndim == 2 else p, made.parameters()))
    return made


@pytest.fixture
def packed(model):
    """Run with packed caches of the given spec."""

    def use(spec: KVSpec):
        install(model, spec)
        return model

    yield use
    uninstall(model)


def answer(model, prompt, n=12, cache=None, piece=2048) -> list[int]:
    steps = generate_step(
        mx.array(prompt), model, max_tokens=n, prompt_cache=cache, prefill_step_size=piece
    )
    return [int(token) for token, _ in steps]


PROMPTS = [list(range(1, n)) for n in (5, 47, 29, 90)]


def test_installing_and_uninstalling(model, packed):
    before = [type(c) for c in make_prompt_cache(model)]
    packed(KVSpec(3, 4))
    assert all(type(c) is TurboQuantKVCache for c in make_prompt_cache(model))
    packed(KVSpec(4, 4))
    assert make_prompt_cache(model)[0].spec == KVSpec(4, 4)
    uninstall(model)
    assert [type(c) for c in make_prompt_cache(model)] == before


@pytest.mark.parametrize("start", [0, 40])
def test_requests_of_different_lengths_in_one_batch_equal_themselves_alone(packed, start):
    """One leaves, another joins, on both sides of the start; prompts in pieces of 16, as a piece
    sees itself exactly and what came before as it is stored."""
    model = packed(KVSpec(4, 4, start=start))
    alone = [answer(model, prompt, piece=16) for prompt in PROMPTS]
    batch = BatchGenerator(
        model, max_tokens=12, prefill_batch_size=2, completion_batch_size=3, prefill_step_size=16
    )
    uids = batch.insert(PROMPTS)
    out: dict[int, list[int]] = {uid: [] for uid in uids}
    caches = {}
    while len(caches) < len(uids):
        _, responses = batch.next()
        for response in responses:
            out[response.uid].append(response.token)
            if response.finish_reason:
                caches[response.uid] = response.prompt_cache
    assert [out[uid] for uid in uids] == alone
    for uid, prompt in zip(uids, PROMPTS, strict=True):
        report = CacheReport.of(caches[uid])
        assert report.packed == report.layers == 4
        length = caches[uid][0].offset
        assert length >= len(prompt)
        assert bool(report.frozen) == (length >= KVSpec(4, 4, start=start).warm_tokens)


def test_a_draft_changes_nothing(model, packed):
    """Rejected tokens are trimmed away, also around the token at which packing begins."""
    packed(KVSpec(4, 4))
    for prompt in PROMPTS:
        alone = answer(model, prompt, 30)
        for draft_tokens in (2, 5):
            steps = speculative_generate_step(
                mx.array(prompt), model, model, max_tokens=30, num_draft_tokens=draft_tokens
            )
            drafted = [int(token) for token, *_ in steps]
            agree = sum(a == b for a, b in zip(alone, drafted, strict=True))
            # a token verified just as packing begins may see its past packed a step earlier
            assert agree == 30 or len(prompt) + 30 >= KVSpec(4, 4).warm_tokens > len(prompt)


def test_saved_continued_equals_never_saved(packed, tmp_path):
    model, file = packed(KVSpec(3, 4)), str(tmp_path / "cache.safetensors")
    cache = make_prompt_cache(model)
    answer(model, PROMPTS[3], 4, cache)
    save_prompt_cache(file, cache)
    loaded = load_prompt_cache(file)
    logits = [model(mx.array([[5, 6]]), cache=c) for c in (cache, loaded)]
    assert mx.array_equal(*logits)


PROGRAM = """
import sys
import mlx.core as mx
from mlx_lm.models.cache import load_prompt_cache
from turboquant_mlx.checkpoint.loader import load_model
from turboquant_mlx.kvcache import cache

model, cache = load_model(sys.argv[1])[0], load_prompt_cache(sys.argv[2])
logits = [model(mx.array([[token]]), cache=cache) for token in (5, 6, 7)]
logits.append(model(mx.array([list(range(1, 30))]), cache=cache))
mx.save_safetensors(sys.argv[3], {str(i): x for i, x in enumerate(logits)})
"""


@pytest.mark.parametrize("length", [20, 90])
def test_saved_and_continued_in_another_process(tmp_path, length):
    """The logits of further tokens and of a further prompt, of full layers and of windows, are the
    same to the bit."""
    folder, file = tmp_path / "model", str(tmp_path / "cache.safetensors")
    build_source(folder, "gemma3_text", dtype="bfloat16", sliding_window=48)
    model = load_model(folder)[0]
    install(model, KVSpec(3, 4))
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([[i % 50 for i in range(length)]]), cache=cache))
    save_prompt_cache(file, cache, {"model": "tiny"})
    command = [sys.executable, "-c", PROGRAM, str(folder), file, str(tmp_path / "out.safetensors")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    theirs = mx.load(str(tmp_path / "out.safetensors"))
    ours = [model(mx.array([[token]]), cache=cache) for token in (5, 6, 7)]
    ours.append(model(mx.array([list(range(1, 30))]), cache=cache))
    assert CacheReport.of(cache).packed == 2
    for i, logits in enumerate(ours):
        assert mx.array_equal(logits, theirs[str(i)])


def test_the_prompt_cache_of_the_server_reuses_and_trims(packed):
    model = packed(KVSpec(3, 4))
    cache, prompt = make_prompt_cache(model), PROMPTS[3]
    mx.eval(model(mx.array([prompt]), cache=cache))
    kept = LRUPromptCache(4)
    kept.insert_cache("m", prompt, copy.deepcopy(cache))
    hit, rest = kept.fetch_nearest_cache("m", [*prompt[:60], 99])
    assert hit is not None and hit[0].offset == 60 and list(rest) == [99]
    assert kept.nbytes == sum(c.nbytes for c in cache)
    fresh = make_prompt_cache(model)
    mx.eval(model(mx.array([prompt[:60]]), cache=fresh))
    logits = [model(mx.array([[99]]), cache=c) for c in (hit, fresh)]
    # keys and values of layers above the first come from a prompt that saw itself exactly
    assert mx.allclose(*logits, atol=1e-3)


def drive(model, cache, tokens: mx.array) -> np.ndarray:
    """Logits of the last prompt position and of each later token."""
    steps = [model(tokens[:, :40], cache=cache)[:, -1:]]
    steps += [model(tokens[:, i : i + 1], cache=cache) for i in range(40, tokens.shape[1])]
    return np.array(mx.concatenate(steps, axis=1).astype(mx.float32))


@pytest.fixture(scope="module", params=MODEL_TYPES)
def any_model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / request.param
    build_source(folder, request.param, dtype="float32")
    return load_model(folder)[0]


def distance(a: np.ndarray, b: np.ndarray) -> float:
    a, b = (x - x.mean(-1, keepdims=True) for x in (a, b))
    return float(np.sqrt(((a - b) ** 2).sum() / (b * b).sum()))


def test_every_kind_of_model_runs_and_stays_near_its_plain_cache(any_model):
    tokens = mx.random.randint(0, 60, (1, 50), key=mx.random.key(1))
    plain = drive(any_model, make_prompt_cache(any_model), tokens)
    distances = []
    for bits in (8, 4):
        install(any_model, KVSpec(bits, bits))
        cache = make_prompt_cache(any_model)
        distances.append(distance(drive(any_model, cache, tokens), plain))
        report = CacheReport.of(cache)
        # nothing went back to 16 bits: type and bytes
        assert report.packed == report.frozen > 0
        assert all(type(c) is not TurboQuantKVCache or any(c.store.frozen) for c in cache)
        uninstall(any_model)
    assert distances[0] < 0.02
    assert distances[1] < 0.5  # random experts may change places


def test_a_lossless_store_behind_the_views_changes_nothing(any_model, monkeypatch):
    """What is left is how caches and models work together."""
    tokens = mx.random.randint(0, 60, (1, 50), key=mx.random.key(1))
    plain = drive(any_model, make_prompt_cache(any_model), tokens)
    monkeypatch.setattr(KVSpec, "warm_tokens", 10**6)
    install(any_model, KVSpec(4, 4))
    exact = drive(any_model, make_prompt_cache(any_model), tokens)
    uninstall(any_model)
    assert distance(exact, plain) < 1e-5

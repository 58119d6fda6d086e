"""A fact at the beginning of a long text is still found with a packed cache."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

from turboquant_mlx.checkpoint.loader import load
from turboquant_mlx.kvcache.install import CacheReport, install, uninstall
from turboquant_mlx.kvcache.spec import KVSpec

pytestmark = pytest.mark.model

TEXT = Path(__file__).parents[1] / "fixtures" / "wikitext" / "slice.txt"
FACT = "Important: the secret number of the red castle is 7421. Remember it.\n\n"
QUESTION = "\n\nWhat is the secret number of the red castle? Answer with the number only."
MARGIN = 1.0
"""Nats that the log-probability of the whole answer (16 tokens) may lose."""

FAR_MARGIN = 2.0
"""The same at 4,000 tokens, where the model itself hardly finds the fact: 0.9 are lost."""


@pytest.fixture(scope="module")
def model(smollm2):
    return load(smollm2)


def prompt(tokenizer, length: int) -> list[int]:
    """About ``length`` tokens: the fact, as much text as fits, the question."""
    filler = tokenizer.encode(TEXT.read_text(encoding="utf-8"))
    filler = (filler * (length // len(filler) + 1))[: length - 60]
    content = FACT + tokenizer.decode(filler) + QUESTION
    messages = [{"role": "user", "content": content}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True)


def answer(model, tokens, n: int = 16):
    """Greedy tokens and the log-probabilities behind each."""
    from mlx_lm.models.cache import make_prompt_cache

    cache = make_prompt_cache(model)
    steps = list(generate_step(mx.array(tokens), model, max_tokens=n, prompt_cache=cache))
    return [int(t) for t, _ in steps], [p for _, p in steps], CacheReport.of(cache)


@pytest.mark.heavy
@pytest.mark.parametrize("length", [500, 1000])
def test_the_answer_is_that_of_16_bits(model, length):
    model, tokenizer = model
    tokens = prompt(tokenizer, length)
    assert abs(len(tokens) - length) < 100
    plain, before, _ = answer(model, tokens)
    assert "7421" in tokenizer.decode(plain)
    install(model, KVSpec(3, 4))
    try:
        packed, after, report = answer(model, tokens)
    finally:
        uninstall(model)
    assert report.pending == 0
    assert report.held < report.plain / 4
    assert packed == plain
    losses = [a[t].item() - b[t].item() for t, a, b in zip(plain, before, after, strict=True)]
    assert sum(losses) < MARGIN


@pytest.mark.heavy
def test_at_four_thousand_tokens_the_answer_is_as_likely_as_with_16_bits(model):
    """SmolLM2 no longer finds the fact there by itself, so the answer is put into its mouth."""
    from mlx_lm.models.cache import make_prompt_cache

    model, tokenizer = model
    tokens = prompt(tokenizer, 4000)
    assert len(tokens) > 3500
    said = tokenizer.encode("The secret number of the red castle is 7421")

    def log_probability() -> float:
        cache = make_prompt_cache(model)
        for start in range(0, len(tokens), 512):
            mx.eval(model(mx.array([tokens[start : start + 512]]), cache=cache))
        total, last = 0.0, tokens[-1]
        cache_step = [c.trim(1) for c in cache]
        assert set(cache_step) == {1}
        for token in said:
            logits = model(mx.array([[last]]), cache=cache)[0, -1].astype(mx.float32)
            total += (logits[token] - mx.logsumexp(logits)).item()
            last = token
        return total

    plain = log_probability()
    install(model, KVSpec(3, 4))
    try:
        packed = log_probability()
    finally:
        uninstall(model)
    print(f"log-probability of the answer: {plain:.2f} plain, {packed:.2f} packed")
    assert packed > plain - FAR_MARGIN

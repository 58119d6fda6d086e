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


@pytest.fixture(scope="module")
def model(smollm2):
    return load(smollm2)


def prompt(tokenizer, length: int) -> list[int]:
    """About ``length`` tokens: the fact, as much text as fits, the question."""
    filler = tokenizer.encode(TEXT.read_text(encoding="utf-8"))[: length - 60]
    content = FACT + tokenizer.decode(filler) + QUESTION
    messages = [{"role": "user", "content": content}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True)


def answer(model, tokens, n: int = 16):
    """Greedy tokens and the log-probabilities behind each."""
    from mlx_lm.models.cache import make_prompt_cache

    cache = make_prompt_cache(model)
    steps = list(generate_step(mx.array(tokens), model, max_tokens=n, prompt_cache=cache))
    return [int(t) for t, _ in steps], [p for _, p in steps], CacheReport.of(cache)


def test_at_a_thousand_tokens_the_answer_is_that_of_16_bits(model):
    model, tokenizer = model
    tokens = prompt(tokenizer, 1000)
    assert 900 < len(tokens) < 1100
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

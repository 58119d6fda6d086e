"""Logits processors, called as mlx-lm calls them."""

from types import SimpleNamespace

import mlx.core as mx
import pytest

from turboquant_mlx.generate.defaults import Sampling
from turboquant_mlx.generate.processors import (
    MinTokens,
    SingleThinkEnd,
    build_processors,
    build_sampler,
    think_end_id,
)

PROMPT = [5, 6, 7]
END, OTHER_END = 2, 0


def generate(processor, generated, vocabulary=8, dtype=mx.float32):
    """Masked ids before each token of ``generated``, and after the last one."""
    masked = []
    for length in range(len(generated) + 1):
        tokens = mx.array(PROMPT + generated[:length])
        logits = processor(tokens, mx.zeros((1, vocabulary), dtype=dtype))
        assert logits.dtype == dtype
        masked.append([i for i, x in enumerate(logits[0].tolist()) if x == -float("inf")])
    return masked


def test_end_tokens_are_masked_for_that_many_generated_tokens():
    # The prompt has three tokens already: it does not count.
    assert generate(MinTokens(2, {END, OTHER_END}), [5, 5, 5]) == [[0, 2], [0, 2], [], []]


def test_end_tokens_that_the_head_does_not_have_are_left_alone():
    assert generate(MinTokens(1, {END, 900}), [5]) == [[2], []]
    assert generate(MinTokens(1, {900}), [5]) == [[], []]
    assert generate(MinTokens(1, {END, -1, -(10**400)}), [5]) == [[2], []]


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_masks_keep_the_precision(dtype):
    generate(MinTokens(1, {END}), [5], dtype=dtype)
    generate(SingleThinkEnd(4), [4], dtype=dtype)


def test_a_second_think_end_is_masked_for_good():
    assert generate(SingleThinkEnd(4), [5, 4, 5, 5]) == [[], [], [4], [4], [4]]


def test_a_think_end_of_the_prompt_does_not_count():
    processor = SingleThinkEnd(PROMPT[-1])
    assert generate(processor, [5, PROMPT[-1], 5]) == [[], [], [7], [7]]


def test_a_think_end_outside_of_the_head_is_left_alone():
    assert generate(SingleThinkEnd(900), [5]) == [[], []]


def test_the_think_processor_never_waits_for_a_token(monkeypatch):
    # mlx-lm computes a token while the next one is prepared: looking at it would stop that.
    def forbidden(*_):
        raise AssertionError("a value was looked at")

    processor = SingleThinkEnd(4)
    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "__bool__", "__int__"):
            patch.setattr(mx.array, name, forbidden)
        for _ in range(3):
            processor(mx.array([5, 4]), mx.zeros((1, 8)))


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [((3,), (4,), 4), (None, None, None), ((3, 9), (4,), None), ((3, 9, 8), (4, 9, 8), None)],
)
def test_only_single_token_markers_are_masked(start, end, expected):
    tokenizer = SimpleNamespace(think_start_tokens=start, think_end_tokens=end)
    assert think_end_id(tokenizer) == expected


def test_the_think_end_of_a_real_tokenizer_is_found(tokenizer):
    assert think_end_id(tokenizer) == 4


def penalised(rep_ctx, generated):
    """Ids whose logit is changed for the token after ``generated``."""
    sampling = Sampling(temp=0.7, rep_penalty=2.0, rep_ctx=rep_ctx)
    (processor,) = build_processors(sampling, min_tokens=0, end_ids={END}, think_end=None)
    logits = processor(mx.array(PROMPT + generated), mx.ones((1, 8)))
    return [i for i, x in enumerate(logits[0].tolist()) if x != 1.0]


def test_the_penalty_window_holds_the_latest_tokens_the_newest_included():
    assert penalised(1, [0, 1]) == [1]
    assert penalised(2, [0, 1]) == [0, 1]
    # Prompt and answer count alike.
    assert penalised(3, [0, 1]) == [0, 1, 7]
    assert penalised(256, [0, 1]) == [0, 1, 5, 6, 7]
    assert penalised(2, []) == [6, 7]


def test_the_penalty_makes_used_tokens_less_likely_on_both_sides_of_zero():
    sampling = Sampling(temp=0.7, rep_penalty=2.0)
    (processor,) = build_processors(sampling, min_tokens=0, end_ids={END}, think_end=None)
    logits = processor(mx.array([0, 1]), mx.array([[4.0, -4.0, 4.0]]))
    assert logits[0].tolist() == [2.0, -8.0, 4.0]


def test_masks_come_after_the_penalty_and_only_where_asked_for():
    off = Sampling(temp=0.7)
    assert build_processors(off, min_tokens=0, end_ids={END}, think_end=None) == []
    on = Sampling(temp=0.7, rep_penalty=1.1)
    processors = build_processors(on, min_tokens=1, end_ids={END}, think_end=4)
    assert [type(p) for p in processors[1:]] == [MinTokens, SingleThinkEnd]


def draws(sampling, logits, count=200):
    mx.random.seed(0)
    sampler = build_sampler(sampling)
    logits = mx.array([logits])
    logprobs = logits - mx.logsumexp(logits, keepdims=True)
    return {sampler(logprobs).item() for _ in range(count)}


def test_the_sampler_follows_the_settings():
    logits = [1.0, 0.9, 0.8, 0.7]
    assert draws(Sampling(temp=0.0), logits, 5) == {0}
    assert draws(Sampling(temp=1.0), logits) == {0, 1, 2, 3}
    assert draws(Sampling(temp=1.0, top_k=2), logits) == {0, 1}
    assert draws(Sampling(temp=1.0, top_p=0.3), logits) == {0, 1}
    assert draws(Sampling(temp=0.01), logits) == {0}

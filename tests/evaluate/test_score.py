"""Scores against values worked out by hand, and what a broken model gets instead of numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from turboquant_mlx.errors import CheckpointError
from turboquant_mlx.evaluate import score
from turboquant_mlx.evaluate.score import (
    ChunkScores,
    score_chunk,
    score_reference,
    store_log_probs,
    summarize,
)


def logits_of(*distributions) -> np.ndarray:
    """Logits of given distributions, each row shifted by another constant."""
    rows = np.log(np.array(distributions, np.float64))
    return (rows + np.arange(len(rows))[:, None] * 7 - 3).astype(np.float32)


def test_perplexity_by_hand():
    # the right tokens get 1/2, 1/4 and 1/8: surprise ln 2 times 1, 2 and 3
    logits = logits_of([0.5, 0.25, 0.25], [0.25, 0.25, 0.5], [0.125, 0.5, 0.375])
    scores = score_chunk(logits, np.array([0, 1, 0]))
    np.testing.assert_allclose(scores.surprise, np.log([2, 4, 8]), rtol=1e-6)
    assert scores.divergence is None and scores.agrees is None
    summary = summarize([scores])
    assert summary.tokens == 3
    assert summary.perplexity == pytest.approx(4.0, rel=1e-6)
    assert summary.divergence is summary.agreement is summary.divergence_median is None


def test_divergence_by_hand():
    # 1/2 ln(2) + 1/4 ln(1) + 1/4 ln(1/2) = ln(2) / 4
    reference = store_log_probs(logits_of([0.5, 0.25, 0.25], [0.1, 0.6, 0.3]))
    candidate = logits_of([0.25, 0.25, 0.5], [0.1, 0.6, 0.3])
    scores = score_chunk(candidate, np.array([0, 0]), reference)
    assert scores.divergence[0] == pytest.approx(math.log(2) / 4, rel=1e-3)
    assert scores.divergence[1] == pytest.approx(0, abs=1e-6)
    assert scores.agrees.tolist() == [False, True]


def test_divergence_is_from_the_reference_to_the_candidate():
    """It is not symmetric: a candidate that rules out what the reference allows pays most."""
    wide, narrow = logits_of([0.5, 0.5]), logits_of([0.999, 0.001])
    target = np.array([0])
    one = score_chunk(narrow, target, store_log_probs(wide)).divergence[0]
    other = score_chunk(wide, target, store_log_probs(narrow)).divergence[0]
    assert one == pytest.approx(0.5 * math.log(0.25 / (0.999 * 0.001)), rel=1e-3)
    assert other == pytest.approx(0.999 * math.log(1.998) + 0.001 * math.log(0.002), rel=1e-3)


@pytest.mark.parametrize("vocabulary", [7, 5000])
def test_scores_equal_those_in_float64(vocabulary, monkeypatch):
    """Rows in blocks, float32, a reference in float16: none of it shows."""
    monkeypatch.setattr(score, "BLOCK_VALUES", 3 * vocabulary)
    rng = np.random.default_rng(vocabulary)
    a, b = (rng.standard_normal((20, vocabulary)).astype(np.float32) * 4 + 30 for _ in "ab")
    b = a + 0.1 * b
    targets = rng.integers(vocabulary, size=20)
    scores = score_chunk(b, targets, store_log_probs(a))

    p, q = (x.astype(np.float64) for x in (b, a))
    p, q = (x - np.log(np.exp(x).sum(axis=1, keepdims=True)) for x in (p, q))
    np.testing.assert_allclose(scores.surprise, -p[np.arange(20), targets], rtol=1e-5)
    expected = (np.exp(q) * (q - p)).sum(axis=1)
    np.testing.assert_allclose(scores.divergence, expected, rtol=2e-2, atol=1e-6)
    assert scores.divergence.mean() == pytest.approx(expected.mean(), rel=2e-3)
    np.testing.assert_array_equal(scores.agrees, p.argmax(axis=1) == q.argmax(axis=1))


def test_storing_a_reference_costs_less_than_any_noise():
    """The float16 copy of a distribution is as good as the distribution."""
    logits = np.random.default_rng(0).standard_normal((64, 3000)).astype(np.float32) * 3
    scores = score_chunk(logits, np.zeros(64, int), store_log_probs(logits))
    assert np.abs(scores.divergence).max() < 2e-6
    assert scores.agrees.mean() > 0.95


def test_a_reference_scored_against_itself():
    logits = logits_of([0.5, 0.25, 0.25], [0.25, 0.25, 0.5])
    targets = np.array([0, 1])
    scores = score_reference(store_log_probs(logits), targets)
    np.testing.assert_allclose(scores.surprise, np.log([2, 4]), rtol=1e-3)
    assert not scores.divergence.any() and scores.agrees.all()


def test_tokens_that_are_ruled_out_count_as_impossible_not_as_broken():
    reference = store_log_probs(np.array([[0.0, 0.0, -np.inf]], np.float32))
    candidate = np.array([[0.0, 0.0, -np.inf]], np.float32)
    scores = score_chunk(candidate, np.array([1]), reference)
    assert scores.divergence[0] == pytest.approx(0, abs=1e-6)
    assert scores.surprise[0] == pytest.approx(math.log(2))
    missing = score_chunk(candidate, np.array([2]), store_log_probs(np.zeros((1, 3), np.float32)))
    assert missing.divergence[0] > 1000 and missing.surprise[0] > 1000
    assert summarize([missing]).perplexity < math.inf


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_predictions_that_are_no_numbers_are_an_error(bad):
    logits = np.zeros((2, 4), np.float32)
    logits[1, 2] = bad
    for work in (lambda: store_log_probs(logits), lambda: score_chunk(logits, np.array([0, 0]))):
        with pytest.raises(CheckpointError, match="not finite"):
            work()


def test_another_vocabulary_is_an_error():
    reference = store_log_probs(np.zeros((1, 5), np.float32))
    with pytest.raises(CheckpointError, match=r"has 4 tokens.*16-bit model 5"):
        score_chunk(np.zeros((1, 4), np.float32), np.array([0]), reference)


def test_inputs_are_left_alone():
    logits = np.random.default_rng(1).standard_normal((4, 9)).astype(np.float32)
    copy = logits.copy()
    reference = store_log_probs(logits)
    stored = reference.copy()
    score_chunk(logits, np.zeros(4, int), reference)
    np.testing.assert_array_equal(logits, copy)
    np.testing.assert_array_equal(reference, stored)


def chunk(divergences, surprises=None) -> ChunkScores:
    d = np.array(divergences, np.float32)
    return ChunkScores(np.array(surprises or d, np.float32), d, d < 1)


def test_summary_over_chunks():
    summary = summarize([chunk([0, 1, 2]), chunk([3, 4, 5])])
    assert summary.tokens == 6
    assert summary.divergence == 2.5
    assert summary.chunk_divergence == [1, 4]
    # two chunk means, 1.5 on either side: sample deviation 3 / sqrt(2), over sqrt(2)
    assert summary.divergence_error == pytest.approx(1.5)
    assert summary.divergence_median == 2.5
    assert summary.divergence_p99 == pytest.approx(4.95)
    assert summary.agreement == pytest.approx(1 / 6)
    assert summary.perplexity == pytest.approx(math.exp(2.5))


def test_one_chunk_says_nothing_about_its_own_error():
    assert summarize([chunk([0.5, 1.5])]).divergence_error is None

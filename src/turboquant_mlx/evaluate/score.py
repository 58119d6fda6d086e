"""Scores of next-token predictions: perplexity, divergence from a reference, same first choice.

For each scored position let q be the reference's distribution over the whole vocabulary and p the
candidate's:

* divergence KL(q || p) = sum_v q_v (log q_v - log p_v), in nats,
* surprise -log p_target, in nats; perplexity is exp of its mean,
* agreement: whether both have the same likeliest token.

A reference's log-probabilities are kept as float16 and normalised again before they are used: a
distribution that differs from the exact one by less than 1e-6 nats. A mean divergence moves by
about a thousandth of itself, less than between two seeds by far.

Everything here is NumPy, over a few rows at a time: one chunk's logits are the most that is held.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import CheckpointError

BLOCK_VALUES = 1 << 20  # values of a block of rows, float32: small enough for a processor's cache

# What stands for log 0: finite in float16, and its exp is exactly 0.
LOG_ZERO = np.float32(-60000.0)


@dataclass(frozen=True)
class ChunkScores:
    """Scores of the predictions of one chunk.

    Attributes:
        surprise: float32 [t], nats.
        divergence: float32 [t], nats, or None without a reference.
        agrees: bool [t], or None without a reference.
    """

    surprise: np.ndarray
    divergence: np.ndarray | None = None
    agrees: np.ndarray | None = None


@dataclass(frozen=True)
class Summary:
    """Scores of all chunks together.

    Attributes:
        tokens: scored predictions.
        perplexity: exp of the mean surprise.
        divergence: mean over all predictions, nats; this and what follows is None where there was
            no reference.
        divergence_error: standard error of that mean over chunks; None for a single chunk.
        divergence_median, divergence_p99: over all predictions.
        agreement: share of predictions with the reference's likeliest token, 0 to 1.
        chunk_surprise, chunk_divergence: mean of each chunk.
    """

    tokens: int
    perplexity: float
    divergence: float | None
    divergence_error: float | None
    divergence_median: float | None
    divergence_p99: float | None
    agreement: float | None
    chunk_surprise: list[float]
    chunk_divergence: list[float]


def store_log_probs(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities of a reference in the form that is kept.

    Args:
        logits: float32 [t, vocabulary]; not changed.

    Returns:
        float16 [t, vocabulary].

    Raises:
        CheckpointError: the logits are not finite.
    """
    stored = np.empty(logits.shape, np.float16)
    for rows in _blocks(logits):
        stored[rows] = _log_softmax(logits[rows])
    return stored


def score_chunk(
    logits: np.ndarray, targets: np.ndarray, reference: np.ndarray | None = None
) -> ChunkScores:
    """Score the predictions of one chunk.

    Args:
        logits: the candidate's, float32 [t, vocabulary]; not changed.
        targets: [t] tokens that really follow.
        reference: what ``store_log_probs`` made of the reference's logits, or None.

    Raises:
        CheckpointError: the logits are not finite, or the vocabularies differ in size.
    """
    n = len(targets)
    surprise = np.empty(n, np.float32)
    divergence = agrees = None
    if reference is not None:
        if reference.shape[1] != logits.shape[1]:
            raise CheckpointError(
                f"its vocabulary has {logits.shape[1]} tokens, that of the 16-bit model "
                f"{reference.shape[1]}"
            )
        divergence, agrees = np.empty(n, np.float32), np.empty(n, np.bool_)
    for rows in _blocks(logits):
        p = _log_softmax(logits[rows])
        surprise[rows] = -np.take_along_axis(p, targets[rows, None], axis=1)[:, 0]
        if reference is not None and divergence is not None and agrees is not None:
            q = reference[rows].astype(np.float32)
            agrees[rows] = q.argmax(axis=1) == p.argmax(axis=1)
            np.subtract(q, p, out=p)
            np.exp(q, out=q)
            total = q.sum(axis=1)
            p *= q
            divergence[rows] = p.sum(axis=1) / total - np.log(total)
    return ChunkScores(surprise, divergence, agrees)


def score_reference(reference: np.ndarray, targets: np.ndarray) -> ChunkScores:
    """A reference's scores against itself: its surprise; divergence 0, agreement 1."""
    surprise = np.empty(len(targets), np.float32)
    for rows in _blocks(reference):
        p = _log_softmax(reference[rows].astype(np.float32))
        surprise[rows] = -np.take_along_axis(p, targets[rows, None], axis=1)[:, 0]
    return ChunkScores(surprise, np.zeros_like(surprise), np.ones(len(targets), np.bool_))


def summarize(chunks: Iterable[ChunkScores]) -> Summary:
    """Put the scores of all chunks together."""
    chunks = list(chunks)
    surprise = [float(chunk.surprise.mean(dtype=np.float64)) for chunk in chunks]
    every = np.concatenate([chunk.surprise for chunk in chunks])
    mean, error, median, p99, agreement = None, None, None, None, None
    divergences = [c.divergence for c in chunks if c.divergence is not None]
    per_chunk = [float(d.mean(dtype=np.float64)) for d in divergences]
    if divergences:
        together = np.concatenate(divergences)
        mean = float(together.mean(dtype=np.float64))
        error = _standard_error(per_chunk)
        median, p99 = (float(x) for x in np.percentile(together, (50, 99)))
        agreement = float(np.concatenate([c.agrees for c in chunks if c.agrees is not None]).mean())
    return Summary(
        tokens=len(every),
        perplexity=_exp(float(every.mean(dtype=np.float64))),
        divergence=mean,
        divergence_error=error,
        divergence_median=median,
        divergence_p99=p99,
        agreement=agreement,
        chunk_surprise=surprise,
        chunk_divergence=per_chunk,
    )


def _standard_error(values: Sequence[float]) -> float | None:
    if len(values) < 2:
        return None
    return float(np.std(values, ddof=1)) / math.sqrt(len(values))


def _exp(x: float) -> float:
    """exp(x), or the largest float: JSON has no infinity."""
    return math.exp(min(x, 709.0))


def _blocks(array: np.ndarray) -> Iterable[slice]:
    step = max(1, BLOCK_VALUES // array.shape[1])
    for start in range(0, len(array), step):
        yield slice(start, min(start + step, len(array)))


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    """float32, a new array; log 0 is LOG_ZERO."""
    top = logits.max(axis=1, keepdims=True)
    if not np.isfinite(top).all():
        raise CheckpointError("its predictions are not finite numbers")
    shifted = logits - top
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return np.maximum(shifted, LOG_ZERO, out=shifted)

"""How far two sets of logits lie apart."""

from __future__ import annotations

import mlx.core as mx
import numpy as np


def as_float32(logits: mx.array | np.ndarray) -> np.ndarray:
    """Logits [..., vocab] of any float dtype as a float32 array [L, vocab]."""
    array = np.array(logits.astype(mx.float32)) if isinstance(logits, mx.array) else logits
    return array.reshape(-1, array.shape[-1])


def cosines(a: mx.array | np.ndarray, b: mx.array | np.ndarray) -> np.ndarray:
    """Cosine similarity of the logits at each position: [L]."""
    a, b = as_float32(a), as_float32(b)
    return (a * b).sum(-1) / (np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1))


def divergences(reference: mx.array | np.ndarray, other: mx.array | np.ndarray) -> np.ndarray:
    """KL divergence in nats of the next-token distributions at each position: [L]."""
    p, q = _log_softmax(as_float32(reference)), _log_softmax(as_float32(other))
    return (np.exp(p) * (p - q)).sum(-1)


def _log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))

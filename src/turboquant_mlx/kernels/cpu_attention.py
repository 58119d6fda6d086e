"""Scaled dot-product attention on the CPU with numpy's BLAS.

MLX's CPU attention is the second thing, after its matrix products, that makes a model slow
there. This computes the same function in float32, query block by query block, so that the score
matrix stays small and, under a causal mask, keys that no query of the block may see are skipped.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from ..quant.bfloat16 import widen
from . import attention_hook, dispatch
from .blas import one_thread, pieces_of, share
from .cpu_matrix import as_numpy, as_readable

SCORE_BYTES = 4 * 2**20
"""Float32 bytes of the scores that a thread holds at a time."""


SMALL_ATTENTION = 2**17
"""Multiplications of one row of queries with the keys below which MLX's own way is as fast."""


def attend(q, k, v, *, scale, mask=None, sinks=None) -> mx.array | None:
    """Attention as ``mx.fast.scaled_dot_product_attention`` defines it, or None to decline.

    Declines off the CPU, while a transformation traces or takes gradients, for arguments that it
    does not know, and for single tokens with a short context, where leaving MLX costs more than it
    gains.

    Args:
        q: queries [B, H, L, D]. k: keys [B, Hkv, S, D]. v: values [B, Hkv, S, Dv].
        scale: multiplies the scores.
        mask: None, "causal", a boolean array or an additive array broadcastable to [B, H, L, S].
        sinks: None or one extra logit per head [H].

    Returns:
        [B, H, L, Dv] in the dtype of ``q``.
    """
    if dispatch.backend() != "cpu" or q.ndim != 4 or (isinstance(mask, str) and mask != "causal"):
        return None
    if q.shape[2] == 1 and q.shape[0] * q.shape[1] * k.shape[2] * q.shape[3] < SMALL_ATTENTION:
        return None
    readable = [as_readable(x) for x in (q, k, v)]
    if dispatch.is_traced(*readable) or dispatch.is_differentiated(q, k, v):
        return None
    queries, keys, values = (widen(np.array(x, copy=False)) for x in readable)
    return _attend(queries, keys, values, scale, mask, sinks).astype(q.dtype)


def _attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale, mask, sinks) -> mx.array:
    batch, heads, length, width = q.shape
    kv_heads, context = k.shape[1], k.shape[2]
    repeats = heads // kv_heads
    queries = q.reshape(batch, kv_heads, repeats, length, width) * np.float32(scale)
    causal = isinstance(mask, str)
    bias = None if mask is None or causal else _mask_as_numpy(mask, batch, heads, length, context)
    sink = None
    if sinks is not None:
        sink = as_numpy(sinks).reshape(1, kv_heads, repeats, 1, 1)

    out = np.empty((batch, kv_heads, repeats, length, v.shape[-1]), np.float32)

    def work(start: int, stop: int) -> None:
        seen = context - length + stop if causal else context
        block = queries[:, :, :, start:stop].reshape(batch, kv_heads, -1, width)
        scores = block @ k[:, :, :seen].swapaxes(-1, -2)
        scores = scores.reshape(batch, kv_heads, repeats, stop - start, seen)
        if causal and stop - start > 1:
            _hide_future(scores, context - length + start)
        elif bias is not None:
            part = bias[:, :, start:stop].reshape(scores.shape)
            if part.dtype == bool:
                np.copyto(scores, np.float32(-np.inf), where=~part)
            else:
                scores += part
        weights = _softmax(scores, sink).reshape(batch, kv_heads, -1, seen)
        block_out = weights @ v[:, :, :seen]
        out[:, :, :, start:stop] = block_out.reshape(batch, kv_heads, repeats, stop - start, -1)

    step = max(1, SCORE_BYTES // (4 * batch * heads * max(context, 1)))
    if step < length:
        share(work, pieces_of(length, step))
    else:
        with one_thread():
            work(0, length)
    return mx.array(out.reshape(batch, heads, length, -1))


def _mask_as_numpy(mask: mx.array, batch, heads, length, context) -> np.ndarray:
    values = np.array(mask) if mask.dtype == mx.bool_ else as_numpy(mask)
    return np.broadcast_to(values, (batch, heads, length, context))


def _hide_future(scores: np.ndarray, first_position: int) -> None:
    """Set scores of keys after each query's own position to minus infinity."""
    rows, columns = scores.shape[-2:]
    future = np.arange(columns) > (first_position + np.arange(rows))[:, None]
    np.copyto(scores, np.float32(-np.inf), where=future)


def _softmax(scores: np.ndarray, sink: np.ndarray | None) -> np.ndarray:
    """Softmax over the last axis, in place; a sink takes weight but adds no value."""
    top = scores.max(axis=-1, keepdims=True)
    if sink is not None:
        top = np.maximum(top, sink)
    # a row that may see nothing has no maximum; its weights become zero
    top = np.where(np.isfinite(top), top, np.float32(0))
    np.subtract(scores, top, out=scores)
    np.exp(scores, out=scores)
    total = scores.sum(axis=-1, keepdims=True)
    if sink is not None:
        total += np.exp(sink - top)
    np.divide(scores, np.maximum(total, np.float32(1e-38)), out=scores)
    return scores


def install() -> None:
    """Let attention on the CPU run here (see ``attention_hook``); counted."""
    attention_hook.register(attend)


def uninstall() -> None:
    """Undo one ``install``."""
    attention_hook.unregister(attend)

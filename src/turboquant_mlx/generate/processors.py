"""Logits processors, in the sense of mlx-lm: ``processor(tokens, logits) -> logits``.

mlx-lm calls every processor exactly once per generated token, with all tokens so far (prompt and
generated, ``[T]``) and the logits of the next one (``[1, vocabulary]``). It prepares the next
token before the last one has been computed, so a processor here never looks at a value: doing so
would stop that overlap. Each object serves one generation.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import LogitsProcessor, make_logits_processors, make_sampler

from .defaults import Sampling


class MinTokens:
    """Masks the tokens that end a generation until ``count`` tokens were generated.

    Own calls are counted, not ``tokens``: that array holds the prompt as well.
    """

    def __init__(self, count: int, end_ids: Iterable[int]):
        self._count = count
        self._end_ids = sorted(end_ids)
        self._calls = 0

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        self._calls += 1
        if self._calls <= self._count:
            # A model's files may name ids that its head does not have.
            ids = [token for token in self._end_ids if 0 <= token < logits.shape[-1]]
            if ids:
                logits[:, mx.array(ids)] = -mx.inf
        return logits


class SingleThinkEnd:
    """Masks ``</think>`` once the model itself has written one.

    Tokens of the prompt do not count. A template may have closed an empty thinking block there
    (Qwen 3 does for enable_thinking=False); a model that opens one all the same must be able to
    close it, or it would think until the last permitted token.
    """

    def __init__(self, think_end_id: int):
        self._id = think_end_id
        self._seen: mx.array | None = None  # bool [1], lazy; None before the first token

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        if self._seen is None:
            self._seen = mx.array([False])
        else:
            self._seen = mx.logical_or(self._seen, tokens[-1:] == self._id)
        if self._id < logits.shape[-1]:
            current = logits[:, self._id]
            logits[:, self._id] = mx.where(self._seen, -mx.inf, current)
        return logits


def think_end_id(tokenizer: Any) -> int | None:
    """Id of the token that closes a thinking block, or None.

    Only where one token opens and one token closes a block: markers of several tokens share
    theirs with other parts of an answer, and masking those would damage it.
    """
    start, end = tokenizer.think_start_tokens, tokenizer.think_end_tokens
    if start is None or end is None or len(start) != 1 or len(end) != 1:
        return None
    return int(end[0])


def build_sampler(sampling: Sampling) -> Any:
    """mlx-lm's sampler for these settings."""
    return make_sampler(temp=sampling.temp, top_p=sampling.top_p, top_k=sampling.top_k)


def build_processors(
    sampling: Sampling, *, min_tokens: int, end_ids: Iterable[int], think_end: int | None
) -> list[LogitsProcessor]:
    """Processors in the order in which they apply: penalties first, masks last.

    Args:
        sampling: for the repetition penalty, which is mlx-lm's own. It looks at the latest
            ``rep_ctx`` tokens of prompt and answer together, the newest included.
        min_tokens: generated tokens before which no end token is permitted; 0 for none.
        end_ids: every id that ends the generation.
        think_end: token permitted once, or None.
    """
    processors: list[LogitsProcessor] = make_logits_processors(
        repetition_penalty=sampling.rep_penalty or None,
        repetition_context_size=sampling.rep_ctx,
    )
    if min_tokens:
        processors.append(MinTokens(min_tokens, end_ids))
    if think_end is not None:
        processors.append(SingleThinkEnd(think_end))
    return processors

"""Text that a model writes itself, as a sample of the inputs that its layers are made for.

Error feedback fits the rounding to the inputs it is shown, so it wants text like what the model
will read and write. Nobody has to supply any: sequences are sampled from the 16-bit model at a
temperature a little below 1, each from a short beginning of another kind, all side by side. The
draws come from a counter of our own, so the same model on the same machine writes the same text.
"""

from __future__ import annotations

import gc
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from tqdm import tqdm

from ..cli import bars_are_off, raise_if_interrupted
from ..kernels.dispatch import backend
from ..layers import cpu

SEQUENCES = 32
LENGTH = 160
TEMPERATURE = 0.9
SEED = 20

# Each sequence begins with one of these; what follows is up to the model.
BEGINNINGS = (
    "The",
    "In",
    "A",
    "It was",
    "He",
    "She",
    "When",
    "After the",
    "During",
    "One day",
    "Question:",
    "How to",
    "Dear",
    "Chapter 1",
    "Abstract",
    "1.",
    "def",
    "import",
    "#include",
    "- ",
    "News:",
    "The history of",
    "The city",
    "The film",
    "The album",
    "Scientists",
    "According to",
    "Let x",
    "Der",
    "La",
    '"',
    "This",
)


def sample_sequences(
    model: nn.Module,
    tokenizer: Any,
    lead: list[int],
    *,
    vocabulary: int | None = None,
    sequences: int = SEQUENCES,
    length: int = LENGTH,
    temperature: float = TEMPERATURE,
    seed: int = SEED,
    progress: bool = False,
) -> np.ndarray:
    """Let a model write.

    Args:
        model: the 16-bit model; its weights are read, and on the CPU its layers are changed to run
            faster.
        tokenizer: of the model.
        lead: tokens that every text begins with.
        vocabulary: ids from this one on are never drawn.
        sequences: how many, side by side.
        length: tokens of each, with lead and beginning.
        temperature: of the sampling.
        seed: of the draws.
        progress: show a progress bar on stderr.

    Returns:
        int32 [sequences, length].
    """
    if backend() == "cpu":
        cpu.prepare(model)
    forced = [
        lead + tokenizer.encode(BEGINNINGS[i % len(BEGINNINGS)], add_special_tokens=False)
        for i in range(sequences)
    ]
    cache = make_prompt_cache(model)
    uniform = np.random.Generator(np.random.PCG64(seed))
    tokens = np.zeros((sequences, length), np.int32)
    steps = tqdm(
        range(length),
        unit="token",
        disable=bars_are_off(progress),
        dynamic_ncols=True,
        desc="writing a text",
    )
    drawn = np.zeros(sequences, np.int32)
    for step in steps:
        raise_if_interrupted()
        drawn = np.array(
            [
                own[step] if step < len(own) else other
                for own, other in zip(forced, drawn, strict=True)
            ],
            np.int32,
        )
        tokens[:, step] = drawn
        if step + 1 < length:
            logits = model(mx.array(drawn)[:, None], cache=cache)[:, -1, :vocabulary]
            drawn = _draw(np.array(logits.astype(mx.float32)), temperature, uniform)
    del cache
    cpu.drop_expansions(model)
    gc.collect()
    return tokens


def _draw(logits: np.ndarray, temperature: float, uniform: np.random.Generator) -> np.ndarray:
    """One token for each row of logits [rows, vocabulary], by the inverse of its distribution."""
    points = uniform.random(len(logits))
    weights = np.exp((logits - logits.max(axis=1, keepdims=True)) / np.float32(temperature))
    sums = np.cumsum(weights, axis=1, dtype=np.float64)
    chosen = [
        int(np.searchsorted(row, point * row[-1])) for row, point in zip(sums, points, strict=True)
    ]
    return np.minimum(chosen, logits.shape[1] - 1).astype(np.int32)

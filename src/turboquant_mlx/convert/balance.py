"""Channel balancing: from what a text shows of a layer's input to the layer's input multiplier.

A rotation spreads the error of a quantized weight evenly over all input channels. In real models
a few channels carry most of the energy of the input, often with small weights behind them, so an
even error hits exactly what matters. Scaling the channels first repairs that: quantize
W diag(s), feed x / s. If the rotated error is white, the error of the output is proportional to

    (sum_j s_j^2 a_j) (sum_j h_j / s_j^2),   a_j = sum_i W_ij^2,  h_j = E[x_j^2],

which is least for s_j^2 = sqrt(h_j / a_j). The same s minimises the error inside one scale group,
so it is right without a rotation and for rotations inside groups as well. At run time 1 / s rides
in the vector of signs that is multiplied in before the rotation anyway: no bit, no time.

Everything here is arithmetic on small vectors; ``calibrate`` runs the model. No MLX here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib import resources
from pathlib import Path

import numpy as np

from ..errors import OptionError

TEXT_FILE = "balance_text.txt"
"""The text that comes with the package."""

MAX_TEXT_CHARACTERS = 1 << 20
"""So much of a text of the user's is looked at; a sample of it is all that is needed."""

MAX_TOKEN_CHARACTERS = 16
"""Characters that a token stands for at most, on average over a piece of text."""

MIN_TOKENS = 64
"""Fewer tokens than this say too little about a model."""

MIN_DIFFERENT = 8
"""The same of different ones: a text that only repeats itself excites few channels."""

INPUT_FLOOR = 1e-2
"""Share of the mean input energy that every channel is taken to have at least. A channel that the
text never excites may matter for other texts, so it must not be rounded away."""

WEIGHT_FLOOR = 1e-6
"""The same for the energy of a weight's columns; a column of zeros would ask for an endless s."""

MAX_SCALE = 64.0
"""Largest s, and its reciprocal the least, around a geometric mean of 1: float16 holds the
multipliers with full precision, and rotated activations stay near the size of plain ones."""


def load_text(path: str | Path | None = None) -> str:
    """The text to run through the model: the user's file, or the one of the package.

    Raises:
        OptionError: the file is missing, unreadable, not UTF-8 text, or empty.
    """
    if path is None:
        return _package_text()
    try:
        with Path(path).open(encoding="utf-8") as file:
            text = file.read(MAX_TEXT_CHARACTERS)
    except FileNotFoundError:
        raise OptionError(f"no such text file: {path}") from None
    except OSError as error:
        raise OptionError(f"cannot read the text file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise OptionError(f"the text file {path} is not UTF-8 text") from None
    if not text.strip():
        raise OptionError(f"the text file {path} is empty")
    return text


@cache
def _package_text() -> str:
    return (resources.files(__package__) / "data" / TEXT_FILE).read_text(encoding="utf-8")


def sample_tokens(
    encode: Callable[[str], Sequence[int]], text: str, pieces: int, length: int
) -> np.ndarray:
    """Tokens of pieces of a text, whose beginnings are spread evenly over it.

    Args:
        encode: turns text into tokens.
        text: any text.
        pieces: how many pieces to take.
        length: tokens of each; fewer where the text is too short for that many.

    Returns:
        int32 [pieces, length].

    Raises:
        OptionError: there are fewer than MIN_TOKENS, or than MIN_DIFFERENT different ones.
    """
    share = len(text) // pieces
    # A piece's own share of the text, and never more of a long one than its tokens can need.
    span = min(share, length * MAX_TOKEN_CHARACTERS)
    found = [encode(text[i * share : i * share + span])[:length] for i in range(pieces)]
    shortest = min(map(len, found))
    if shortest * pieces < MIN_TOKENS:
        raise OptionError(
            "the text is too short to learn from",
            hint=f"at least {MIN_TOKENS} tokens are needed, {pieces * length} are better",
        )
    tokens = np.array([tokens[:shortest] for tokens in found], np.int32)
    different = len(np.unique(tokens))
    if different < MIN_DIFFERENT:
        raise OptionError(
            f"the text has only {different} different tokens: too few to learn from",
            hint="any ordinary text will do, also a foreign one",
        )
    return tokens


def channel_scales(input_energy: np.ndarray, weight_energy: np.ndarray) -> np.ndarray:
    """The scales s of one rotation group.

    Args:
        input_energy: [I], proportional to E[x_j^2].
        weight_energy: [I], sum of W_ij^2 over all rows of all weights that read this input.

    Returns:
        float64 [I], between 1 / MAX_SCALE and MAX_SCALE, geometric mean about 1. All ones where
        the input or the weights are zero throughout.
    """
    h, a = (np.asarray(energy, np.float64) for energy in (input_energy, weight_energy))
    if not (h.any() and a.any()):
        return np.ones_like(h)
    logs = np.log(h + INPUT_FLOOR * h.mean()) - np.log(a + WEIGHT_FLOOR * a.mean())
    logs = (logs - logs.mean()) / 4  # s = (h / a) ** (1/4)
    return np.clip(np.exp(logs), 1 / MAX_SCALE, MAX_SCALE)


def input_multiplier(signs: np.ndarray, scales: np.ndarray | None) -> np.ndarray:
    """float16 [I]: the random signs over the channel scales, as a layer stores and applies them."""
    if scales is None:
        return signs.astype(np.float16)
    return (signs / scales).astype(np.float16)

"""What a decoder layer keeps between tokens, as numbers. No MLX here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

STEP = 256
"""Tokens by which mlx-lm's caches grow."""


class UnknownGeometryError(Exception):
    """There is no rule for the model type, or its config lacks what the rule needs."""


@dataclass(frozen=True)
class Attention:
    """Something that grows with every token.

    Attributes:
        heads: key/value heads (1 for a latent).
        key_dim, value_dim: coordinates of a key and of a value, per head; for a latent, of the
            compressed part and of the rotary part.
        kind: "full", "window" (the last ``window`` tokens), "chunked" (the current chunk),
            "latent" (of multi-head latent attention), "index" (keys that choose blocks) or
            "compressed" (one vector for ``ratio`` tokens).
        window: tokens of the window or chunk, None for the others.
        ratio: tokens for which one vector stands.
        step: vectors by which the memory grows, 1 where it always holds just what is used.
        open_floats: float32 values kept for each token of a group that is not complete yet.
    """

    heads: int
    key_dim: int
    value_dim: int
    kind: Literal["full", "window", "chunked", "latent", "index", "compressed"] = "full"
    window: int | None = None
    ratio: int = 1
    step: int = STEP
    open_floats: int = 0


@dataclass(frozen=True)
class State:
    """Something of fixed size: the state of a recurrence, the last inputs of a convolution.

    Attributes:
        values: elements of the activations' type.
        floats: elements that are float32 whatever the activations are.
        raw_bytes: bytes of anything else.
    """

    values: int = 0
    floats: int = 0
    raw_bytes: int = 0
    kind: Literal["state"] = "state"


Piece = Attention | State
Layer = tuple[Piece, ...]

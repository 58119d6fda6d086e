"""What the caches of a model cost, from config.json alone.

A model keeps something per decoder layer: all keys and values, those of a window, a latent that
stands for both, or a state of fixed size. ``describe`` turns a config into a ``Geometry``, the list
of these pieces in the order of the layers; a geometry says how many bytes they take at a context
length, as 16-bit caches of mlx-lm or with TurboQuant's packed keys and values.

The rules per model type are in ``architectures``. Tests hold them against the real caches of every
model type that mlx-lm can build. A type without a rule gives None, never a cost of zero.

Counted is what mlx-lm allocates, for one sequence: full caches grow in steps of 256 tokens, a
window grows in steps of 256 up to its size. No MLX here, the planner has no need for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from . import architectures
from .pieces import Attention, Layer, Piece, State, UnknownGeometryError
from .spec import KVSpec

__all__ = [
    "Attention",
    "Geometry",
    "Layer",
    "Piece",
    "State",
    "describe",
    "packed_kv_bytes",
    "text_config",
]

STEP = 256
"""Tokens by which mlx-lm's caches grow."""

# Keys of the part of a config that describes the language model, in models that do more than text.
_TEXT_KEYS = ("text_config", "llm_config", "language_config", "language_model_config", "lm_config")
_NESTING = ("thinker_config",)

LayerKind = Literal["full", "window", "chunked", "latent", "index", "state"]


def packed_kv_bytes(tokens: int, heads: int, key_dim: int, value_dim: int, spec: KVSpec) -> int:
    """Bytes of the packed keys and values of one layer.

    Args:
        tokens: vectors stored, the capacity and not only those in use.
        heads: key/value heads.
        key_dim, value_dim: coordinates of a key and of a value.
        spec: how they are packed; it says what one vector takes.

    Raises:
        OptionError: the group size does not divide the heads.
    """
    return tokens * heads * spec.token_bytes(key_dim, value_dim)


def round_up(tokens: int) -> int:
    """The capacity of a full cache that holds so many tokens."""
    return -(-tokens // STEP) * STEP


@dataclass(frozen=True)
class Geometry:
    """The caches of one model.

    Attributes:
        model_type: the type whose rule was used.
        layers: what each layer keeps; most keep one piece, some several, some nothing.
        assumed: config keys that were absent, with the values that mlx-lm puts in their place.
    """

    model_type: str
    layers: tuple[Layer, ...]
    assumed: dict[str, Any] = field(default_factory=dict)

    def nbytes(self, context: int, kv: KVSpec | None = None, element_bytes: int = 2) -> int:
        """Bytes of all caches with ``context`` tokens in them.

        Args:
            context: tokens of prompt and answer.
            kv: TurboQuant packing, None for caches of the activations' own type.
            element_bytes: size of an activation, 2 for the 16-bit types.
        """
        return sum(self.bytes_by_kind(context, kv, element_bytes).values())

    def bytes_by_kind(
        self, context: int, kv: KVSpec | None = None, element_bytes: int = 2
    ) -> dict[str, int]:
        """The same by kind of piece: "full", "window", "chunked", "latent", "index", "state"."""
        result: dict[str, int] = {}
        packed = self._packed(kv)
        for number, piece in enumerate(self.pieces()):
            spec = kv if number in packed else None
            size = piece_bytes(piece, context, spec, element_bytes)
            result[piece.kind] = result.get(piece.kind, 0) + size
        return result

    def bytes_per_token(self, kv: KVSpec | None = None, element_bytes: int = 2) -> float:
        """Bytes that each further token adds, once windows are full and the first tokens past."""
        far = 1 << 22  # a multiple of STEP, beyond every window
        steps = 16 * STEP
        more = self.nbytes(far + steps, kv, element_bytes) - self.nbytes(far, kv, element_bytes)
        return more / steps

    def pieces(self) -> list[Piece]:
        """All pieces, layer by layer."""
        return [piece for layer in self.layers for piece in layer]

    def count(self, kind: str) -> int:
        """Number of pieces of a kind."""
        return sum(piece.kind == kind for piece in self.pieces())

    def packed(self, kv: KVSpec | None) -> int:
        """Number of pieces that TurboQuant packs: plain caches of all keys and values, without
        the protected ones."""
        return len(self._packed(kv))

    def _packed(self, kv: KVSpec | None) -> frozenset[int]:
        if kv is None:
            return frozenset()
        numbers = [n for n, piece in enumerate(self.pieces()) if is_packable(piece)]
        return frozenset(numbers[kv.protect_first : len(numbers) - kv.protect_last])


def is_packable(piece: Piece) -> bool:
    """Whether TurboQuant replaces this cache; the others stay as the model makes them."""
    return isinstance(piece, Attention) and piece.kind == "full"


def piece_bytes(piece: Piece, context: int, kv: KVSpec | None, element_bytes: int) -> int:
    """Bytes of one cache with ``context`` tokens in it, packed if there is a ``kv``.

    Raises:
        OptionError: the group size of ``kv`` does not divide the heads.
    """
    if isinstance(piece, State):
        return piece.values * element_bytes + piece.floats * 4 + piece.raw_bytes
    tokens = _capacity(piece, context)
    per_token = piece.heads * (piece.key_dim + piece.value_dim) * element_bytes
    if kv is None or context <= kv.warm_tokens:
        return tokens * per_token
    packed = packed_kv_bytes(
        round_up(context - kv.min_tokens), piece.heads, piece.key_dim, piece.value_dim, kv
    )
    return packed + kv.min_tokens * per_token


def _capacity(piece: Attention, context: int) -> int:
    if piece.window is None or context <= 0:
        return round_up(max(context, 0))
    if piece.kind == "chunked":
        # cut to the chunk before each token, then grown by a step again
        return round_up(context) if context <= piece.window else piece.window + STEP
    # the prompt as it is, then one step of growth for the first generated token
    return min(piece.window, context - 1 + STEP)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that describes the language model: itself, or a nested one."""
    for outer in _NESTING:
        if isinstance(config.get(outer), Mapping):
            return text_config(config[outer])
    for key in _TEXT_KEYS:
        if isinstance(config.get(key), Mapping):
            return text_config(config[key])
    return config


def describe(config: Mapping[str, Any]) -> Geometry | None:
    """The caches of the model that a config.json describes.

    Args:
        config: the whole content of config.json, of transformers 4 or 5.

    Returns:
        the geometry, or None where no rule for the model type exists or the config lacks what the
        rule asks for (``why_unknown`` says which).
    """
    try:
        return _describe(config)
    except UnknownGeometryError:
        return None


def why_unknown(config: Mapping[str, Any]) -> str:
    """One line about why ``describe`` gives None."""
    try:
        _describe(config)
    except UnknownGeometryError as error:
        return str(error)
    return ""


def _describe(config: Mapping[str, Any]) -> Geometry:
    name, settings = architectures.find(config, text_config(config))
    layers = architectures.RULES[name](settings)
    return Geometry(name, tuple(layers), settings.assumed)

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
from typing import Any

from .architectures import table
from .pieces import STEP, Attention, Layer, Piece, State, UnknownGeometryError
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

PACKED_STEP = 16
"""Tokens by which packed caches grow at least."""

# Keys of the part of a config that describes the language model, in models that do more than text.
_TEXT_KEYS = ("text_config", "llm_config", "language_config", "language_model_config", "lm_config")
_NESTING = ("thinker_config",)


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
        """The same by kind of piece: "full", "window", "chunked", "latent", "index", "compressed",
        "state"."""
        result: dict[str, int] = {}
        for piece, spec in self._specs(kv):
            size = piece_bytes(piece, context, spec, element_bytes)
            result[piece.kind] = result.get(piece.kind, 0) + size
        return result

    def bytes_per_token(self, kv: KVSpec | None = None, element_bytes: int = 2) -> float:
        """Bytes that each further token adds, once windows are full and the first tokens past."""
        far = 1 << 26  # a multiple of STEP, beyond every window and start
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
        """Number of pieces that TurboQuant packs: keys and values or latents of all tokens or of a
        window, without chunks, index keys and the protected layers."""
        return sum(packing(piece, spec) is not None for piece, spec in self._specs(kv))

    def _specs(self, kv: KVSpec | None) -> list[tuple[Piece, KVSpec | None]]:
        """Each piece and what it is packed by, if it can be. Where a layer with a window is
        protected, all windows are (``install.pack_prompt_cache``)."""
        if kv is None:
            return [(piece, None) for piece in self.pieces()]
        last = len(self.layers) - kv.protect_last
        free = [kv.protect_first <= number < last for number in range(len(self.layers))]
        pieces = [
            (piece, ok) for layer, ok in zip(self.layers, free, strict=True) for piece in layer
        ]
        windows_too = all(ok for piece, ok in pieces if piece.kind == "window")
        return [
            (piece, kv if ok and (windows_too or piece.kind != "window") else None)
            for piece, ok in pieces
        ]


def packing(piece: Piece, kv: KVSpec | None) -> KVSpec | None:
    """How TurboQuant packs this cache; None for one that stays as the model makes it."""
    if kv is None or not isinstance(piece, Attention):
        return None
    if not piece.value_dim:  # one vector is key and value at once, in a cache of the model's own
        return None
    if piece.kind == "window" and piece.window is not None:
        return kv.for_window(piece.window)
    return kv if piece.kind in ("full", "latent") else None


def piece_bytes(piece: Piece, context: int, kv: KVSpec | None, element_bytes: int) -> int:
    """Bytes of one cache with ``context`` tokens in it, packed if there is a ``kv``.

    A packed cache has columns for all tokens, or those of the window, and a sixteenth to spare,
    keeps the first tokens in 16 bits beside them as long as they are in the window, and one mean
    key per head.

    Raises:
        OptionError: the group size of ``kv`` does not divide the heads.
    """
    if isinstance(piece, State):
        return piece.values * element_bytes + piece.floats * 4 + piece.raw_bytes
    per_token = piece.heads * (piece.key_dim + piece.value_dim) * element_bytes
    spec = packing(piece, kv)
    if spec is None:
        waiting = context % piece.ratio * piece.open_floats * 4
        return _capacity(piece, context) * per_token + waiting
    if context < spec.warm_tokens:
        return packed_capacity(context) * per_token
    columns = packed_capacity(context, piece.window)
    packed = packed_kv_bytes(columns, piece.heads, piece.key_dim, piece.value_dim, spec)
    mean = piece.heads * piece.key_dim * element_bytes if spec.key_scheme == "turboquant" else 0
    gone = max(0, context - piece.window) if piece.window is not None else 0
    return packed + max(0, spec.min_tokens - gone) * per_token + mean


def packed_capacity(tokens: int, window: int | None = None) -> int:
    """Columns of a packed cache that holds so many tokens, all but the last from the prompt
    (``store.grown``). That of a window gives back what the prompt took beyond it, if it is much.
    """
    prompt = tokens - 1
    if prompt <= 0:
        return tokens * (1 + PACKED_STEP)
    capacity = prompt + max(PACKED_STEP, prompt // 16)
    if window is None or tokens <= window:
        return capacity
    spare = max(PACKED_STEP, window // 16)
    return capacity if capacity - window <= 2 * spare else window + spare


def _capacity(piece: Attention, context: int) -> int:
    if piece.window is None or context <= 0:
        vectors = max(context, 0) // piece.ratio
        return -(-vectors // piece.step) * piece.step
    if piece.kind == "chunked":
        # cut to the chunk before each token, then grown by a step again
        return round_up(context) if context <= piece.window else piece.window + STEP
    if piece.step == 1:
        return min(piece.window, context)
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
    name, settings = table.find(config, text_config(config))
    try:
        layers = tuple(table.RULES[name](settings))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # values of kinds that no honest config has; which, the rules do not check one by one
        raise UnknownGeometryError(f"config.json does not describe the layers: {error}") from error
    _check(layers)
    return Geometry(name, layers, settings.assumed)


def _check(layers: tuple[Layer, ...]) -> None:
    """Refuse what would be counted as nothing."""
    pieces = [piece for layer in layers for piece in layer]
    if not pieces:
        raise UnknownGeometryError("config.json describes no layer that keeps anything")
    for piece in pieces:
        if isinstance(piece, State):
            continue
        both = piece.kind in ("full", "chunked", "latent")
        if not piece.heads or not piece.key_dim or (both and not piece.value_dim):
            raise UnknownGeometryError("config.json describes keys and values of no size")
        if piece.window == 0:
            raise UnknownGeometryError("config.json describes a window of no tokens")

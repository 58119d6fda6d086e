"""The key-value cache of a plan: what it is called, when it is packed, and what packing takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..kvcache.geometry import Geometry, describe, packing, text_config
from ..kvcache.spec import DEFAULT_MIN_TOKENS, KVSpec
from .machine import Machine

if TYPE_CHECKING:
    from .projection import Request

GROWN_LAYERS = 12
"""Layers whose caches exist twice on a GPU: one that has grown replaces the old one at the end of
the batch of operations after its own. On an H200 a batch is 100 operations."""


def without_idle_packing(config: Mapping[str, Any], request: Request) -> tuple[Request, list[str]]:
    """The request without a packing that would not begin before its context ends, and a note."""
    kv, geometry = request.kv, describe(config)
    if kv is None or geometry is None:
        return request, []
    specs = [spec for spec in (packing(piece, kv) for piece in geometry.pieces()) if spec]
    if not specs or any(spec.warm_tokens <= request.context for spec in specs):
        return request, []
    if kv.start > kv.min_tokens + kv.mean_tokens:
        why = f"--quantized-kv-start {kv.start}"
    elif kv.min_tokens > DEFAULT_MIN_TOKENS:
        why = f"--kv-min-tokens {kv.min_tokens}"
    else:
        why = "the first tokens wait for one another"
    begin = min(spec.warm_tokens for spec in specs)
    note = f"the key-value cache stays in 16 bits: packing begins at {begin} tokens ({why}), and "
    note += f"--context is {request.context}"
    return replace(request, kv=None, kv_bits=None), [note]


def packing_bytes(
    geometry: Geometry, machine: Machine, request: Request, element_bytes: int
) -> int:
    """Bytes beyond those of the cache at the end that exist while it is packed: the tokens that
    waited for --quantized-kv-start in 16 bits, and what exists twice beside them, the packed
    copies of the layers that are at work (and on a GPU the grown 16-bit ones)."""
    kv, context = request.kv, request.context
    if kv is None or not kv.start or kv.warm_tokens > context:
        return 0

    def waiting(packed: KVSpec | None, tokens: int) -> int:
        kinds = geometry.bytes_by_kind(tokens, packed, element_bytes)
        return sum(kinds.get(kind, 0) for kind in ("full", "latent"))

    before, count = kv.warm_tokens - 1, len(geometry.layers)
    # a packed cache that waits has no more room than it waits for; one of a window may be packed
    held = min(geometry.nbytes(before, spec, element_bytes) for spec in (None, kv))
    if machine.backend == "cpu":
        twice = waiting(kv, kv.warm_tokens) // count
    else:
        grown = waiting(None, before) - waiting(kv, context)
        twice = (waiting(kv, kv.warm_tokens) + grown) * min(GROWN_LAYERS, count) // count
    return max(held + twice - geometry.nbytes(context, kv, element_bytes), 0)


def describe_size(config: Mapping[str, Any], request: Request) -> str:
    """What the size of the cache is that of, in words."""
    kind = "16-bit" if request.kv is None else request.kv.describe()
    longest = size_of(text_config(config), "max_position_embeddings")
    made_for = request.default_context and request.context == longest
    cut = " (what the model was made for)" if made_for else ""
    return f"{kind} at {request.context} tokens{cut}, from config.json"


def describe_kinds(geometry: Geometry, request: Request) -> str:
    """How many caches of which kind, and how many of them are packed."""
    kv = request.kv
    kinds = ("full", "window", "chunked", "latent", "compressed", "index", "state")
    counts = [f"{geometry.count(kind)} {kind}" for kind in kinds if geometry.count(kind)]
    text = ", ".join(counts) or "none"
    if kv is None:
        return text
    specs = (packing(piece, kv) for piece in geometry.pieces())
    later = sum(spec is not None and spec.warm_tokens > request.context for spec in specs)
    packed = max(geometry.packed(kv) - later, 0)
    return f"{text}; {packed} packed as {kv.describe()}"


def size_of(config: Mapping[str, Any], *names: str) -> int | None:
    """The first of these keys that holds a sensible size, None if none does."""
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**40:
            return value
    return None

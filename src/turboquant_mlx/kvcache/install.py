"""Put packed caches where plain ones would be, and tell what became of each layer.

Only entries of exactly ``KVCache`` and ``RotatingKVCache`` (or their batches) of mlx-lm or mlx-vlm
are packed, also inside ``CacheList``, lists and tuples. Recurrent and chunked caches stay as they
are, and windows too short to be packed; ``CacheReport`` says so, and what everything costs in fact.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache

from ..cli import notice
from ..errors import OptionError
from .cache import BatchTurboQuantKVCache, TurboQuantKVCache, batch_store
from .packed import PackedCache, kind_of
from .rotating import (
    BatchTurboQuantRotatingKVCache,
    TurboQuantRotatingKVCache,
    store_of_batch,
    window_spec,
)
from .spec import (
    KVOptions,
    KVSpec,
    is_quantization_aware,
    options_from_environment,
    resolve,
    turboquant_enabled,
)

FULL, WINDOWS = ("KVCache", "BatchKVCache"), ("RotatingKVCache", "BatchRotatingKVCache")

KEPT = 4
"""First tokens that a cache of a given size never forgets, as in mlx-lm."""

ATTENTION_PAIRS = ("longcat_flash", "longcat_flash_ngram")
"""Model types whose ``CacheList`` has two caches of attention. In the others a second ``KVCache``
holds the keys of an index (DeepSeek-V3.2, MiniMax-M3), which the model's code reaches into."""


def pack_entry(
    entry: Any, spec: KVSpec, model_type: str | None = None, windows_too: bool = True
) -> Any:
    """A packed cache in place of a plain one, with what it holds; other entries as they are.

    Of a ``CacheList`` only the first cache of attention is packed, but both in ``ATTENTION_PAIRS``.
    Windows are left as they are on request, and where they are too short (``KVSpec.for_window``).
    """
    if kind_of(entry) == "KVCache":
        return TurboQuantKVCache.from_cache(entry, spec=spec)
    if kind_of(entry) == "BatchKVCache":
        packed = BatchTurboQuantKVCache([0], spec=spec)
        packed.store = batch_store(entry, spec)
        return packed
    if kind_of(entry) in WINDOWS and windows_too:
        return _pack_window(entry, spec)
    if kind_of(entry) == "CacheList":
        first = next((c for c in entry.caches if _is_attention(c)), None)
        every = model_type in ATTENTION_PAIRS
        entry.caches = type(entry.caches)(
            pack_entry(c, spec, model_type, windows_too) if every or c is first else c
            for c in entry.caches
        )
        return entry
    if type(entry) in (list, tuple):
        return type(entry)(pack_entry(c, spec, model_type, windows_too) for c in entry)
    return entry


def _is_attention(entry: Any) -> bool:
    """Whether a cache holds keys and values, packed already or not."""
    return kind_of(entry) in (*FULL, *WINDOWS) or isinstance(entry, PackedCache)


def _pack_window(entry: Any, spec: KVSpec) -> Any:
    made = spec.for_window(entry.max_size, getattr(entry, "keep", 0))
    if made is None:
        return entry
    if kind_of(entry) == "RotatingKVCache":
        return TurboQuantRotatingKVCache.from_cache(entry, spec=spec)
    packed = BatchTurboQuantRotatingKVCache(entry.max_size, [0], spec=spec)
    packed.store = store_of_batch(entry, made)
    return packed


def pack_prompt_cache(prompt_cache: list[Any], spec: KVSpec, model: Any = None) -> None:
    """Replace the plain caches of a prompt cache by packed ones, in place, protected layers left
    out. ``model`` is the one that made it, if that is known.

    Layers with a sliding window share one mask, and in a batch that of a plain window turns around
    with it. So where one of them is protected, all of them stay plain.
    """
    model_type = getattr(model, "model_type", None)
    last = len(prompt_cache) - spec.protect_last
    free = [spec.protect_first <= i < last for i in range(len(prompt_cache))]
    pairs = list(zip(prompt_cache, free, strict=True))
    windows_too = all(ok for entry, ok in pairs if any(map(_is_window, _entries([entry]))))
    for i, (entry, ok) in enumerate(pairs):
        if ok:
            prompt_cache[i] = pack_entry(entry, spec, model_type, windows_too)


def _is_window(entry: Any) -> bool:
    return kind_of(entry) in WINDOWS


def install(model: Any, spec: KVSpec, max_kv_size: int | None = None) -> None:
    """Let ``make_prompt_cache(model)`` make packed caches, for all of mlx-lm (generation, batches,
    prompt caches, servers). For a vision-language model of mlx-vlm pass its ``language_model``.

    Args:
        model: of mlx-lm or mlx-vlm.
        spec: how they are packed.
        max_kv_size: tokens that a cache holds at most; older ones but the first four are forgotten.
            Here and not in ``make_prompt_cache``, which leaves such a size aside for every model
            that brings a ``make_cache``, and so for this one.

    Raises:
        OptionError: a size for a model that makes caches of its own, or one too short to be packed.
    """
    uninstall(model)
    original: Callable[[], list[Any]] | None = getattr(model, "make_cache", None)
    if max_kv_size is not None:
        if original is not None:
            raise OptionError("this model makes caches of its own, whose size cannot be set")
        window_spec(spec, max_kv_size, KEPT)

    def make_cache() -> list[Any]:
        if original:
            made = list(original())
        elif max_kv_size is not None:
            made = [RotatingKVCache(max_kv_size, KEPT) for _ in model.layers]
        else:
            made = [KVCache() for _ in model.layers]
        pack_prompt_cache(made, spec, model)
        return made

    make_cache.packed = True  # type: ignore[attr-defined]
    model.make_cache = make_cache


def uninstall(model: Any) -> None:
    """Let the model make its own caches again."""
    if getattr(getattr(model, "make_cache", None), "packed", False):
        del model.make_cache


# -- the names of mlx-vlm -----------------------------------------------------------------------


def get_quantized_kv_bits(model: str | os.PathLike[str] | None = None) -> float | None:
    """Bits that the variable ``KV_BITS`` asks for; None where it is absent or 0.

    Args:
        model: name or path of the model. For one that was trained with quantization awareness
            (its name has "qat" in it) the answer is None as well, and a note says so.

    Raises:
        OptionError: the variable holds no supported number.
    """
    said = options_from_environment()
    spec = resolve(KVOptions(bits=said.bits), {}) if said.bits is not None else None
    if spec is None:
        return None
    if is_quantization_aware(model):
        notice(qat_message(model))
        return None
    return (spec.key_bits + spec.value_bits) / 2


def get_kv_quant_scheme(default: str = "uniform") -> str:
    """Scheme that the variable ``KV_QUANT_SCHEME`` names; mlx-vlm's default where it is absent.

    Raises:
        OptionError: it is no scheme.
    """
    return options_from_environment().scheme or default


def qat_message(model: Any) -> str:
    """Why the cache of such a model stays plain."""
    return (
        f"{os.fspath(model)} was trained with quantization awareness: its key-value cache stays "
        "in 16 bits"
    )


def maybe_quantize_kv_cache(
    prompt_cache: list[Any],
    quantized_kv_start: int,
    kv_group_size: int,
    kv_bits: float | None,
    kv_quant_scheme: str = "uniform",
    kv_key_bits: int | None = None,
    kv_value_bits: int | None = None,
    kv_key_scheme: str | None = None,
    kv_value_scheme: str | None = None,
    kv_min_tokens: int | None = None,
) -> None:
    """Replace plain caches by packed ones in place, by mlx-vlm's rules; call it as often as you
    like.

    Unlike there, the last layer and sliding windows are packed, too.

    Fractional bits are TurboQuant whatever the scheme says. An empty cache is replaced at once and
    stays in 16 bits until it has ``quantized_kv_start`` tokens; one that holds tokens is replaced
    when it has that many.

    Args:
        prompt_cache: a model's caches.
        quantized_kv_start: tokens from which on they are packed.
        kv_group_size: of the uniform scheme; a TurboQuant head has one scale.
        kv_bits: None and 0 do nothing.
        kv_quant_scheme, kv_key_scheme, kv_value_scheme: "turboquant" or "uniform".
        kv_key_bits, kv_value_bits: of one side, in place of what ``kv_bits`` gives.
        kv_min_tokens: first tokens that stay in 16 bits.

    Raises:
        OptionError: unsupported values.
    """
    if not kv_bits and kv_key_bits is None and kv_value_bits is None:
        return
    scheme = kv_quant_scheme
    if kv_bits and turboquant_enabled(kv_bits, kv_quant_scheme):
        scheme = "turboquant"
    schemes = {kv_key_scheme or scheme, kv_value_scheme or scheme}
    # as variables: there one side may be given alone, as mlx-vlm permits
    widths = {"KV_BITS": kv_bits, "KV_KEY_BITS": kv_key_bits, "KV_VALUE_BITS": kv_value_bits}
    spec = resolve(
        KVOptions(
            scheme=scheme,
            key_scheme=kv_key_scheme,
            value_scheme=kv_value_scheme,
            group_size=kv_group_size if "uniform" in schemes else None,
            min_tokens=kv_min_tokens,
            start=quantized_kv_start,
        ),
        {name: str(bits) for name, bits in widths.items() if bits is not None},
    )
    if spec is None:
        return
    for i, entry in enumerate(prompt_cache):
        prompt_cache[i] = _pack_when_due(entry, spec)


def _pack_when_due(entry: Any, spec: KVSpec) -> Any:
    if type(entry) in (list, tuple):
        return type(entry)(_pack_when_due(c, spec) for c in entry)
    caches = entry.caches if kind_of(entry) == "CacheList" else [entry]
    for cache in caches:
        held = kind_of(cache) in ("KVCache", "RotatingKVCache") and cache.keys is not None
        if held and cache.offset < spec.start:
            return entry
    return pack_entry(entry, spec)


# -- what it came to ----------------------------------------------------------------------------


@dataclass(frozen=True)
class CacheReport:
    """What a prompt cache holds, in bytes that are really allocated.

    Attributes:
        layers: entries that hold keys and values or another state.
        packed: those that are packed caches.
        frozen: those of them that have packed something so far.
        pending: those of them that hold tokens, all in 16 bits as yet.
        held: bytes of all.
        plain: bytes that the same tokens take in 16 bits (layers left alone: as they are).
        spare: bytes of ``held`` that hold no token yet, of packed caches.
        widest: values of the widest head of a packed cache, 0 if none holds anything.
        left: kind of cache -> how many were left alone.
    """

    layers: int
    packed: int
    frozen: int
    pending: int
    held: int
    plain: int
    spare: int
    widest: int
    left: dict[str, int]

    @classmethod
    def of(cls, prompt_cache: Any) -> CacheReport:
        """Look at a model's caches."""
        packed = frozen = pending = held = plain = spare = widest = 0
        left: Counter[str] = Counter()
        for entry in _entries(prompt_cache):
            if isinstance(entry, PackedCache):
                packed += 1
                frozen += any(entry.store.frozen)
                pending += not (any(entry.store.frozen) or entry.empty())
                held += entry.nbytes
                plain += entry.plain_nbytes
                spare += entry.spare_nbytes
                widest = max(widest, *entry.store.widths)
                continue
            left[type(entry).__name__] += 1
            n = _nbytes(entry)
            held, plain = held + n, plain + n
        layers = packed + sum(left.values())
        return cls(layers, packed, frozen, pending, held, plain, spare, widest, dict(left))

    def describe(self) -> str:
        """One line: how many layers are packed and what the cache costs."""
        if not self.packed:
            return f"key-value cache: {_size(self.held)}, not packed"
        line = f"key-value cache: {_size(self.held)}"
        if self.spare:
            line += f" ({_size(self.spare)} of it spare)"
        line += f", {_size(self.plain)} for the same tokens in 16 bits"
        line += f"; {self.packed} of {self.layers} layers"
        return line + (" to be packed" if self.pending else " packed")

    def left_alone(self) -> str | None:
        """What stays in 16 bits, or None."""
        if not self.left:
            return None
        kinds = ", ".join(f"{n} {name}" for name, n in sorted(self.left.items()))
        return f"{self.packed} of {self.layers} layers are packed; left as they are: {kinds}"


def _entries(prompt_cache: Any) -> Iterator[Any]:
    for entry in prompt_cache:
        if kind_of(entry) == "CacheList":
            yield from _entries(entry.caches)
        elif type(entry) in (list, tuple):
            yield from _entries(entry)
        elif entry is not None:
            yield entry


def _nbytes(entry: Any) -> int:
    if kind_of(entry) == "ArraysCache":
        return sum(a.nbytes for a in entry.cache if isinstance(a, mx.array))
    try:
        return int(entry.nbytes)
    except (AttributeError, NotImplementedError):
        return 0


def _size(n: int) -> str:
    if n < 1e6:
        return f"{n / 1e3:.0f} kB"
    return f"{n / 1e6:.1f} MB" if n < 1e9 else f"{n / 1e9:.2f} GB"

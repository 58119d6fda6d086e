"""A packed store as arrays and numbers, for prompt caches in files, and back.

What comes back is checked: kernels trust the shapes of a store, and read what lies behind an array
that is too short.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import mlx.core as mx

from ..errors import CheckpointError, OptionError
from .codec import Parts, SideCodec
from .spec import KVSpec
from .store import PackedStore

STATE_VERSION = 1
_DTYPES = ("float16", "bfloat16", "float32")


def state_of(store: PackedStore) -> tuple:
    """What ``store_of`` makes the store of again; what a window has dropped is left out."""
    s = store
    spec = ",".join(f"{k}={v}" for k, v in asdict(s.spec).items())
    facts = (STATE_VERSION, spec, s.dtype_name, s.columns, s.widths[0], s.widths[1])
    rows = [(p, bool(f)) for p, f in zip(s.padding, s.frozen, strict=True)]
    few = tuple(_own(a) for a in (s.shift, s.raw_keys, s.raw_values))
    return facts, rows, few, [_own(a) for a in s.keys], [_own(a) for a in s.values]


def _own(array: Any) -> Any:
    """An array of one's own with the same contents: a store writes into its arrays in place, which
    changes whatever holds the same object."""
    return mx.array(array) if isinstance(array, mx.array) else array


def store_of(state: tuple, *, keep: int = 0, dropped: Sequence[int] = ()) -> PackedStore:
    """The store that ``state_of`` was given.

    Args:
        state: what it returned.
        keep, dropped: of a window.

    Raises:
        CheckpointError: it is none, or arrays do not fit each other.
    """
    try:
        # an empty cache has no arrays, and mlx-lm's files leave empty lists out
        facts, rows, (shift, raw_keys, raw_values), *sides = state
        version, text, dtype_name, columns, key_width, value_width = facts
        if version != STATE_VERSION:
            raise CheckpointError(
                f"a packed cache of state version {version} is not known to this version",
                hint="make the prompt cache anew",
            )
        fields: dict[str, Any] = dict(pair.split("=") for pair in text.split(","))
        known: dict[str, Any] = {
            k: v if k.endswith("scheme") else int(v) for k, v in fields.items()
        }
        store = PackedStore(
            KVSpec(**known),
            [int(p) for p, _ in rows],
            int(columns),
            [bool(f) for _, f in rows],
            keep=keep,
            dropped=list(dropped),
        )
        store.dtype_name, store.widths = dtype_name, (int(key_width), int(value_width))
        store.shift, store.raw_keys, store.raw_values = map(_own, (shift, raw_keys, raw_values))
        if raw_keys is not None:
            keys, values = sides
            store.keys, store.values = tuple(map(_own, keys)), tuple(map(_own, values))
            _check(store)
        return store
    except (TypeError, ValueError, AttributeError, OptionError) as error:
        raise CheckpointError(f"this is no state of a packed cache: {error}") from error


def _check(store: PackedStore) -> None:
    """Raise ValueError unless numbers and arrays of a store that is not empty fit together."""
    if store.dtype_name not in _DTYPES:
        raise ValueError(f"keys of dtype {store.dtype_name}")
    if len(store.dropped) != store.batch:
        raise ValueError(f"{len(store.dropped)} rows have dropped tokens, of {store.batch}")
    if store.columns < 0 or any(not 0 <= p <= store.columns for p in store.padding):
        raise ValueError(f"padding {store.padding} of {store.columns} columns")
    raw_keys, raw_values, shift = store.raw_keys, store.raw_values, store.shift
    assert raw_keys is not None
    if raw_keys.ndim != 4:
        raise ValueError(f"keys of shape {raw_keys.shape}")
    _, heads, tokens, _ = raw_keys.shape
    lead = (store.batch, heads, tokens)
    _check_array("keys in 16 bits", raw_keys, (*lead, store.widths[0]), store.dtype)
    _check_array("values in 16 bits", raw_values, (*lead, store.widths[1]), store.dtype)
    if max(store.raw_lengths(), default=0) > tokens:
        raise ValueError(f"{tokens} tokens in 16 bits where there are {max(store.raw_lengths())}")
    if not store.key_codec.rotated:
        if shift is not None:
            raise ValueError("a mean key of keys that have none")
    else:
        _check_array("mean key", shift, (*lead[:2], 1, store.widths[0]), store.dtype)
    capacities = {
        _check_parts(name, parts, codec, store, heads)
        for name, parts, codec in (
            ("keys", store.keys, store.key_codec),
            ("values", store.values, store.value_codec),
        )
    }
    if len(capacities) != 1:
        raise ValueError("keys and values have room for different numbers of tokens")
    if any(store.frozen) and min(capacities) < store.columns:
        raise ValueError(f"{store.columns} tokens in room for {min(capacities)}")


def _check_parts(name: str, parts: Parts, codec: SideCodec, store: PackedStore, heads: int) -> int:
    """Columns that the arrays of a side have room for."""
    wanted = codec.empty(store.batch, heads, 0, store.dtype)
    if len(parts) != len(wanted):
        raise ValueError(f"{len(parts)} arrays of {name}, not {len(wanted)}")
    capacity = parts[0].shape[2] if parts[0].ndim == 4 else 0
    for part, like in zip(parts, wanted, strict=True):
        shape = (*like.shape[:2], capacity, like.shape[3])
        _check_array(f"packed {name}", part, shape, like.dtype)
    return capacity


def _check_array(name: str, array: Any, shape: tuple[int, ...], dtype: mx.Dtype) -> None:
    if not isinstance(array, mx.array) or array.shape != shape or array.dtype != dtype:
        found = f"{array.shape} {array.dtype}" if isinstance(array, mx.array) else "missing"
        raise ValueError(f"{name}: {found}, not {shape} {dtype}")

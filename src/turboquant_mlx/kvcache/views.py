"""What a packed cache hands to a model: arrays that also know where they come from.

``update_and_fetch`` must return keys and values. It returns a :class:`PackedView`, an ``mx.array``
that holds the graph of the decoded tensor, not evaluated, with a link to the packed store. A model
that computes with it gets what it expects. The attention hook, which all models reach, recognises
the pair and answers a few queries from the packed store, so that the graph is never run.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import mlx.core as mx

from ..kernels import attention_hook
from .attend import MAX_QUERIES, attend
from .store import PackedStore


class PackedView(mx.array):
    """Decoded keys or values, lazy; ``link`` is (store, its version, "keys" or "values")."""

    link: tuple[PackedStore, int, str] | None


def _unlinked(name: str) -> Any:
    """A method that changes an array in place: what it holds is no longer what the store holds."""
    change = getattr(mx.array, name)

    def changed(self: PackedView, *args: Any) -> Any:
        self.link = None
        return change(self, *args)

    return changed


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or"):
    if hasattr(mx.array, f"__i{_name}__"):
        setattr(PackedView, f"__i{_name}__", _unlinked(f"__i{_name}__"))
PackedView.__setitem__ = _unlinked("__setitem__")  # type: ignore[method-assign]


def view_pair(store: PackedStore, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
    """Keys and values of the store as it is now: of all columns, or of the last ones.

    They must not be kept: the store's next append writes in place only if nobody else holds it.
    """
    pair = PackedView(keys), PackedView(values)
    for view, kind in zip(pair, ("keys", "values"), strict=True):
        view.link = (store, store.version, kind)
    return pair


def linked_store(keys: Any, values: Any) -> PackedStore | None:
    """The store that both are views of, as long as it has not changed since."""
    if type(keys) is not PackedView or type(values) is not PackedView:
        return None
    if keys.link is None:
        return None
    store, version, kind = keys.link
    same = values.link == (store, version, "values")
    return store if same and kind == "keys" and version == store.version else None


def answer(q, k, v, *, scale, mask=None, sinks=None) -> mx.array | None:
    """Handler of the attention hook: a few queries over a packed store, or None to decline."""
    store = linked_store(k, v)
    if store is None or q.ndim != 4 or q.shape[2] > MAX_QUERIES:
        return None
    if isinstance(mask, str) and mask != "causal":
        return None
    if isinstance(mask, mx.array):
        mask = _widened(mask, store.columns - k.shape[2])
    return attend(q, store, scale=scale, mask=mask, sinks=sinks)


def _widened(mask: mx.array, columns: int) -> mx.array:
    """A mask of the columns that a view shows as one of all: those in front are not seen."""
    if not columns or mask.shape[-1] == 1:
        return mask
    hidden = False if mask.dtype == mx.bool_ else -math.inf
    front = mx.full((*mask.shape[:-1], columns), hidden, dtype=mask.dtype)
    return mx.concatenate([front, mask], axis=-1)


class HookHold:
    """Keeps the attention hook in place as long as it lives; every packed cache has one."""

    def __init__(self) -> None:
        attention_hook.register(answer)

    def __deepcopy__(self, memo: dict) -> HookHold:
        return HookHold()

    def __reduce__(self):
        return (HookHold, ())

    def __del__(self) -> None:
        # at the end of the interpreter what it needs may be gone already
        with contextlib.suppress(Exception):
            attention_hook.unregister(answer)

"""One reversible wrapper around ``mx.fast.scaled_dot_product_attention``.

Models look the function up on ``mx.fast`` at each call, so replacing that one attribute reaches
all of them, mlx-lm's and mlx-vlm's. The wrapper asks the registered handlers in turn; one that
returns None declines, and when all decline the original runs. It is in place only while at least
one handler is registered. This is the only place where the package patches a library.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

import mlx.core as mx

Handler = Callable[..., "mx.array | None"]
"""``handler(q, k, v, *, scale, mask, sinks) -> output or None``."""

_lock = threading.RLock()
_handlers: dict[Handler, int] = {}
_original: Callable | None = None


def register(handler: Handler) -> None:
    """Ask ``handler`` first from now on; counted, so it leaves with its last ``unregister``."""
    global _original
    with _lock:
        _handlers[handler] = _handlers.get(handler, 0) + 1
        if _original is None:
            _original = mx.fast.scaled_dot_product_attention
            mx.fast.scaled_dot_product_attention = _wrap(_original)  # type: ignore[assignment]


def unregister(handler: Handler) -> None:
    """Undo one ``register``; the original function is put back when nobody is left."""
    global _original
    with _lock:
        count = _handlers.get(handler, 0)
        if count > 1:
            _handlers[handler] = count - 1
        elif count == 1:
            del _handlers[handler]
        if not _handlers and _original is not None:
            mx.fast.scaled_dot_product_attention = _original  # type: ignore[assignment]
            _original = None


def is_installed() -> bool:
    """Whether the wrapper is in place now."""
    return _original is not None


def _wrap(original: Callable) -> Callable:
    @functools.wraps(original)
    def scaled_dot_product_attention(q, k, v, *, scale, mask=None, sinks=None, **rest):
        # an argument that handlers do not know (a stream, say) goes to the original
        for handler in [] if rest else list(reversed(_handlers)):
            out = handler(q, k, v, scale=scale, mask=mask, sinks=sinks)
            if out is not None:
                return out
        return original(q, k, v, scale=scale, mask=mask, sinks=sinks, **rest)

    return scaled_dot_product_attention

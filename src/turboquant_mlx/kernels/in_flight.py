"""A bound for decoded weights that a GPU has not multiplied yet.

MLX hands work to the GPU in large pieces and frees what a piece made when all of it is done. A
prompt decodes every weight of the model, so without a bound several layers' worth of decoded
weights would be in memory at once, more than all packed ones. Here work is handed over as soon as
it holds so many bytes, and the host waits until no more than two such pieces are under way. The
GPU has one to do while it prepares the next.
"""

from __future__ import annotations

import threading

import mlx.core as mx

from .dispatch import backend
from .selection import IN_FLIGHT_BYTES


class _State(threading.local):
    n_bytes = 0
    marks: tuple[mx.array, ...] = ()


_state = _State()


def limit_bytes() -> int:
    """Decoded bytes after which work is handed over here."""
    choice = backend()
    return IN_FLIGHT_BYTES["metal" if choice == "metal" else "cuda"]


def note_decoded(product: mx.array, n_bytes: int) -> None:
    """Count what was decoded for a product, and wait for an earlier one if that is too much.

    Does nothing while a transformation traces, when nothing can be computed.

    Args:
        product: lazy; what the decoded bytes are for.
        n_bytes: of the decoded weight.
    """
    _state.n_bytes += n_bytes
    if _state.n_bytes < limit_bytes() or product.size == 0:
        return
    _state.n_bytes = 0
    # one number of its own, that keeps none of the product in memory
    mark = product.reshape(-1)[:1] + 0
    try:
        mx.async_eval(mark)
    except (ValueError, RuntimeError) as error:
        if "transformation" in str(error):
            return
        raise
    if _state.marks:
        mx.eval(_state.marks)
    _state.marks = (mark,)

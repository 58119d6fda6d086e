"""What runs a loaded model here, in words: the back-end, and which weights its kernels read."""

from __future__ import annotations

import math
from collections import Counter

import mlx.core as mx
import mlx.nn as nn

from ..kernels.dispatch import backend, kernels_of_backend, why_backend
from ..kernels.selection import MATVEC_ROWS
from ..kernels.unpack import why_no_kernel
from .cpu import expanded_bytes
from .install import packed_layers


def describe_backend(model: nn.Module, dtype: mx.Dtype) -> list[str]:
    """Lines for people: the back-end and what multiplies by the packed weights.

    Args:
        model: loaded, of any kind.
        dtype: of its activations.
    """
    lines = [f"back-end: {why_backend()}"]
    layers = [layer for _, layer in packed_layers(model)]
    if not layers:
        n_bytes = expanded_bytes(model) if backend() == "cpu" else 0
        multiply = "MLX's own operations multiply"
        if n_bytes:
            multiply = f"NumPy multiplies by float32 copies that take up to {n_bytes / 1e9:.2f} GB"
        return [*lines, f"weights: none are packed, {multiply}"]
    if backend() == "cpu":
        kept = [layer for layer in layers if layer.expanded.keep]
        n_bytes = 4 * sum(math.prod(layer.shape) for layer in kept)
        if kept:
            lines.append(
                f"weights: {len(kept)} packed layers, expanded to float32 at their first use and "
                f"kept ({n_bytes / 1e9:.2f} GB)"
            )
        if len(kept) < len(layers):
            lines.append(
                f"weights: {len(layers) - len(kept)} packed layers, decoded at each use, block by "
                "block"
            )
        return lines
    dialect = kernels_of_backend(dtype)
    reasons: Counter[str] = Counter()
    for layer in layers:
        reasons[why_no_kernel(layer.packed()) if dialect else f"no kernels for {dtype}"] += 1
    if reasons[""]:
        lines.append(
            f"weights: {reasons['']} packed layers, read as stored by {dialect} kernels for up to "
            f"{MATVEC_ROWS} tokens, decoded by them for more"
        )
    for reason, count in reasons.items():
        if reason:
            lines.append(f"weights: {count} packed layers by plain MLX operations: {reason}")
    sketches = sum(layer.use_qjl for layer in layers)
    if sketches:
        lines.append(f"QJL correction: {sketches} layers, a product of its own in each")
    return lines

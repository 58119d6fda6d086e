"""Share out bits: which parts of a model get which width under a budget of bytes.

The loss of a model is close to the sum of the losses that its parts cause one by one (the
linearity theorem of HIGGS, Malinovskii et al., 2024, arXiv 2411.17525, section 4), so widths can
be chosen part by part. That is a knapsack; the greedy way over the lower convex hull of each
part's (bytes, loss) is optimal but for the last step. Arithmetic only: no MLX, no model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Part:
    """What shares one width.

    Attributes:
        name: of the part.
        num_bytes: width in bits -> stored bytes of the part.
        losses: width in bits -> what the model loses when only this part has that width.
    """

    name: str
    num_bytes: Mapping[int, int]
    losses: Mapping[int, float]


class _Step(NamedTuple):
    """From one width of a part to a larger one."""

    gain_per_byte: float
    num_bytes: int
    part: int
    bits: int


def allocate(parts: Sequence[Part], budget_bytes: int) -> dict[str, int]:
    """The width of each part for the least summed loss within the budget.

    Args:
        parts: each with at least one width.
        budget_bytes: what all parts may take together.

    Returns:
        name of the part -> width in bits.

    Raises:
        ValueError: even the smallest widths take more than the budget.
    """
    chosen = [min(part.num_bytes) for part in parts]
    left = budget_bytes - sum(p.num_bytes[bits] for p, bits in zip(parts, chosen, strict=True))
    if left < 0:
        raise ValueError("the smallest widths exceed the budget")
    steps = sorted(
        (step for i, part in enumerate(parts) for step in _hull_steps(i, part)),
        key=lambda step: (-step.gain_per_byte, step.part, step.bits),
    )
    # along a hull the gain per byte falls, so a part's steps come in order
    skipped: set[int] = set()
    for step in steps:
        if step.num_bytes <= left and step.part not in skipped:
            chosen[step.part] = step.bits
            left -= step.num_bytes
        else:
            skipped.add(step.part)
    return {part.name: bits for part, bits in zip(parts, chosen, strict=True)}


def _hull_steps(index: int, part: Part) -> Iterable[_Step]:
    """Steps along the lower convex hull of (bytes, loss), from the smallest width up."""
    widths = sorted(part.num_bytes)
    at = widths[0]
    while True:
        best: _Step | None = None
        for bits in widths:
            more = part.num_bytes[bits] - part.num_bytes[at]
            gain = part.losses[at] - part.losses[bits]
            if bits > at and more > 0 and gain > 0:
                step = _Step(gain / more, more, index, bits)
                if best is None or step.gain_per_byte > best.gain_per_byte:
                    best = step
        if best is None:
            return
        yield best
        at = best.bits

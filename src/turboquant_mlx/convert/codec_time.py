"""What to tell the user before weights are coded in a way that takes its time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from ..quant.forecast import expected_seconds
from ..quant.spec import QuantSpec
from .recipe import ModuleInfo, Plan
from .report import format_seconds

SHORT = 5.0  # seconds that need no announcement
FEW = 3_000_000  # weights that no machine takes so long for: they are not worth a trial


def codec_notices(plan: Plan, modules: Sequence[ModuleInfo]) -> list[str]:
    """How long the trellis codes of a plan will take, if that is worth a word.

    Args:
        plan: the decisions for all modules.
        modules: the modules, in the plan's order.

    Returns:
        no or one line.
    """
    weights: Counter[QuantSpec] = Counter()
    for module, decision in zip(modules, plan.decisions, strict=True):
        if decision.spec is not None and decision.spec.is_trellis:
            weights[decision.spec] += math.prod(module.shape)
    if weights.total() < FEW:
        return []
    seconds = sum(expected_seconds(count, spec) for spec, count in weights.items())
    if seconds < SHORT:
        return []
    return [
        f"the search for trellis codes of {weights.total() / 1e6:.0f} million weights takes about "
        f"{format_seconds(seconds)} here"
    ]

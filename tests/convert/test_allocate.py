"""Widths under a budget: the least loss, never a byte too many."""

from __future__ import annotations

import itertools
import random

import pytest

from turboquant_mlx.convert.allocate import Part, allocate


def part(name: str, size: int, loss: float) -> Part:
    """Loss falls to a quarter with each bit."""
    return Part(
        name, {b: size * b for b in (2, 3, 4)}, {b: loss * 4.0 ** (2 - b) for b in (2, 3, 4)}
    )


def cost(parts: list[Part], widths: dict[str, int]) -> tuple[int, float]:
    return (
        sum(p.num_bytes[widths[p.name]] for p in parts),
        sum(p.losses[widths[p.name]] for p in parts),
    )


def test_equal_parts_within_an_even_budget_get_equal_widths() -> None:
    parts = [part(name, 100, 1.0) for name in "abcd"]
    assert allocate(parts, 1200) == dict.fromkeys("abcd", 3)


def test_the_sensitive_part_gets_more() -> None:
    parts = [part("calm", 100, 0.01), part("nervous", 100, 1.0)]
    assert allocate(parts, 600) == {"calm": 2, "nervous": 4}


def test_a_small_part_is_cheap_to_widen() -> None:
    parts = [part("large", 1000, 1.0), part("small", 10, 1.0)]
    assert allocate(parts, 2020) == {"large": 2, "small": 2}
    assert allocate(parts, 2040) == {"large": 2, "small": 4}


def test_what_one_part_cannot_take_goes_to_others() -> None:
    parts = [part("large", 1000, 9.0), part("small", 10, 0.001)]
    assert allocate(parts, 2020 + 500) == {"large": 2, "small": 4}


def test_a_width_that_loses_more_than_a_smaller_one_is_never_taken() -> None:
    odd = Part("odd", {2: 20, 3: 30, 4: 40}, {2: 1.0, 3: 1.5, 4: 0.2})
    assert allocate([odd], 35) == {"odd": 2}
    assert allocate([odd], 40) == {"odd": 4}


def test_a_budget_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="exceed the budget"):
        allocate([part("a", 100, 1.0)], 199)


@pytest.mark.parametrize("seed", range(5))
def test_it_comes_close_to_trying_everything(seed: int) -> None:
    rng = random.Random(seed)
    parts = [part(str(i), rng.randint(10, 30), rng.random() ** 3) for i in range(6)]
    budget = rng.randint(sum(p.num_bytes[2] for p in parts), sum(p.num_bytes[4] for p in parts))
    n_bytes, loss = cost(parts, allocate(parts, budget))
    assert n_bytes <= budget
    every = (
        cost(parts, dict(zip((p.name for p in parts), widths, strict=True)))
        for widths in itertools.product((2, 3, 4), repeat=6)
    )
    best = min(loss for n_bytes, loss in every if n_bytes <= budget)
    worst_step = max(p.losses[2] - p.losses[4] for p in parts)
    assert best <= loss <= best + worst_step

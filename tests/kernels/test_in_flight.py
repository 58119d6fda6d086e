"""The bound for decoded weights: what is handed over when, and what the host waits for."""

from __future__ import annotations

import mlx.core as mx
import pytest

from turboquant_mlx.kernels import in_flight
from turboquant_mlx.kernels.in_flight import limit_bytes, note_decoded


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(in_flight, "_state", in_flight._State())


@pytest.fixture
def handed_over(monkeypatch):
    """The arrays that work was handed over for, and those that were waited for."""
    calls: dict[str, list] = {"handed": [], "waited": []}
    monkeypatch.setattr(mx, "async_eval", lambda *a: calls["handed"].extend(a))
    monkeypatch.setattr(mx, "eval", lambda *a: calls["waited"].extend(a))
    return calls


def test_little_is_left_to_mlx(handed_over):
    for _ in range(7):
        note_decoded(mx.ones(4), limit_bytes() // 8)
    assert handed_over == {"handed": [], "waited": []}


def test_the_host_waits_for_the_piece_before_the_last(handed_over):
    for _ in range(3):
        note_decoded(mx.ones(4), limit_bytes())
    first, second, _ = handed_over["handed"]
    assert handed_over["waited"] == [(first,), (second,)]


def test_a_mark_is_one_number_and_nothing_of_the_product():
    note_decoded(mx.full((3, 4), 2.0), limit_bytes())
    (mark,) = in_flight._state.marks
    assert mark.tolist() == [2.0]


def test_an_empty_product_is_not_waited_for(handed_over):
    note_decoded(mx.zeros((0, 4)), limit_bytes())
    assert handed_over["handed"] == []


@pytest.mark.parametrize("transform", [mx.compile, mx.vmap, mx.grad])
def test_transformations_trace_through_it(transform):
    def square(x):
        y = x * x
        note_decoded(y, limit_bytes())
        return y.sum()

    x = mx.array([3.0])
    expected = {mx.compile: [9.0], mx.vmap: [9.0], mx.grad: [6.0]}[transform]
    assert mx.flatten(transform(square)(x)).tolist() == expected

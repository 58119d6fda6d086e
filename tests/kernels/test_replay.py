"""Programs that are traced once, against the same calls made one by one."""

from __future__ import annotations

import copy

import mlx.core as mx
import pytest

from turboquant_mlx.kernels.dialect import stand_in
from turboquant_mlx.kernels.replay import Replay


class Product:
    """A weight, and how often the program that holds it was traced."""

    def __init__(self, factor: float):
        self.weight = mx.full((4,), factor)
        self.traced = 0

    def make(self):
        weight = self.weight

        def program(x):
            self.traced += 1
            return [x * weight, x + weight]

        return program


@pytest.fixture
def product():
    return Product(3.0)


def run(replay, product, x):
    return [y.tolist() for y in replay((product.weight,), product.make, x)]


def test_a_program_is_traced_once_and_its_values_follow_the_input(product):
    replay = Replay()
    assert run(replay, product, mx.ones(4)) == [[3.0] * 4, [4.0] * 4]
    assert run(replay, product, mx.full((4,), 2.0)) == [[6.0] * 4, [5.0] * 4]
    assert product.traced == 1


def test_each_shape_and_dtype_is_traced_once(product):
    replay = Replay()
    for x in (mx.ones(4), mx.ones((2, 4)), mx.ones((4,), mx.float16), mx.ones((2, 4))):
        y, _ = replay((product.weight,), product.make, x)
        assert y.shape == x.shape
    assert product.traced == 3


def test_a_weight_that_has_been_replaced_is_the_one_that_counts(product):
    replay = Replay()
    run(replay, product, mx.ones(4))
    product.weight = mx.full((4,), 5.0)
    assert run(replay, product, mx.ones(4))[0] == [5.0] * 4


def test_a_weight_that_is_not_computed_yet_is_computed_once(product):
    replay, source = Replay(), mx.ones(4)
    product.weight = source + 1
    run(replay, product, mx.ones(4))
    source += 10  # would show if the sum belonged to the trace
    assert run(replay, product, mx.ones(4))[0] == [2.0] * 4


def test_a_copy_traces_for_itself(product):
    replay = Replay()
    run(replay, product, mx.ones(4))
    other = Product(7.0)
    assert run(copy.deepcopy(replay), other, mx.ones(4))[0] == [7.0] * 4
    assert run(replay, product, mx.ones(4))[0] == [3.0] * 4


def test_nothing_is_traced_where_something_stands_in_for_kernels(product):
    replay = Replay()
    with stand_in(lambda kernel, dialect: pytest.fail("there is no kernel in this program")):
        for _ in range(2):
            run(replay, product, mx.ones(4))
    assert product.traced == 2

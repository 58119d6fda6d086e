"""The rotation of a few activations in one launch: the same as in plain MLX."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from kernel_cases import (
    activation,
    all_pairs,
    as_double,
    assert_close,
    dialects,
    each_of_all,
    name_of,
    running,
)
from turboquant_mlx.kernels import rotate
from turboquant_mlx.kernels.rotate import (
    rotate_few,
    rotate_many,
    rotated_input,
    suits_warps,
    why_no_rotation,
)
from turboquant_mlx.kernels.selection import ROTATE_FEW
from turboquant_mlx.layers.rotation_group import RotationGroup
from turboquant_mlx.quant.rotation import hadamard_matrix


def multipliers(width: int) -> mx.array:
    rng = np.random.default_rng(3)
    return mx.array((rng.choice([-1, 1], width) * rng.uniform(0.5, 2, width)).astype(np.float16))


def expected(x: mx.array, block: int, multiplier: mx.array) -> np.ndarray:
    blocks = (as_double(x) * as_double(multiplier)).reshape(-1, block)
    return (blocks @ hadamard_matrix(block).astype(np.float64).T).reshape(x.shape)


@pytest.mark.parametrize("dialect", dialects())
@pytest.mark.parametrize("block", [2, 4, 8, 12, 24, 32, 48, 64, 128, 192, 512, 768, 1024, 4096])
def test_every_length_of_block(dialect, block):
    x, multiplier = activation(3, 2 * block), multipliers(2 * block)
    with running(dialect):
        y = rotate_few(x, block, multiplier, dialect)
        mx.eval(y)
    assert_close(y, expected(x, block, multiplier), mx.float32)


AXES = {
    "block": [2, 8, 12, 32, 48, 64, 96, 192, 256, 384, 512, 768, 1024],
    "blocks": [1, 3],
    "rows": [1, 2, 5],
    "dtype": [mx.float16, mx.bfloat16, mx.float32],
}


def check(dialect, block, blocks, rows, dtype):
    width = block * blocks
    x, multiplier = activation(rows, width, dtype=dtype), multipliers(width)
    with running(dialect):
        for program in (rotate_few, rotate_many):
            if program is rotate_many and not suits_warps(block):
                continue
            y = program(x, block, multiplier, dialect)
            mx.eval(y)
            assert_close(y, expected(x, block, multiplier), dtype)


@pytest.mark.parametrize("dialect", dialects())
@pytest.mark.parametrize("case", list(all_pairs(**AXES)), ids=name_of)
def test_every_two_properties_of_a_rotation_together(dialect, case):
    check(dialect, **case)


@pytest.mark.heavy
@pytest.mark.parametrize("dialect", dialects())
def test_all_properties_of_a_rotation_together(dialect):
    for case in each_of_all(AXES, *AXES):
        check(dialect, **case)


def group_of(width: int, block: int) -> RotationGroup:
    group = RotationGroup(width, block)
    leader = nn.Module()
    leader.multiplier = multipliers(width)
    group.join(leader, leads=True)
    group.join(nn.Module(), leads=False)
    return group


@pytest.mark.parametrize("dialect", dialects())
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("shape", [(576,), (1, 1, 576), (2, 3, 576)])
def test_a_group_rotates_its_input_once(dialect, dtype, shape):
    x, group = activation(*shape, dtype=dtype), group_of(576, 192)
    with running(dialect):
        y = rotated_input(group, x)
        assert rotated_input(group, x) is y
        mx.eval(y)
    assert_close(y, expected(x, 192, group.multiplier), dtype)


@pytest.mark.parametrize("dialect", dialects())
@pytest.mark.parametrize("block, program", [(64, "rotate_many"), (12, "rotate_few")])
def test_many_rows(dialect, block, program, monkeypatch):
    """A warp rotates a block of them, where it can."""
    x, group = activation(3, ROTATE_FEW[dialect], 192, dtype=mx.float16), group_of(192, block)
    other = {"rotate_many": "rotate_few", "rotate_few": "rotate_many"}[program]
    monkeypatch.setattr(rotate, other, None)
    with running(dialect):
        y = rotated_input(group, x)
        mx.eval(y)
    assert_close(y, expected(x, block, group.multiplier), mx.float16)


@pytest.mark.parametrize(
    "rows, block, gradients", [(9, 64, False), (1, 1, False), (1, 64, True), (9, 64, True)]
)
def test_the_rest_is_left_to_mlx(rows, block, gradients, monkeypatch):
    x, group = activation(rows, 64), group_of(64, block)
    monkeypatch.setattr(rotate, "ROTATE_ROWS", {"metal": 8, "cuda": 8})
    with running(dialects()[0]):
        monkeypatch.setattr(rotate, "rotate_few", None)
        monkeypatch.setattr(rotate, "rotate_many", None)
        y = rotated_input(group, x, gradients=gradients)
    assert np.allclose(as_double(y), expected(x, block, group.multiplier), rtol=1e-4, atol=1e-4)


def test_lengths_that_the_kernel_does_not_take():
    assert why_no_rotation(1024) == why_no_rotation(192) == ""
    for block in (1, 20, 28, 36, 8192):
        assert why_no_rotation(block)
    assert [n for n in (16, 32, 192, 384, 1024, 1536, 2048) if suits_warps(n)] == [32, 384, 1024]

"""The block Hadamard transform and the random signs."""

from __future__ import annotations

import hashlib

import mlx.core as mx
import numpy as np
import pytest

from turboquant_mlx.errors import QuantizationError
from turboquant_mlx.quant.rotation import (
    block_size,
    hadamard_columns,
    hadamard_matrix,
    is_supported_block,
    random_signs,
    rotate,
    rotation_block,
    unrotate,
)

POWERS = [2**k for k in range(11)]
TWELVES = [12 * 2**k for k in range(8)]
TWENTIES = [20 * 2**k for k in range(7)]
TWENTY_EIGHTS = [28 * 2**k for k in range(6)]
BLOCKS = POWERS + TWELVES + TWENTIES + TWENTY_EIGHTS
LONG_BLOCKS = [5120, 8192, 14336, 16384, 12 * 4096, 20 * 16384]
UNSUPPORTED = [0, 3, 6, 10, 14, 36, 72, 100, 144, 288, 576, 1152, 2304, 4608, 9216]


def values(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# ----------------------------------------------------------------------------------- block sizes


@pytest.mark.parametrize("n", BLOCKS + LONG_BLOCKS)
def test_supported_blocks(n):
    assert is_supported_block(n)


@pytest.mark.parametrize("n", [*UNSUPPORTED, -4])
def test_unsupported_blocks_are_refused_everywhere(n):
    assert not is_supported_block(n)
    with pytest.raises(QuantizationError, match=f"{n} is not supported"):
        hadamard_matrix(n)
    if n > 0:
        with pytest.raises(QuantizationError, match=f"{n} is not supported"):
            rotate(mx.zeros((2, n)), n)
        with pytest.raises(QuantizationError, match=f"{n} is not supported"):
            unrotate(mx.zeros((2, n)), n)
        with pytest.raises(QuantizationError, match=f"{n} is not supported"):
            hadamard_columns(np.zeros((n, 2), np.float32), n)


def test_a_block_must_divide_the_width():
    with pytest.raises(QuantizationError, match="64 does not divide a width of 96"):
        rotate(mx.zeros((2, 96)), 64)


@pytest.mark.parametrize(
    ("width", "block"),
    [
        *[(576, 192), (1536, 768), (4096, 1024), (2304, 768), (9728, 512), (5120, 1024)],
        *[(14336, 1024), (896, 128), (4864, 256), (2880, 192), (20480, 1024)],
        *[(100, 4), (36, 12), (7, 1), (1, 1)],
    ],
)
def test_block_size_is_the_largest_permitted_divisor(width, block):
    assert block_size(width) == block
    divisors = [n for n in POWERS + TWELVES if width % n == 0 and n <= 1024]
    assert block == max(divisors)


def test_block_size_limit():
    assert block_size(4096, limit=4096) == 4096
    assert block_size(4096, limit=100) == 64
    assert block_size(1536, limit=1536) == 1536


@pytest.mark.parametrize(
    ("width", "group", "block"),
    [(576, 64, 64), (1536, 128, 128), (576, 32, 32), (96, 96, 96), (1536, 24, 24), (100, 50, 2)],
)
def test_a_blockwise_rotation_stays_inside_a_group(width, group, block):
    assert rotation_block(width, "blockwise_hadamard", group) == block
    assert group % block == 0


def test_rotations_by_name():
    assert rotation_block(576, "none", 64) == 1
    assert rotation_block(576, "hadamard", 64) == 192
    with pytest.raises(QuantizationError, match="'random'"):
        rotation_block(576, "random", 64)


# ------------------------------------------------------------------------------------ transforms


@pytest.mark.parametrize("n", BLOCKS)
def test_the_matrix_is_orthonormal_and_that_of_mlx(n):
    h = hadamard_matrix(n)
    np.testing.assert_allclose(h @ h.T, np.eye(n), atol=5e-6)
    np.testing.assert_allclose(np.abs(h), 1 / np.sqrt(n), rtol=1e-6)
    if n in (12, 20, 28) and mx.default_device().type != mx.DeviceType.cpu:
        return  # MLX 0.32.4 cannot compile its own transform of exactly these lengths for CUDA
    columns = np.array(mx.hadamard_transform(mx.eye(n)))  # row j is H e_j
    np.testing.assert_allclose(h, columns.T, atol=2e-7)


@pytest.mark.parametrize("n", BLOCKS)
def test_rotate_is_the_product_with_the_matrix(n):
    x = values(3, 2 * n)
    expected = x.reshape(3, 2, n) @ hadamard_matrix(n).T
    np.testing.assert_allclose(
        np.array(rotate(mx.array(x), n)).reshape(3, 2, n), expected, atol=5e-6
    )
    columns = hadamard_columns(np.ascontiguousarray(x.T), n).T
    np.testing.assert_allclose(columns.reshape(3, 2, n), expected, atol=5e-6)


@pytest.mark.parametrize("n", BLOCKS + LONG_BLOCKS)
def test_unrotate_is_the_exact_inverse(n):
    x = values(2, n)
    m = mx.array(random_signs(n, 1, "x") * np.linspace(0.5, 2, n)).astype(mx.float16)
    back = unrotate(rotate(mx.array(x), n, m), n, m)
    np.testing.assert_allclose(np.array(back), x, atol=5e-6)
    there = hadamard_columns(np.ascontiguousarray(x.T), n)
    back = hadamard_columns(there.copy(), n, transpose=True)
    np.testing.assert_allclose(back.T, x, atol=5e-6)


@pytest.mark.parametrize("n", [20, 28, 80, 224])
def test_the_transform_of_20_and_28_is_not_its_own_inverse(n):
    x = mx.array(values(2, n))
    twice = np.array(rotate(rotate(x, n), n))
    assert np.abs(twice - np.array(x)).max() > 0.5


@pytest.mark.parametrize("n", LONG_BLOCKS)
def test_long_blocks_keep_lengths_and_agree_with_mlx(n):
    x = mx.array(values(2, n))
    y = rotate(x, n)
    np.testing.assert_allclose(
        mx.linalg.norm(y, axis=-1).tolist(), mx.linalg.norm(x, axis=-1).tolist(), rtol=1e-5
    )
    np.testing.assert_allclose(np.array(y), np.array(mx.hadamard_transform(x)), atol=1e-5)


def test_products_do_not_change():
    """W x = (W diag(1/m) H^T) (H (m * x)): what the stored domain rests on."""
    w, x = values(5, 576), values(576, seed=1)
    m = random_signs(576, 7, "w") * np.linspace(0.5, 2, 576, dtype=np.float32)
    stored = np.array(rotate(mx.array(w), 192, 1 / m))
    activation = np.array(rotate(mx.array(x), 192, m))
    np.testing.assert_allclose(stored @ activation, w @ x, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
def test_rotations_keep_the_dtype_and_compute_in_float32(dtype):
    x = mx.array(values(4, 1024)).astype(dtype)
    y = rotate(x, 1024, random_signs(1024, 0, "a"))
    assert y.dtype == dtype
    exact = rotate(x.astype(mx.float32), 1024, random_signs(1024, 0, "a"))
    assert mx.array_equal(y, exact.astype(dtype))
    assert unrotate(y, 1024).dtype == dtype


def test_no_rotation_still_multiplies():
    x = mx.array(values(2, 10))
    m = mx.array(np.arange(1, 11, dtype=np.float32))
    assert mx.array_equal(rotate(x, 1, m), x * m)
    assert mx.array_equal(rotate(x, 1), x)
    assert mx.array_equal(unrotate(x, 1, m), x / m)


def test_empty_activations():
    assert rotate(mx.zeros((0, 64)), 64).shape == (0, 64)
    assert unrotate(mx.zeros((0, 3, 80)), 80).shape == (0, 3, 80)


# ----------------------------------------------------------------------------------------- signs


def signs_by_definition(width: int, seed: int, label: str) -> list[int]:
    mask = 2**64 - 1
    key = int.from_bytes(hashlib.sha256(f"{seed}:{label}".encode()).digest()[:8], "little")
    signs = []
    for i in range(width):
        z = (key + (i // 64 + 1) * 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        z ^= z >> 31
        signs.append(1 if z >> (i % 64) & 1 else -1)
    return signs


@pytest.mark.parametrize("width", [1, 63, 64, 65, 576])
@pytest.mark.parametrize(("seed", "label"), [(42, "weight"), (0, "model.layers.0.mlp.up_proj")])
def test_signs_are_what_the_definition_says(width, seed, label):
    signs = random_signs(width, seed, label)
    assert signs.dtype == np.int8
    assert signs.tolist() == signs_by_definition(width, seed, label)


def test_signs_by_value():
    """The generator may never change: files made with it must come out the same."""
    text = "".join("+" if s > 0 else "-" for s in random_signs(64, 42, "weight"))
    assert text == "++---+-+-+--+-++-+++++-+-+++-+-+-++-+-+----+-+-+--++-++-+++++++-"
    text = "".join("+" if s > 0 else "-" for s in random_signs(32, 7, "größer"))
    assert text == "-+-++++-+-+-+++-+++-+-+--++++++-"


def test_signs_differ_by_seed_and_label_and_are_balanced():
    a = random_signs(4096, 42, "a").astype(int)
    for b in (random_signs(4096, 43, "a"), random_signs(4096, 42, "b")):
        assert abs((a * b).sum()) < 4 * 64
    assert abs(a.sum()) < 4 * 64


def test_a_prefix_of_the_signs_is_the_signs_of_a_narrower_input():
    assert random_signs(100, 1, "x").tolist() == random_signs(300, 1, "x")[:100].tolist()

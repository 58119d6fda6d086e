"""Coding keys and values: exact inverse rotation, fixed bits, bounded workspace."""

from __future__ import annotations

import tracemalloc

import mlx.core as mx
import numpy as np
import pytest

from turboquant_mlx.errors import OptionError
from turboquant_mlx.kernels.dispatch import force_backend
from turboquant_mlx.kvcache.codec import SideCodec, decode_scale, rotation_block, rotation_matrix
from turboquant_mlx.kvcache.lookup import look_up
from turboquant_mlx.kvcache.spec import KVSpec
from turboquant_mlx.quant.codebook import lloyd_max
from turboquant_mlx.quant.packing import pack_codes

WIDTHS = (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512, 576)

# relative squared error of the minimum-mean-square quantizer of N(0, 1), with its one fixed scale
GAUSSIAN = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497, 5: 0.002499, 6: 6.4e-4, 8: 4.2e-5}


def codec(bits: int, width: int = 64, side: str = "key", **spec) -> SideCodec:
    return SideCodec.of(KVSpec(bits, bits, **spec), side, width)


def heads(*shape: int, seed: int = 0, dtype=mx.float32) -> mx.array:
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return mx.array(values).astype(dtype)


def relative_error(coder: SideCodec, x: mx.array, shift=None) -> float:
    back = coder.decode(coder.encode(x, shift), shift, mx.float32)
    x = x.astype(mx.float32)
    return (((back - x) ** 2).sum() / (x * x).sum()).item()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("side", ["key", "value"])
def test_the_rotation_has_an_exact_inverse_for_every_head_size(width, side):
    coder, x = codec(4, width, side), heads(2, 3, 5, width)
    assert mx.allclose(coder.unrotate(coder.rotate(x)), x, atol=1e-5)
    matrix = rotation_matrix(width, side)
    assert np.allclose(matrix @ matrix.T, np.eye(width), atol=1e-5)
    on_numpy = coder.rotate(np.array(x))
    assert np.allclose(on_numpy, np.array(coder.rotate(x)), atol=1e-5)
    assert np.allclose(coder.unrotate(on_numpy), np.array(x), atol=1e-5)


def test_the_rotation_mixes_as_much_of_a_head_as_it_can():
    blocks = {width: rotation_block(width) for width in WIDTHS}
    assert blocks == {width: width for width in WIDTHS} | {576: 192}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("bits", [3, 8])
def test_every_head_size_comes_back(width, bits):
    """8 bits lose next to nothing; the predecessor loses more than everything at 80 and 112."""
    error = relative_error(codec(bits, width), heads(1, 2, 40, width))
    assert error < GAUSSIAN[bits]


@pytest.mark.parametrize("bits", GAUSSIAN)
def test_a_searched_scale_beats_the_table_with_its_ideal_fixed_one(bits):
    error = relative_error(codec(bits), heads(1, 4, 100, 64))
    assert error < GAUSSIAN[bits] * (0.9 if 3 <= bits <= 5 else 1)


def test_the_norm_does_not_matter():
    x = heads(1, 2, 30, 64)
    plain = relative_error(codec(4), x)
    for factor in (1e-3, 37.0, 5000.0):
        assert relative_error(codec(4), x * factor) == pytest.approx(plain, rel=0.15)


def test_zeros_stay_zeros_and_huge_values_stay_finite():
    zeros = mx.zeros((1, 1, 3, 64))
    coder = codec(3)
    assert mx.array_equal(coder.decode(coder.encode(zeros), None, mx.float32), zeros)
    huge = coder.decode(coder.encode(heads(1, 1, 3, 64) * 1e30), None, mx.float32)
    assert mx.isfinite(huge).all()


def test_a_scale_byte_is_a_small_float():
    bytes_ = np.arange(256, dtype=np.uint8)
    values = decode_scale(bytes_)
    assert values[0] == 0
    assert values[128] == 1.0
    assert values[129] == 1.125
    assert values[255] == 61440
    assert np.all(np.diff(values) > 0)
    assert np.array_equal(np.array(decode_scale(mx.array(bytes_))), values)


@pytest.mark.parametrize("scheme", ["turboquant", "uniform"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("width", [64, 128])
def test_one_token_at_a_time_gives_the_bits_of_many_at_once(scheme, bits, width):
    coder = codec(bits, width, key_scheme=scheme, value_scheme=scheme)
    x = heads(2, 3, 41, width, dtype=mx.bfloat16)
    shift = heads(2, 3, 1, width, seed=1) if scheme == "turboquant" else None
    whole = coder.encode(x, shift)
    singly = [coder.encode(x[:, :, t : t + 1], shift) for t in range(41)]
    row = coder.encode(x[1:], None if shift is None else shift[1:])
    for i, part in enumerate(whole):
        assert mx.array_equal(part, mx.concatenate([s[i] for s in singly], axis=2))
        assert mx.array_equal(part[1:], row[i])


@pytest.mark.parametrize("width", [64, 80, 128])
def test_both_back_ends_give_the_same_bits(width):
    coder = codec(4, width)
    x, shift = heads(1, 2, 33, width, dtype=mx.float16), heads(1, 2, 1, width, seed=2)
    with force_backend("cpu"):
        on_numpy = coder.encode(x, shift)
    with force_backend("portable"):
        on_mlx = coder.encode(x, shift)
    same = [(a == b).mean().item() for a, b in zip(on_numpy, on_mlx, strict=True)]
    # H_20 adds its rows in another order there
    assert min(same) == 1 if width != 80 else min(same) > 0.9


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("width", [48, 64, 80])
def test_both_decoders_agree(bits, width):
    coder = codec(bits, width, group_size=16)
    parts = coder.encode(heads(2, 1, 7, width))
    fast = coder.decode_stored_numpy(tuple(np.array(p) for p in parts))
    assert np.array_equal(fast, np.array(coder.decode_stored(parts)))


def test_smaller_groups_have_more_scales_and_a_smaller_error():
    x = heads(1, 2, 50, 128)
    errors, sizes = [], []
    for group in (0, 64, 32, 16):
        coder = codec(4, 128, group_size=group)
        errors.append(relative_error(coder, x))
        sizes.append(sum(p.nbytes for p in coder.encode(x)))
    assert errors == sorted(errors, reverse=True)
    assert sizes == sorted(sizes) and len(set(sizes)) == 4


def test_taking_off_the_mean_halves_the_error_of_keys_that_share_one():
    mean = heads(1, 2, 1, 64, seed=3)
    x = heads(1, 2, 60, 64) + mean
    assert relative_error(codec(3), x, mean) < 0.6 * relative_error(codec(3), x)


def test_bytes_are_those_that_the_spec_announces():
    for spec in (KVSpec(3, 4), KVSpec(5, 2, group_size=32), KVSpec(4, 4, "uniform", "uniform")):
        for side in ("key", "value"):
            coder = SideCodec.of(spec, side, 128)
            x = heads(1, 1, 10, 128, dtype=mx.float16)
            stored = sum(p.nbytes for p in coder.encode(x))
            empty = sum(p.nbytes for p in coder.empty(1, 1, 10, mx.float16))
            assert stored == empty == 10 * spec.side_bytes(side, 128)


def test_coding_takes_less_workspace_than_twice_its_input():
    """4096 tokens, 8 heads of 128, 8 bits. The predecessor takes 1.27 GB."""
    x = heads(1, 8, 4096, 128, dtype=mx.float16)
    coder = codec(8, 128)
    mx.eval(coder.encode(x[:, :, :1]))
    with force_backend("cpu"):
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        tracemalloc.start()
        parts = coder.encode(x)
        mx.eval(parts)
        _, on_numpy = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        in_mlx = mx.get_peak_memory() - before
    stored = sum(p.nbytes for p in parts)
    # what it makes anyway, once in NumPy and once in MLX
    assert on_numpy + in_mlx - 2 * stored < 2 * x.nbytes


def test_a_group_that_does_not_divide_the_head_is_refused():
    with pytest.raises(OptionError, match="does not divide this model's head size 80"):
        codec(4, 80, group_size=32)


@pytest.mark.parametrize("bits", range(1, 9))
def test_look_ups_give_the_level_of_every_code(bits):
    """Several codes at once, also where they do not fill a row's last word."""
    for width in (16, 24, 48, 64, 80, 100, 576):
        index = np.random.default_rng(0).integers(0, 1 << bits, (2, 3, 7, width), dtype=np.uint8)
        found = look_up(pack_codes(index, bits), bits, width, "test")
        assert np.array_equal(found, lloyd_max(bits)[index])

"""The bit stream, against a reference that goes bit by bit."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from turboquant_mlx.errors import QuantizationError
from turboquant_mlx.quant.packing import pack_codes, pack_trits, unpack_codes, unpack_trits

LENGTHS = [1, 5, 8, 31, 32, 33, 64, 100, 160]
KINDS = [np.asarray, mx.array]


def codes(*shape: int, levels: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, levels, shape).astype(np.uint8)


def row_bits(row: np.ndarray, bits: int) -> list[int]:
    return [int(v) >> b & 1 for v in row for b in range(bits)]


def packed_by_bits(row: np.ndarray, bits: int) -> list[int]:
    stream = row_bits(row, bits)
    stream += [0] * (-len(stream) % 32)
    return [
        sum(b << i for i, b in enumerate(stream[j : j + 32])) for j in range(0, len(stream), 32)
    ]


def windows_by_bits(row: np.ndarray, bits: int, window: int, tile: int) -> list[int]:
    stream = row_bits(row, bits)
    length = (tile or len(row)) * bits
    found = []
    for i in range(len(row)):
        start, first = divmod(i * bits, length)
        own = stream[start * length : (start + 1) * length]
        found.append(sum(own[(first + j) % length] << j for j in range(window)))
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("n", LENGTHS)
def test_packing_is_the_dense_little_endian_stream(kind, bits, n):
    idx = codes(3, n, levels=2**bits)
    words = pack_codes(kind(idx), bits)
    assert isinstance(words, type(kind(idx)))
    assert words.shape == (3, -(-n * bits // 32))
    assert words.dtype in (np.uint32, mx.uint32)
    assert np.array(words).tolist() == [packed_by_bits(row, bits) for row in idx]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("n", LENGTHS)
def test_unpacking_gives_the_codes_back(kind, bits, n):
    idx = codes(2, 3, n, levels=2**bits)
    back = unpack_codes(pack_codes(kind(idx), bits), bits, n)
    assert back.dtype in (np.uint8, mx.uint8)
    np.testing.assert_array_equal(np.array(back), idx)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [np.int64, np.uint32, np.int32])
def test_any_integer_type_can_be_packed(kind, dtype):
    idx = codes(4, 40, levels=8)
    expected = pack_codes(idx, 3)
    np.testing.assert_array_equal(np.array(pack_codes(kind(idx.astype(dtype)), 3)), expected)


def test_signs_can_be_packed_from_booleans():
    x = np.random.default_rng(0).standard_normal((3, 50))
    expected = pack_codes((x >= 0).astype(np.uint8), 1)
    np.testing.assert_array_equal(pack_codes(x >= 0, 1), expected)
    np.testing.assert_array_equal(np.array(pack_codes(mx.array(x) >= 0, 1)), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("bits", "window"),
    [
        *[(1, 2), (1, 8), (1, 16), (2, 3), (2, 8), (2, 9), (2, 16), (3, 8), (3, 10), (3, 16)],
        *[(4, 8), (4, 12), (4, 16), (5, 9), (6, 16), (7, 8), (7, 16), (8, 16)],
    ],
)
@pytest.mark.parametrize(("n", "tile"), [(1, 0), (5, 0), (33, 0), (64, 0), (64, 32), (256, 64)])
def test_windows_wrap_inside_their_tile(kind, bits, window, n, tile):
    idx = codes(2, n, levels=2**bits)
    found = unpack_codes(kind(pack_codes(idx, bits)), bits, n, window, tile)
    assert found.dtype in ((np.uint8, mx.uint8) if window <= 8 else (np.uint16, mx.uint16))
    expected = [windows_by_bits(row, bits, window, tile) for row in idx]
    assert np.array(found).tolist() == expected


def test_small_tiles_need_not_be_multiples_of_eight():
    idx = codes(2, 12, levels=256)
    found = unpack_codes(pack_codes(idx, 8), 8, 12, 12, tile=4)
    assert found.tolist() == [windows_by_bits(row, 8, 12, 4) for row in idx]


def test_bits_behind_the_row_do_not_leak_into_windows():
    words = pack_codes(codes(2, 9, levels=8), 3)
    dirty = words | np.uint32(0xFFFFFFFF << 27 & 0xFFFFFFFF)
    np.testing.assert_array_equal(unpack_codes(dirty, 3, 9, 8), unpack_codes(words, 3, 9, 8))
    np.testing.assert_array_equal(unpack_codes(dirty, 3, 9), unpack_codes(words, 3, 9))


def test_a_window_as_wide_as_the_code_is_the_code():
    idx = codes(3, 64, levels=8)
    np.testing.assert_array_equal(unpack_codes(pack_codes(idx, 3), 3, 64, 3, tile=32), idx)


def test_sizes_that_do_not_fit_are_refused():
    words = pack_codes(codes(1, 64, levels=8), 3)
    with pytest.raises(QuantizationError, match="take 3 words, not 6"):
        unpack_codes(words, 3, 32)
    with pytest.raises(QuantizationError, match="tiles of 48"):
        unpack_codes(words, 3, 64, 8, tile=48)
    with pytest.raises(QuantizationError, match="trits"):
        unpack_trits(words, 10)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 19, 20, 21, 40, 64, 100])
def test_trits_are_twenty_base_three_digits_to_a_word(kind, n):
    trits = codes(2, 3, n, levels=3)
    words = pack_trits(kind(trits))
    assert words.shape == (2, 3, -(-n // 20))
    assert words.dtype in (np.uint32, mx.uint32)
    first = trits[0, 0, :20]
    assert int(np.array(words)[0, 0, 0]) == sum(int(t) * 3**j for j, t in enumerate(first))
    back = unpack_trits(words, n)
    assert back.dtype in (np.uint8, mx.uint8)
    np.testing.assert_array_equal(np.array(back), trits)


def test_the_largest_trit_word():
    assert pack_trits(np.full((1, 20), 2, np.uint8)).tolist() == [[3**20 - 1]]
    assert unpack_trits(np.array([[3**20 - 1]], np.uint32), 20).tolist() == [[2] * 20]

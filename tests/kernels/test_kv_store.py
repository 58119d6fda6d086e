"""Coding and decoding of keys and values in kernels.

The rule for codes: on the CPU, where no product is fused into a sum, the bits are those of the
reference. On a GPU its compiler may fuse, or the last place of a rotation may differ: then at most
one code in a thousand, and one scale in a hundred, is a neighbour of the reference's.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from kernel_cases import ON_GPU, all_pairs, as_double, dialects, running
from kv_cases import WIDTHS, decoded, filled, random
from turboquant_mlx.kernels.dispatch import force_backend
from turboquant_mlx.kvcache.codec import SideCodec, encode_sides
from turboquant_mlx.kvcache.spec import KVSpec
from turboquant_mlx.quant.packing import unpack_codes

AXES = {
    "width": [32, 48, 80, 128, 160, 576],
    "bits": [(3, 4), (4, 4), (1, 8), (5, 6), (7, 2)],
    "group": [0, 16],
    "dtype": [mx.float16, mx.bfloat16, mx.float32],
    "tokens": [1, 7],
    "shift": [False, True],
}


def assert_same_bits(got, want, codec: SideCodec) -> None:
    """``got`` and ``want`` are (codes, scales)."""
    assert [x.shape for x in got] == [x.shape for x in want]
    assert [x.dtype for x in got] == [mx.uint32, mx.uint8]
    if not ON_GPU:
        assert all(mx.array_equal(a, b) for a, b in zip(got, want, strict=True))
        return
    scales = np.abs(np.array(got[1]).astype(int) - np.array(want[1]).astype(int))
    assert scales.max() <= 1
    assert (scales > 0).mean() <= 0.01
    same = np.array(mx.repeat(got[1] == want[1], codec.group, axis=-1))
    codes = [np.array(unpack_codes(x[0], codec.bits, codec.width)).astype(int) for x in (got, want)]
    apart = np.abs(codes[0] - codes[1])[same]
    assert apart.max(initial=0) <= 1
    assert (apart > 0).mean() <= 0.001


def check(dialect, width, bits, group, dtype, tokens, shift, value_width=0) -> None:
    spec = KVSpec(*bits, group_size=group)
    key = SideCodec.of(spec, "key", width)
    value = SideCodec.of(spec, "value", value_width or width)
    x = random(2, 3, tokens, key.width, seed=1, dtype=dtype) * 3
    y = random(2, 3, tokens, value.width, seed=2, dtype=dtype)
    mean = random(2, 3, 1, key.width, seed=3, dtype=dtype) if shift else None
    sides = [(key, x, mean), (value, y, None)]
    with force_backend("cpu"):
        want = encode_sides(sides)
    with running(dialect):
        got = encode_sides(sides)
        mx.eval(got)
    for i, codec in enumerate((key, value)):
        assert_same_bits(got[i], want[i], codec)


@pytest.mark.parametrize("dialect", dialects())
@pytest.mark.parametrize(
    "case", list(all_pairs(**AXES)), ids=lambda c: "-".join(map(str, c.values()))
)
def test_codes_are_those_of_the_reference(dialect, case):
    check(dialect, **case)


@pytest.mark.heavy
@pytest.mark.parametrize("dialect", dialects())
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("bits", range(1, 9))
def test_codes_of_every_width(dialect, width, bits):
    for dtype in AXES["dtype"]:
        for group in (0, 16):
            check(dialect, width, (bits, 9 - bits), group, dtype, 5, True)


@pytest.mark.parametrize("dialect", dialects())
def test_keys_and_values_of_different_widths(dialect):
    check(dialect, 192, (3, 4), 0, mx.float16, 3, True, value_width=128)


@pytest.mark.parametrize("dialect", dialects())
def test_zeros_and_huge_values(dialect):
    spec = KVSpec(3, 4)
    codecs = [SideCodec.of(spec, side, 64) for side in ("key", "value")]
    x = np.array(random(1, 2, 6, 64))
    x[0, 0, 0] = 0
    x[0, 0, 1] *= 1e30
    x[0, 0, 2] *= 1e-8
    x[0, 1, 3, 5:] = 0
    sides = [(codec, mx.array(x), None) for codec in codecs]
    with force_backend("cpu"):
        want = encode_sides(sides)
    with running(dialect):
        got = encode_sides(sides)
        mx.eval(got)
    assert got[0][1][0, 0, 0, 0].item() == 0
    for i, codec in enumerate(codecs):
        assert_same_bits(got[i], want[i], codec)


@pytest.mark.parametrize("dialect", dialects())
def test_one_token_at_a_time_gives_the_bits_of_many_at_once(dialect):
    spec = KVSpec(3, 4)
    codecs = [SideCodec.of(spec, side, 64) for side in ("key", "value")]
    x, y = random(2, 2, 9, 64, dtype=mx.float16), random(2, 2, 9, 64, seed=1, dtype=mx.float16)
    shift = random(2, 2, 1, 64, seed=2, dtype=mx.float16)

    def coded(part):
        return encode_sides([(codecs[0], x[:, :, part], shift), (codecs[1], y[:, :, part], None)])

    with running(dialect):
        whole = coded(slice(None))
        singly = [coded(slice(t, t + 1)) for t in range(9)]
        mx.eval(whole, singly)
    for side in (0, 1):
        for i, part in enumerate(whole[side]):
            assert mx.array_equal(part, mx.concatenate([s[side][i] for s in singly], axis=2))


@pytest.mark.parametrize("dialect", dialects())
@pytest.mark.parametrize(
    "spec, widths",
    [
        (KVSpec(3, 4), (128, 128)),
        (KVSpec(8, 5, min_tokens=4, group_size=16), (80, 96)),
        (KVSpec(4, 6, "uniform", "turboquant"), (64, 576)),
        (KVSpec(2, 3, min_tokens=0), (112, 224)),
    ],
    ids=str,
)
def test_the_decoded_store_is_that_of_the_reference(dialect, spec, widths):
    padding = (0, 7, 60)  # the last row is not packed yet
    store = filled(spec, padding, width=widths[0], value_width=widths[1], dtype=mx.float32)
    want = decoded(store)
    with running(dialect):
        whole, part = store.decoded(store.columns), store.decoded(50)
        mx.eval(whole, part)
    for side in (0, 1):
        for r, first in enumerate(padding):
            held = want[side][r, :, first:]
            assert np.abs(as_double(whole[side])[r, :, first:] - held).max() < 1e-5
            if first < 50:
                few = as_double(part[side])[r, :, first:]
                assert np.abs(few - held[:, : 50 - first]).max() < 1e-5


@pytest.mark.parametrize("dialect", dialects())
@pytest.mark.parametrize("batch", [False, True])
def test_a_cache_on_a_gpu_is_that_on_a_cpu(dialect, batch):
    """A prompt, a few tokens one by one, and their attention, through the hook."""
    pytest.importorskip("transformers")  # mlx-lm imports it
    pytest.importorskip("threadpoolctl")
    from turboquant_mlx.kvcache.cache import BatchTurboQuantKVCache, TurboQuantKVCache

    spec = KVSpec(3, 4)

    def run():
        cache = BatchTurboQuantKVCache([0, 9], spec=spec) if batch else TurboQuantKVCache(spec=spec)
        rows = 2 if batch else 1
        outputs = []
        for step, n in enumerate([40, 1, 3, 1]):
            k, v, q = (random(rows, h, n, 64, seed=9 * step + h) for h in (2, 2, 8))
            mask = cache.make_mask(n, return_array=False, window_size=None)
            keys, values = cache.update_and_fetch(k, v[..., ::-1])
            outputs.append(
                mx.fast.scaled_dot_product_attention(q, keys, values, scale=0.1, mask=mask)
            )
            mx.eval(outputs[-1])
        return mx.concatenate(outputs, axis=2), cache.store

    with force_backend("cpu"):
        want, on_cpu = run()
    with running(dialect):
        got, store = run()
    assert store.columns == on_cpu.columns
    for i, codec in enumerate((store.key_codec, store.value_codec)):
        parts = [
            tuple(p[:, :, : store.columns] for p in (s.keys, s.values)[i]) for s in (store, on_cpu)
        ]
        assert_same_bits(*parts, codec)
    first = 9 if batch else 0  # queries of padding see nothing
    distance = np.abs(as_double(got) - as_double(want))[:, :, first:].max()
    assert distance < (1e-4 if not ON_GPU else 5e-3)

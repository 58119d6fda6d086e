"""The packed caches by mlx-lm's contract: every way of getting to a state gives the same state."""

from __future__ import annotations

import copy
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models.cache import BatchKVCache, KVCache

from turboquant_mlx.errors import CheckpointError, OptionError
from turboquant_mlx.kvcache.cache import BatchTurboQuantKVCache, TurboQuantKVCache
from turboquant_mlx.kvcache.spec import KVSpec

HEADS, WIDTH = 2, 64
WARM = KVSpec(3, 4).warm_tokens
SPECS = [
    KVSpec(3, 4),
    KVSpec(4, 4, min_tokens=0),
    KVSpec(2, 8, group_size=16, min_tokens=5),
    KVSpec(4, 3, start=50),
    KVSpec(4, 4, "uniform", "uniform", group_size=32, min_tokens=0),
    KVSpec(4, 4, "uniform", "turboquant", group_size=32),
]


def tokens(n: int, row: int = 0, dtype=mx.bfloat16) -> tuple[mx.array, mx.array]:
    """Keys and values [1, HEADS, n, WIDTH] of a sequence; the first ones of a longer one."""
    rng = np.random.default_rng(row)
    mean = rng.standard_normal((1, HEADS, 1, WIDTH)) * 2
    both = rng.standard_normal((2, 200, 1, HEADS, WIDTH)).transpose(0, 2, 3, 1, 4)
    keys, values = both[0] + mean, both[1]
    return tuple(mx.array(a.astype(np.float32))[:, :, :n].astype(dtype) for a in (keys, values))


def part(pair, start: int, stop: int):
    return tuple(a[:, :, start:stop] for a in pair)


def single(spec: KVSpec, n: int, row: int = 0, steps: tuple[int, ...] = ()) -> TurboQuantKVCache:
    """A cache of the first n tokens, fed in the given steps and then one at a time."""
    cache, pair, at = TurboQuantKVCache(spec=spec), tokens(n, row), 0
    for step in steps or (n,):
        step = min(step, n - at)
        if step:
            cache.update_and_fetch(*part(pair, at, at + step))
        at += step
    while at < n:
        cache.update_and_fetch(*part(pair, at, at + 1))
        at += 1
    return cache


def contents(cache) -> list[np.ndarray]:
    """All keys and values that a cache holds, decoded; of a batch, row after row."""
    store = cache.store
    out = []
    for side in store.decoded(store.columns):
        rows = np.array(side.astype(mx.float32))
        for r, padding in enumerate(store.padding):
            out.append(rows[r, :, padding:])
    order = [i // 2 + (i % 2) * store.batch for i in range(2 * store.batch)]
    return [out[i] for i in order]


def same(a, b) -> bool:
    left, right = contents(a), contents(b)
    return len(left) == len(right) and all(
        x.shape == y.shape and np.array_equal(x, y) for x, y in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.describe()} {s.min_tokens} {s.start}")
@pytest.mark.parametrize("n", [1, WARM - 1, WARM, WARM + 1, 100])
def test_any_steps_give_the_same_bits(spec, n):
    whole = single(spec, n)
    for steps in ((1,), (7, 30, 9), (WARM - 1,), (WARM,), (WARM + 1,), (49, 2)):
        assert same(single(spec, n, steps=steps), whole)


@pytest.mark.parametrize("n", [15, 16, 17, 48, 49, 63, 64, 65, 127, 128, 129])
def test_capacity_boundaries_lose_nothing(n):
    cache = single(KVSpec(8, 8), n, steps=(n - 1,))
    expected = tokens(n)
    for held, true in zip(contents(cache), expected, strict=True):
        true = np.array(true.astype(mx.float32))[0]
        assert np.abs(held - true).max() < 0.15


def test_bytes_shrink_in_fact():
    """Real bytes, spare capacity included, and what is spare is told apart."""
    cache = single(KVSpec(3, 4), 200)
    held = sum(a.nbytes for a in cache.store.arrays())
    assert cache.nbytes == held
    per_token = HEADS * KVSpec(3, 4).token_bytes(WIDTH)
    fixed = HEADS * WIDTH * 2 * (1 + 2)  # the mean key, and the first token's key and value
    assert cache.nbytes - cache.spare_nbytes == 200 * per_token + fixed
    assert cache.plain_nbytes == 200 * HEADS * 2 * WIDTH * 2
    assert cache.spare_nbytes <= max(16 * per_token, cache.nbytes / 16)


@pytest.mark.parametrize("tokens", [1000, 4096])
def test_at_3_5_bits_and_heads_of_128_a_token_takes_less_than_a_4_2th_of_16_bits(tokens):
    """What is spare stays within a sixteenth of that, also right after the store has grown."""
    cache = TurboQuantKVCache(3.5)
    values = mx.random.normal((1, 1, tokens + 90, 128)).astype(mx.bfloat16)
    cache.update_and_fetch(values[:, :, :tokens], values[:, :, :tokens])
    for at in range(tokens, tokens + 90):
        held = cache.nbytes - cache.spare_nbytes
        assert held <= at * 2 * 128 * 2 / 4.2
        assert cache.plain_nbytes == at * 2 * 128 * 2
        assert cache.spare_nbytes <= held / 16
        cache.update_and_fetch(*[values[:, :, at : at + 1]] * 2)


def test_before_the_mean_key_is_known_everything_is_exact():
    cache = single(KVSpec(2, 2), WARM - 1)
    for held, true in zip(contents(cache), tokens(WARM - 1), strict=True):
        assert np.array_equal(held, np.array(true.astype(mx.float32))[0])


def test_first_tokens_stay_exact_for_good():
    cache = single(KVSpec(2, 2, min_tokens=5), 120)
    for held, true in zip(contents(cache), tokens(5), strict=True):
        assert np.array_equal(held[:, :5], np.array(true.astype(mx.float32))[0])


def test_a_sequence_is_packed_when_it_reaches_the_start_even_while_decoding():
    spec = KVSpec(4, 4, start=60)
    cache, pair = single(spec, 59), tokens(60)
    assert not any(cache.store.frozen)
    assert cache.nbytes - cache.spare_nbytes >= cache.plain_nbytes
    cache.update_and_fetch(*part(pair, 59, 60))
    assert all(cache.store.frozen)
    assert cache.nbytes - cache.spare_nbytes < cache.plain_nbytes / 2.5


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.describe()} {s.min_tokens} {s.start}")
@pytest.mark.parametrize("cut", [1, 8, 60])
def test_trimmed_and_appended_again_equals_never_appended(spec, cut):
    cache, pair = single(spec, 140), tokens(140)
    assert cache.trim(cut) == cut
    assert same(cache, single(spec, 140 - cut))
    cache.update_and_fetch(*part(pair, 140 - cut, 140))
    assert same(cache, single(spec, 140))


def test_more_than_there_is_cannot_be_trimmed():
    cache = single(KVSpec(4, 4), 40)
    assert cache.is_trimmable()
    assert cache.trim(99) == 40
    assert cache.offset == cache.size() == 0


def test_a_prompt_sees_itself_exactly_and_a_short_step_sees_what_is_stored():
    cache, pair = single(KVSpec(2, 2), 60), tokens(100)
    keys, _ = cache.update_and_fetch(*part(pair, 60, 80))
    assert mx.array_equal(keys[:, :, 60:], pair[0][:, :, 60:80])
    assert np.array_equal(np.array(keys[0, :, :60].astype(mx.float32)), contents(cache)[0][:, :60])
    keys, _ = cache.update_and_fetch(*part(pair, 80, 82))
    assert np.array_equal(np.array(keys[0].astype(mx.float32)), contents(cache)[0])


@pytest.mark.parametrize("n", [10, 70])
def test_a_copy_goes_its_own_way(n):
    cache, pair = single(KVSpec(3, 4), n), tokens(n + 20)
    twin = copy.deepcopy(cache)
    cache.update_and_fetch(*part(pair, n, n + 20))
    assert same(twin, single(KVSpec(3, 4), n))
    assert same(cache, single(KVSpec(3, 4), n + 20))


# -- batches ------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.describe()} {s.min_tokens} {s.start}")
def test_rows_of_a_batch_equal_themselves_alone(spec):
    """Merged at different lengths, then decoded together; some reach the mean key on the way."""
    lengths = [100, 3, WARM - 2, 48]
    batch = TurboQuantKVCache.merge([single(spec, n, r) for r, n in enumerate(lengths)])
    assert batch.offset.tolist() == lengths
    for step in range(6):
        news = [part(tokens(n + 6, r), n + step, n + step + 1) for r, n in enumerate(lengths)]
        batch.update_and_fetch(*(mx.concatenate(list(side)) for side in zip(*news, strict=True)))
    for r, n in enumerate(lengths):
        assert same(batch.extract(r), single(spec, n + 6, r))


@pytest.mark.parametrize("lengths", [[50, 20, 9], [WARM, WARM - 1, 1], [90, 90, 90]])
@pytest.mark.parametrize("before", [0, 30])
def test_right_padded_prompts(lengths, before):
    """As BatchGenerator feeds them: padded on the right, in pieces, then rolled."""
    spec, most = KVSpec(3, 4), max(lengths)
    batch = TurboQuantKVCache.merge([single(spec, before, r) for r in range(3)])
    padding = [most - n for n in lengths]
    if max(padding):
        batch.prepare(lengths=lengths, right_padding=padding)
    sides = [[], []]
    for r, n in enumerate(lengths):
        pair = part(tokens(before + n, r), before, before + n)
        for side, x in zip(sides, pair, strict=True):
            side.append(mx.pad(x, [(0, 0), (0, 0), (0, most - n), (0, 0)], constant_values=9))
    keys, values = (mx.concatenate(side) for side in sides)
    for start in range(0, most, 24):
        batch.update_and_fetch(keys[:, :, start : start + 24], values[:, :, start : start + 24])
    batch.finalize()
    assert batch.offset.tolist() == [before + n for n in lengths]
    for r, n in enumerate(lengths):
        assert same(batch.extract(r), single(spec, before + n, r))


def test_left_padded_prompts():
    spec, lengths = KVSpec(3, 4), [60, 40, 5]
    batch = BatchTurboQuantKVCache([0, 20, 55], spec=spec)
    sides = [[], []]
    for r, n in enumerate(lengths):
        for side, x in zip(sides, tokens(n, r), strict=True):
            side.append(mx.pad(x, [(0, 0), (0, 0), (60 - n, 0), (0, 0)], constant_values=9))
    keys, values = (mx.concatenate(side) for side in sides)
    for start in range(0, 60, 25):
        batch.update_and_fetch(keys[:, :, start : start + 25], values[:, :, start : start + 25])
    for r, n in enumerate(lengths):
        assert same(batch.extract(r), single(spec, n, r))


def test_rows_leave_and_others_join():
    spec = KVSpec(4, 3)
    first = TurboQuantKVCache.merge([single(spec, n, r) for r, n in enumerate([90, 20, 50])])
    first.filter([2, 1])
    assert same(first.extract(0), single(spec, 50, 2))
    assert first.size() == 50
    first.extend(TurboQuantKVCache.merge([single(spec, 120, 3), single(spec, 1, 4)]))
    for r, (row, n) in enumerate([(2, 50), (1, 20), (3, 120), (4, 1)]):
        assert same(first.extract(r), single(spec, n, row))
    first.filter(mx.array([1]))
    assert same(first.extract(0), single(spec, 20, 1))
    assert first.nbytes <= 2 * single(spec, 20, 1).nbytes


def test_empty_batches_join_and_split():
    spec = KVSpec(4, 4)
    batch = TurboQuantKVCache.merge([TurboQuantKVCache(spec=spec) for _ in range(2)])
    assert batch.empty() and batch.offset.tolist() == [0, 0]
    batch.extend(TurboQuantKVCache.merge([TurboQuantKVCache(spec=spec)]))
    assert batch.batch_size == 3
    batch.extend(TurboQuantKVCache.merge([single(spec, 40)]))
    assert batch.extract(0).empty() or batch.extract(0).size() == 0
    assert same(batch.extract(3), single(spec, 40))


def test_plain_caches_join_a_packed_batch():
    spec, plain = KVSpec(4, 4), KVCache()
    plain.update_and_fetch(*tokens(70, 1))
    batch = TurboQuantKVCache.merge([single(spec, 40), plain])
    assert same(batch.extract(1), single(spec, 70, 1))
    other = BatchKVCache.merge([plain, KVCache()])
    batch.extend(other)
    assert same(batch.extract(2), single(spec, 70, 1))


def test_what_does_not_fit_together_is_refused():
    packed = single(KVSpec(4, 4), 40)
    with pytest.raises(OptionError, match="packed in another way"):
        TurboQuantKVCache.merge([packed, single(KVSpec(3, 4), 40)])
    with pytest.raises(OptionError, match="RotatingKVCache cannot be packed"):
        TurboQuantKVCache.from_cache(mlx_lm_cache.RotatingKVCache(8), 4)
    with pytest.raises(OptionError, match="not both"):
        TurboQuantKVCache(4, spec=KVSpec(4, 4))
    with pytest.raises(OptionError, match="needs bits"):
        TurboQuantKVCache(key_bits=4)
    with pytest.raises(TypeError, match="needs bits"):
        TurboQuantKVCache()


def test_to_batch_serves_mlx_vlm():
    assert TurboQuantKVCache(4).to_batch([0, 3]).offset.tolist() == [0, -3]
    batch = single(KVSpec(4, 4), 40).to_batch([0, 0])
    assert same(batch.extract(1), single(KVSpec(4, 4), 40))
    with pytest.raises(ValueError, match="cannot be padded"):
        single(KVSpec(4, 4), 40).to_batch([0, 1])


# -- saving -------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.describe()} {s.min_tokens} {s.start}")
@pytest.mark.parametrize("n", [0, 10, 100])
def test_saved_and_loaded_again_it_goes_on_as_before(spec, n, tmp_path):
    file = str(tmp_path / "cache.safetensors")
    mlx_lm_cache.save_prompt_cache(file, [single(spec, n)], {"model": "x"})
    (loaded,), facts = mlx_lm_cache.load_prompt_cache(file, return_metadata=True)
    assert type(loaded) is TurboQuantKVCache
    assert (loaded.spec, loaded.offset, facts["model"]) == (spec, n, "x")
    loaded.update_and_fetch(*part(tokens(n + 30), n, n + 30))
    assert same(loaded, single(spec, n + 30))


def test_a_batch_is_saved_too(tmp_path):
    file = str(tmp_path / "cache.safetensors")
    batch = TurboQuantKVCache.merge([single(KVSpec(3, 4), n, n) for n in (20, 90)])
    mlx_lm_cache.save_prompt_cache(file, [batch])
    (loaded,) = mlx_lm_cache.load_prompt_cache(file)
    assert same(loaded, batch)


def test_another_process_reads_it(tmp_path):
    file = str(tmp_path / "cache.safetensors")
    cache = single(KVSpec(3, 4), 80)
    mlx_lm_cache.save_prompt_cache(file, [cache])
    program = (
        "import turboquant_mlx.kvcache.cache, mlx.core as mx, sys\n"
        "from mlx_lm.models.cache import load_prompt_cache\n"
        "(c,) = load_prompt_cache(sys.argv[1])\n"
        "keys, values = c.keys_and_values()\n"
        "print(c.offset, (keys.astype(mx.float32) * values).sum().item())\n"
    )
    done = subprocess.run([sys.executable, "-c", program, file], capture_output=True, text=True)
    keys, values = cache.keys_and_values()
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["80", str((keys.astype(mx.float32) * values).sum().item())]


def test_a_state_that_is_none_is_named():
    with pytest.raises(CheckpointError, match="no state of a packed cache"):
        TurboQuantKVCache.from_state((1, 2))
    (_, *facts), *rest = single(KVSpec(3, 4), 4).state
    with pytest.raises(CheckpointError, match="state version 99"):
        TurboQuantKVCache.from_state(((99, *facts), *rest))


def first_changed(arrays, change):
    return [change(arrays[0]), *arrays[1:]]


DAMAGES = {
    "one token less of packed keys": lambda f, r, p, k, v: (f, r, p, [x[:, :, :40] for x in k], v),
    "keys of another width": lambda f, r, p, k, v: (
        f,
        r,
        p,
        first_changed(k, lambda x: x[..., 1:]),
        v,
    ),
    "values of one head": lambda f, r, p, k, v: (f, r, p, k, [x[:, :1] for x in v]),
    "scales in 16 bits": lambda f, r, p, k, v: (f, r, p, [k[0], k[1].astype(mx.float16)], v),
    "scales missing": lambda f, r, p, k, v: (f, r, p, k[:1], v),
    "values that have room for other tokens": lambda f, r, p, k, v: (
        f,
        r,
        p,
        k,
        [x[:, :, :-1] for x in v],
    ),
    "tokens in 16 bits missing": lambda f, r, p, k, v: (
        f,
        r,
        (p[0], *(x[:, :, :0] for x in p[1:])),
        k,
        v,
    ),
    "tokens in 16 bits of another dtype": lambda f, r, p, k, v: (
        f,
        r,
        (p[0], p[1].astype(mx.float32), p[2]),
        k,
        v,
    ),
    "mean key missing": lambda f, r, p, k, v: (f, r, (None, *p[1:]), k, v),
    "mean key of one head": lambda f, r, p, k, v: (f, r, (p[0][:, :1], *p[1:]), k, v),
    "another row": lambda f, r, p, k, v: (f, [*r, *r], p, k, v),
    "more tokens": lambda f, r, p, k, v: ((*f[:3], f[3] + 1000, *f[4:]), r, p, k, v),
    "padding beyond all tokens": lambda f, r, p, k, v: (f, [(f[3] + 1, True)], p, k, v),
    "another width": lambda f, r, p, k, v: ((*f[:4], 2 * f[4], f[5]), r, p, k, v),
    "another dtype": lambda f, r, p, k, v: ((*f[:2], "int32", *f[3:]), r, p, k, v),
    "bits that there are not": lambda f, r, p, k, v: (
        (f[0], f[1].replace("key_bits=3", "key_bits=30"), *f[2:]),
        r,
        p,
        k,
        v,
    ),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_state_whose_parts_do_not_fit_is_refused(damage):
    """Kernels trust a store's shapes."""
    state = single(KVSpec(3, 4), 60).state
    TurboQuantKVCache.from_state(state)
    with pytest.raises(CheckpointError, match="no state of a packed cache"):
        TurboQuantKVCache.from_state(damage(*state))


@pytest.mark.skipif(
    mx.default_device().type != mx.DeviceType.cpu, reason="measures the CPU's path in CPU memory"
)
def test_a_prompt_in_pieces_needs_less_memory_than_with_plain_caches():
    """The peak, with 12 layers: decoded keys and values of one layer at a time, and the cache.

    In a process of its own, for what other tests have left behind would count; the least of five
    runs, for MLX's thread may free an array a little later than the next one is made.
    """
    done = subprocess.run(
        [sys.executable, "-c", PEAKS], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    packed, plain = map(int, done.stdout.split())
    assert packed < 0.6 * plain


PEAKS = f"""
import mlx.core as mx
from mlx_lm.models.cache import KVCache
from turboquant_mlx.kernels.dispatch import force_backend
from turboquant_mlx.kvcache.cache import TurboQuantKVCache

def peak(make):
    mx.random.seed(0)
    caches = [make() for _ in range(12)]
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for _ in range(4):
        for cache in caches:
            keys, values = (
                mx.random.normal((1, {HEADS}, 256, {WIDTH})).astype(mx.float16) for _ in range(2)
            )
            held = cache.update_and_fetch(keys, values)
            q = keys[:, :, -16:]
            mx.eval(mx.fast.scaled_dot_product_attention(q, *held, scale=0.1))
            del held
        mx.eval([cache.state for cache in caches])
    return mx.get_peak_memory() - before

with force_backend("cpu"):
    for make in (lambda: TurboQuantKVCache(3.5), KVCache):
        print(min(peak(make) for _ in range(5)))
"""


def test_what_a_prompt_decodes_counts_as_under_way(monkeypatch):
    """So that not all layers' decoded keys are in memory at once."""
    noted = []
    monkeypatch.setattr(
        "turboquant_mlx.kvcache.packed.note_decoded", lambda keys, n_bytes: noted.append(n_bytes)
    )
    cache, pair = TurboQuantKVCache(spec=KVSpec(3, 4)), tokens(160)
    cache.update_and_fetch(*part(pair, 0, 80))
    assert noted == [], "nothing was decoded yet"
    cache.update_and_fetch(*part(pair, 80, 159))
    assert noted == [2 * HEADS * 80 * WIDTH * 2]
    cache.update_and_fetch(*part(pair, 159, 160))
    assert len(noted) == 1, "a single token reads packed keys"

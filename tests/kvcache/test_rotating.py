"""Packed sliding windows answer as mlx-lm's rotating caches do, whatever way leads to a state."""

from __future__ import annotations

import copy
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models.cache import BatchRotatingKVCache, RotatingKVCache, make_prompt_cache

from tiny import build_source
from turboquant_mlx.checkpoint.loader import load_model
from turboquant_mlx.errors import CheckpointError, OptionError
from turboquant_mlx.kvcache.install import CacheReport, install, pack_prompt_cache, uninstall
from turboquant_mlx.kvcache.rotating import (
    BatchTurboQuantRotatingKVCache,
    TurboQuantRotatingKVCache,
)
from turboquant_mlx.kvcache.spec import KVSpec

HEADS, WIDTH, WINDOW, LONGEST = 2, 32, 48, 320
SPECS = [
    KVSpec(8, 8),
    KVSpec(4, 4, min_tokens=0),
    KVSpec(3, 4, min_tokens=9, start=40),
    KVSpec(4, 4, "uniform", "uniform", group_size=32, min_tokens=0),
]


def sequence(row: int = 0) -> tuple[mx.array, mx.array]:
    """Keys and values [1, HEADS, LONGEST, WIDTH] of one sequence; keys have a large mean."""
    rng = np.random.default_rng(row)
    both = rng.standard_normal((2, 1, HEADS, LONGEST, WIDTH)).astype(np.float32)
    both[0] += 2 * rng.standard_normal((1, HEADS, 1, WIDTH))
    return mx.array(both[0]), mx.array(both[1])


def part(pair, start: int, stop: int):
    return tuple(a[:, :, start:stop] for a in pair)


def feed(cache, steps, row: int = 0, at: int = 0) -> int:
    """Append the next tokens of a sequence in such steps; the position that comes next."""
    pair = sequence(row)
    for step in steps:
        cache.update_and_fetch(*part(pair, at, at + step))
        at += step
    return at


def single(n: int, spec: KVSpec = SPECS[0], row: int = 0, keep: int = 0, step: int = 20):
    """A window that has seen n tokens."""
    cache = TurboQuantRotatingKVCache(WINDOW, keep, spec=spec)
    steps = [step] * (n // step) + [1] * (n % step)
    feed(cache, steps, row)
    return cache


def seen(cache) -> list[list[np.ndarray]]:
    """For each row, the keys and values that a next token would see."""
    if cache.empty():
        return []
    keys, values = (np.array(x) for x in cache.keys_and_values())
    columns, rows = keys.shape[2], []
    padding = [p - (cache.store.columns - columns) for p in cache.store.padding]
    for r, p in enumerate(padding):
        both = [x[r, :, p:] for x in (keys, values)]
        keep, rest = cache.keep, WINDOW - 1 - cache.keep
        rows.append([np.concatenate([x[:, :keep], x[:, keep:][:, -rest:]], axis=1) for x in both])
    return rows


def same(a, b) -> bool:
    return all(
        np.array_equal(x, y)
        for left, right in zip(seen(a), seen(b), strict=True)
        for x, y in zip(left, right, strict=True)
    )


@pytest.fixture
def lossless(monkeypatch):
    """Nothing is ever coded: what is left is which tokens are seen."""
    monkeypatch.setattr(KVSpec, "warm_tokens", 10**6)


def attention(cache, n: int, pair, window: int | None, as_array: bool) -> np.ndarray:
    """Attention of n queries as a model computes it, by the cache's own mask."""
    mask = cache.make_mask(n, window_size=window, return_array=as_array)
    queries = mx.random.normal((pair[0].shape[0], 2 * HEADS, n, WIDTH), key=mx.random.key(n))
    keys, values = cache.update_and_fetch(*pair)
    out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.2, mask=mask)
    return np.array(out)


STEPS = {
    "a prompt of window - 1": [WINDOW - 1],
    "a prompt of window": [WINDOW],
    "a prompt of window + 1": [WINDOW + 1],
    "a prompt of three windows": [3 * WINDOW],
    "pieces": [20, 20, 20, 20, 7, 33],
    "pieces longer than the window": [60, 60],
    "a token first": [1, 30, 1, 1, 30],
    "drafts": [40, 5, 5, 5, 8, 2],
}


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize(("window", "as_array"), [(None, False), (WINDOW, True), (20, False)])
@pytest.mark.parametrize("keep", [0, 4])
def test_without_coding_it_is_mlx_lms_cache(lossless, steps, window, as_array, keep):
    """The same attention, at every step and then for three windows of single tokens."""
    ours, theirs = TurboQuantRotatingKVCache(WINDOW, keep, 4), RotatingKVCache(WINDOW, keep)
    pair, at = sequence(), 0
    for n in [*steps, *[1] * (3 * WINDOW)]:
        new = part(pair, at, at + n)
        at += n
        # a window inside a cache with kept tokens is something mlx-lm itself turns the wrong way
        inner = window if keep == 0 else None
        out, expected = (attention(c, n, new, inner, as_array) for c in (ours, theirs))
        assert np.abs(out - expected).max() < 2e-6
        assert (ours.offset, ours.size()) == (theirs.offset, theirs.size())
        assert ours.is_trimmable() == theirs.is_trimmable()
        assert ours.keys_and_values()[0].shape == theirs.keys_and_values()[0].shape


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("keep", [0, 4])
def test_with_codes_it_is_within_their_error(steps, keep):
    spec = KVSpec(8, 8)
    ours, theirs = TurboQuantRotatingKVCache(WINDOW, keep, spec=spec), RotatingKVCache(WINDOW, keep)
    pair, at = sequence(), 0
    for n in [*steps, *[1] * (3 * WINDOW)]:
        new = part(pair, at, at + n)
        at += n
        out, expected = (attention(c, n, new, None, False) for c in (ours, theirs))
        assert np.abs(out - expected).max() < 0.05
    assert all(ours.store.frozen)


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.describe()} {s.min_tokens} {s.start}")
@pytest.mark.parametrize("n", [30, WINDOW - 1, WINDOW, WINDOW + 1, 110])
@pytest.mark.parametrize("keep", [0, 4])
def test_any_steps_give_the_same_bits(spec, n, keep):
    whole = single(n, spec, keep=keep, step=n)
    for step in (1, 7, WINDOW - 1, WINDOW, WINDOW + 1):
        assert same(single(n, spec, keep=keep, step=step), whole)


def test_first_tokens_stay_exact_until_they_leave_and_kept_ones_for_good():
    pair = [np.array(x)[0] for x in sequence()]
    for n, keep, exact in ((WINDOW - 1, 0, 9), (WINDOW + 4, 0, 4), (200, 0, 0), (200, 4, 4)):
        cache = single(n, KVSpec(2, 2, min_tokens=9), keep=keep)
        first = 0 if keep else n - min(n, WINDOW - 1)
        for held, true in zip(seen(cache)[0], pair, strict=True):
            assert np.array_equal(held[:, :exact], true[:, first : first + exact])
            assert not np.array_equal(held[:, exact], true[:, first + exact])


def test_bytes_are_those_of_a_window_and_do_not_grow():
    spec, sizes = KVSpec(3, 4), []
    cache, pair = single(200, spec), sequence()
    for at in range(200, 300):
        cache.update_and_fetch(*part(pair, at, at + 1))
        assert cache.nbytes == sum(a.nbytes for a in cache.store.arrays())
        sizes.append(cache.nbytes - cache.spare_nbytes)
        assert cache.spare_nbytes <= 16 * HEADS * spec.token_bytes(WIDTH)
    fixed = HEADS * WIDTH * 4  # the mean key
    assert set(sizes) == {WINDOW * HEADS * spec.token_bytes(WIDTH) + fixed}
    assert cache.plain_nbytes == WINDOW * HEADS * 2 * WIDTH * 4


def test_a_long_prompt_leaves_no_long_store_behind():
    cache, pair = TurboQuantRotatingKVCache(WINDOW, bits=4), sequence()
    feed(cache, [300])
    long = cache.nbytes
    cache.update_and_fetch(*part(pair, 300, 301))
    assert cache.nbytes < long / 4


@pytest.mark.parametrize("n", [30, 47])
def test_trimmed_and_appended_again_equals_never_appended(n):
    cache = single(n)
    assert cache.is_trimmable() and cache.trim(5) == 5
    assert same(cache, single(n - 5))
    feed(cache, [5], at=n - 5)
    assert same(cache, single(n))


def test_a_window_that_has_forgotten_something_takes_back_no_more_than_the_latest_append():
    cache = single(100)
    assert not cache.is_trimmable()
    assert cache.trim(21) == 0
    assert same(cache, single(100))
    assert cache.trim(20) == 20
    assert same(cache, single(80))


@pytest.mark.parametrize("n", [30, 100])
def test_a_copy_goes_its_own_way(n):
    cache = single(n)
    twin = copy.deepcopy(cache)
    feed(cache, [20], at=n)
    assert same(twin, single(n))
    assert same(cache, single(n + 20))


# -- saving -------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 10, WINDOW, 100])
@pytest.mark.parametrize("keep", [0, 4])
def test_saved_and_loaded_again_it_goes_on_as_before(n, keep, tmp_path):
    file, spec = str(tmp_path / "cache.safetensors"), KVSpec(3, 4)
    mlx_lm_cache.save_prompt_cache(file, [single(n, spec, keep=keep)])
    (loaded,) = mlx_lm_cache.load_prompt_cache(file)
    assert type(loaded) is TurboQuantRotatingKVCache
    assert (loaded.max_size, loaded.keep, loaded.offset) == (WINDOW, keep, n)
    feed(loaded, [30], at=n)
    assert same(loaded, single(n + 30, spec, keep=keep))


def test_another_process_reads_it(tmp_path):
    file = str(tmp_path / "cache.safetensors")
    batch = TurboQuantRotatingKVCache.merge([single(80, row=1), single(20, row=2)])
    mlx_lm_cache.save_prompt_cache(file, [single(80), batch])
    program = (
        "import turboquant_mlx.kvcache.cache, mlx.core as mx, sys\n"
        "from mlx_lm.models.cache import load_prompt_cache\n"
        "for c in load_prompt_cache(sys.argv[1]):\n"
        "    keys, values = c.keys_and_values()\n"
        "    print(type(c).__name__, (keys * values).sum().item())\n"
    )
    done = subprocess.run([sys.executable, "-c", program, file], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expected = []
    for c in (single(80), batch):
        keys, values = c.keys_and_values()
        expected += [type(c).__name__, str((keys * values).sum().item())]
    assert done.stdout.split() == expected


def test_a_state_that_is_none_is_named():
    with pytest.raises(CheckpointError, match="no state of a packed window"):
        TurboQuantRotatingKVCache.from_state((1, 2))


# -- batches ------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [[100, 3, 31, 48], [47, 48, 49], [5, 5]])
@pytest.mark.parametrize("keep", [0, 4])
def test_rows_of_a_batch_equal_themselves_alone(lengths, keep):
    batch = TurboQuantRotatingKVCache.merge(
        [single(n, row=r, keep=keep) for r, n in enumerate(lengths)]
    )
    assert type(batch) is BatchTurboQuantRotatingKVCache
    assert batch.offset.tolist() == lengths
    for step in range(70):
        news = [part(sequence(r), n + step, n + step + 1) for r, n in enumerate(lengths)]
        batch.update_and_fetch(*(mx.concatenate(list(side)) for side in zip(*news, strict=True)))
        if step in (0, 1, 40, 69):
            assert batch.offset.tolist() == [n + step + 1 for n in lengths]
            for r, n in enumerate(lengths):
                assert same(batch.extract(r), single(n + step + 1, row=r, keep=keep))


@pytest.mark.parametrize("lengths", [[100, 3, 31], [48, 20, 40]])
@pytest.mark.parametrize("n", [1, 4, 20])
def test_attention_of_a_ragged_batch_is_that_of_mlx_lms_batch(lossless, lengths, n):
    """Masks and columns fit together before, while and after the window turns around."""
    rows = range(len(lengths))
    theirs = [RotatingKVCache(WINDOW) for _ in rows]
    ours = [TurboQuantRotatingKVCache(WINDOW, bits=4) for _ in rows]
    for r, length in enumerate(lengths):
        feed(theirs[r], [length], r)
        feed(ours[r], [length], r)
    theirs, ours = theirs[0].merge(theirs), ours[0].merge(ours)
    at = list(lengths)
    for _ in range(60 // n + 2):
        news = [part(sequence(r), at[r], at[r] + n) for r in rows]
        pair = [mx.concatenate(list(side)) for side in zip(*news, strict=True)]
        at = [a + n for a in at]
        out, expected = (attention(c, n, pair, WINDOW, True) for c in (ours, theirs))
        assert np.abs(out - expected).max() < 2e-6
        assert ours.offset.tolist() == theirs.offset.tolist()


@pytest.mark.parametrize("lengths", [[90, 20, 60], [48, 47, 1], [30, 30, 30]])
@pytest.mark.parametrize("before", [0, 30, 60])
@pytest.mark.parametrize("keep", [0, 4])
def test_right_padded_prompts(lengths, before, keep):
    """As BatchGenerator feeds them: padded on the right, in pieces, then rolled. Padding never
    pushes a token out of the window."""
    most = max(lengths)
    batch = TurboQuantRotatingKVCache.merge([single(before, row=r, keep=keep) for r in range(3)])
    padding = [most - n for n in lengths]
    if max(padding):
        batch.prepare(lengths=lengths, right_padding=padding)
    sides = [[], []]
    for r, n in enumerate(lengths):
        pair = part(sequence(r), before, before + n)
        for side, x in zip(sides, pair, strict=True):
            side.append(mx.pad(x, [(0, 0), (0, 0), (0, most - n), (0, 0)], constant_values=9))
    keys, values = (mx.concatenate(side) for side in sides)
    for start in range(0, most, 24):
        batch.update_and_fetch(keys[:, :, start : start + 24], values[:, :, start : start + 24])
    batch.finalize()
    assert batch.offset.tolist() == [before + n for n in lengths]
    for r, n in enumerate(lengths):
        assert same(batch.extract(r), single(before + n, row=r, keep=keep))


def test_rows_leave_and_others_join():
    spec = KVSpec(4, 3)
    first = TurboQuantRotatingKVCache.merge([single(n, spec, r) for r, n in enumerate([90, 20])])
    first.filter([1])
    first.extend(TurboQuantRotatingKVCache.merge([single(120, spec, 3), single(1, spec, 4)]))
    for r, (row, n) in enumerate([(1, 20), (3, 120), (4, 1)]):
        assert same(first.extract(r), single(n, spec, row))
    assert first.size() == WINDOW
    first.filter(mx.array([0]))
    assert same(first.extract(0), single(20, spec, 1))


@pytest.mark.parametrize("n", [30, 100])
def test_plain_windows_join_a_packed_batch(n):
    """A window that has forgotten its first tokens is packed by the mean of what is left."""
    plain = RotatingKVCache(WINDOW)
    feed(plain, [20] * (n // 20) + [1] * (n % 20), 1)
    batch = TurboQuantRotatingKVCache.merge([single(40), plain])
    batch.extend(BatchRotatingKVCache.merge([plain, RotatingKVCache(WINDOW)]))
    assert batch.offset.tolist() == [40, n, n, 0]
    feed_all = [part(sequence(1), n, n + 1)[i] for i in range(2)]
    batch.update_and_fetch(*(mx.concatenate([x] * 4) for x in feed_all))
    feed(plain, [1], 1, n)
    true = [np.array(x)[0] for x in part(sequence(1), max(0, n + 1 - (WINDOW - 1)), n + 1)]
    for r in (1, 2):
        for held, x in zip(seen(batch.extract(r))[0], true, strict=True):
            assert np.abs(held - x).max() < 0.1


def test_a_plain_window_is_packed_with_what_it_holds():
    for n in (0, 30, 100):
        for keep in (0, 4):
            plain = RotatingKVCache(WINDOW, keep)
            feed(plain, [1] * n)
            made = TurboQuantRotatingKVCache.from_cache(plain, 8)
            assert (made.offset, made.max_size, made.keep) == (n, WINDOW, keep)
            feed(plain, [1] * 5, at=n)
            feed(made, [1] * 5, at=n)
            for x, y in zip(seen(made)[0], seen(single(n + 5, keep=keep))[0], strict=True):
                assert np.abs(x - y).max() < 0.1


def test_what_does_not_fit_together_is_refused():
    with pytest.raises(OptionError, match="window of 32 tokens is too short"):
        TurboQuantRotatingKVCache(32, bits=4)
    with pytest.raises(OptionError, match="packed in another way"):
        TurboQuantRotatingKVCache.from_cache(single(40), 3)
    with pytest.raises(OptionError, match="KVCache cannot be packed"):
        TurboQuantRotatingKVCache.from_cache(mlx_lm_cache.KVCache(), 4)
    other = TurboQuantRotatingKVCache(64, spec=SPECS[0])
    with pytest.raises(OptionError, match="cannot be joined to a packed window of 48 tokens"):
        TurboQuantRotatingKVCache.merge([single(40), other])
    with pytest.raises(OptionError, match="ways cannot be joined"):
        TurboQuantRotatingKVCache.merge([single(40), single(40, SPECS[1])])


def test_to_batch_and_prefixes_serve_mlx_vlm():
    empty, made = TurboQuantRotatingKVCache(WINDOW, bits=8), single(100)
    assert empty.to_batch([0, 3]).offset.tolist() == [0, -3]
    assert same(made.to_batch([0, 0]).extract(1), made)
    with pytest.raises(ValueError, match="cannot be padded"):
        made.to_batch([0, 1])
    restored = TurboQuantRotatingKVCache(WINDOW, bits=8)
    restored.prefix_cache_restore(made.prefix_cache_snapshot())
    assert same(restored, made)
    batch = made.prefix_cache_merge([restored, RotatingKVCache(WINDOW), empty], [100, 0, 0])
    assert batch.offset.tolist() == [100, 0, 0]
    assert made.prefix_cache_merge([restored], [99]) is None
    assert made.prefix_cache_merge([RotatingKVCache(64)], [0]) is None


# -- in the place of plain ones -----------------------------------------------------------------


def test_windows_are_packed_where_they_are_long_enough():
    caches = [RotatingKVCache(WINDOW), RotatingKVCache(20), mlx_lm_cache.KVCache()]
    pack_prompt_cache(caches, KVSpec(3, 4, min_tokens=30, start=1000))
    assert type(caches[0]) is TurboQuantRotatingKVCache
    # no later than when it is full, with room for the mean key
    assert (caches[0].spec.min_tokens, caches[0].spec.start) == (WINDOW - 32, WINDOW)
    assert type(caches[1]) is RotatingKVCache
    assert CacheReport.of(caches).left == {"RotatingKVCache": 1}


def test_a_protected_window_leaves_all_windows_plain():
    """They share a mask, and a plain one's turns around."""
    caches = [RotatingKVCache(WINDOW), mlx_lm_cache.KVCache(), RotatingKVCache(WINDOW)]
    pack_prompt_cache(caches, KVSpec(4, 4, protect_first=1))
    assert CacheReport.of(caches).left == {"RotatingKVCache": 2}
    caches = [mlx_lm_cache.KVCache(), RotatingKVCache(WINDOW)]
    pack_prompt_cache(caches, KVSpec(4, 4, protect_first=1))
    assert CacheReport.of(caches).left == {"KVCache": 1}


# -- under models -------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["gemma3_text", "gpt_oss"])
def model(request, tmp_path_factory):
    """Windows and full layers in turns; gpt_oss has sinks beside them."""
    folder = tmp_path_factory.mktemp("models") / request.param
    build_source(folder, request.param, dtype="float32", sliding_window=WINDOW)
    made = load_model(folder)[0]
    yield made
    uninstall(made)


def logits(model, length: int, decoded: int, piece: int = 2048) -> tuple[np.ndarray, CacheReport]:
    """Logits behind a prompt and behind each of the tokens after it."""
    cache = make_prompt_cache(model)
    tokens = mx.random.randint(1, 60, (1, length + decoded), key=mx.random.key(2))
    for start in range(0, length, piece):
        out = model(tokens[:, start : min(start + piece, length)], cache=cache)
    steps = [out[:, -1:]]
    steps += [model(tokens[:, i : i + 1], cache=cache) for i in range(length, length + decoded)]
    return np.array(mx.concatenate(steps, axis=1)), CacheReport.of(cache)


def distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Of each step, in proportion to its size."""
    a, b = (x - x.mean(-1, keepdims=True) for x in (a, b))
    return np.sqrt(((a - b) ** 2).sum(-1) / (b * b).sum(-1))[0]


PROMPTS = [
    (WINDOW - 1, 3 * WINDOW, 2048),
    (WINDOW, 20, 2048),
    (WINDOW + 1, 20, 2048),
    (100, 20, 32),
    (257, 3, 128),
    pytest.param(255, 3, 2048, marks=pytest.mark.heavy),
    pytest.param(256, 3, 2048, marks=pytest.mark.heavy),
]


@pytest.mark.parametrize(("length", "decoded", "piece"), PROMPTS)
def test_a_model_with_windows_stays_what_it_is(model, length, decoded, piece, monkeypatch):
    uninstall(model)
    plain, before = logits(model, length, decoded, piece)
    install(model, KVSpec(8, 8))
    coded, after = logits(model, length, decoded, piece)
    assert before.left == {"KVCache": 1, "RotatingKVCache": 1}
    assert (after.packed, after.frozen, after.left) == (2, 2, {})
    assert after.held - after.spare < after.plain / 3
    # a router of random weights may take another expert for one token
    assert np.median(distances(coded, plain)) < 0.02
    with monkeypatch.context() as patch:
        patch.setattr(KVSpec, "warm_tokens", 10**6)
        exact, _ = logits(model, length, decoded, piece)
    assert distances(exact, plain).max() < 1e-5


def test_requests_in_one_batch_equal_themselves_alone(model):
    """Prompts shorter and longer than the window; one leaves, another joins."""
    uninstall(model)
    install(model, KVSpec(6, 6))
    prompts = [[i % 50 + 1 for i in range(7 * n, 8 * n)] for n in (5, 60, 29, 120)]

    def alone(prompt):
        steps = generate_step(mx.array(prompt), model, max_tokens=40, prefill_step_size=16)
        return [int(token) for token, _ in steps]

    expected = [alone(prompt) for prompt in prompts]
    batch = BatchGenerator(
        model, max_tokens=40, prefill_batch_size=2, completion_batch_size=3, prefill_step_size=16
    )
    uids = batch.insert(prompts)
    out: dict[int, list[int]] = {uid: [] for uid in uids}
    caches: dict[int, list] = {}
    while len(caches) < len(uids):
        _, responses = batch.next()
        for response in responses:
            out[response.uid].append(response.token)
            if response.finish_reason:
                caches[response.uid] = response.prompt_cache
    assert [out[uid] for uid in uids] == expected
    for cache in caches.values():
        assert CacheReport.of(cache).packed == 2
        assert any(type(c) is TurboQuantRotatingKVCache for c in cache)


def test_a_cache_of_a_given_size_keeps_the_first_four_tokens(tmp_path):
    build_source(tmp_path / "m", "qwen3", dtype="float32")
    model = load_model(tmp_path / "m")[0]
    with pytest.raises(OptionError, match="window of 36 tokens is too short"):
        install(model, KVSpec(8, 8), max_kv_size=36)
    plain = make_prompt_cache(model, max_kv_size=64)
    install(model, KVSpec(8, 8), max_kv_size=64)
    packed = make_prompt_cache(model)
    tokens = mx.random.randint(1, 60, (1, 150), key=mx.random.key(3))
    for start in range(0, 90, 30):
        pair = [model(tokens[:, start : start + 30], cache=c) for c in (plain, packed)]
    for i in range(90, 150):
        pair = [model(tokens[:, i : i + 1], cache=c) for c in (plain, packed)]
        assert distances(*(np.array(x) for x in pair)).max() < 0.02
    assert CacheReport.of(packed).left == {}
    assert all((c.max_size, c.keep, c.offset) == (64, 4, 150) for c in packed)


def test_a_model_with_caches_of_its_own_takes_no_size(model):
    uninstall(model)
    with pytest.raises(OptionError, match="makes caches of its own"):
        install(model, KVSpec(8, 8), max_kv_size=64)


# -- taking back --------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [WINDOW, 100])
@pytest.mark.parametrize("keep", [0, 4])
def test_a_draft_can_be_taken_back_from_a_window_that_has_turned_around(n, keep):
    """As mlx-vlm does it, which asks neither whether it can nor whether it was done."""
    cache = single(n, keep=keep)
    feed(cache, [4], at=n)
    assert cache.trim(3) == 3
    assert cache.offset == n + 1
    assert same(cache, single(n + 1, keep=keep))
    feed(cache, [20], at=n + 1)
    assert same(cache, single(n + 21, keep=keep))


@pytest.mark.parametrize("back", [3, 12, 15])
def test_a_draft_that_crosses_the_end_of_the_window_can_be_taken_back(back):
    cache = single(40)
    feed(cache, [16], at=40)
    assert cache.trim(back) == back
    assert cache.offset == 56 - back
    assert same(cache, single(56 - back))
    feed(cache, [20], at=56 - back)
    assert same(cache, single(76 - back))


def test_rows_take_back_different_numbers_of_tokens():
    lengths, back = [70, 20, 55], [0, 3, 1]
    batch = TurboQuantRotatingKVCache.merge([single(n, row=r) for r, n in enumerate(lengths)])
    drafts = [part(sequence(r), n, n + 4) for r, n in enumerate(lengths)]
    batch.update_and_fetch(*(mx.concatenate(side) for side in zip(*drafts, strict=True)))
    batch.prepare(right_padding=back)
    batch.finalize()
    assert batch.offset.tolist() == [n + 4 - b for n, b in zip(lengths, back, strict=True)]
    for r, (n, b) in enumerate(zip(lengths, back, strict=True)):
        assert same(batch.extract(r), single(n + 4 - b, row=r))


@pytest.mark.parametrize("step", [5, 10])
def test_masks_fit_what_a_right_padded_prompt_in_pieces_sees(step):
    batch = TurboQuantRotatingKVCache.merge([single(30, row=0), single(10, row=1)])
    batch.prepare(lengths=[2, 20], right_padding=[18, 0])
    for start in range(0, 20, step):
        mask = batch.make_mask(step)
        pairs = [part(sequence(r), n + start, n + start + step) for r, n in enumerate([30, 10])]
        keys, _ = batch.update_and_fetch(*(mx.concatenate(s) for s in zip(*pairs, strict=True)))
        assert mask.shape == (2, 1, step, keys.shape[2])
    batch.finalize()
    assert batch.offset.tolist() == [32, 30]


def test_a_snapshot_stays_as_it_was_taken():
    cache = single(100)
    snapshot = cache.prefix_cache_snapshot()
    feed(cache, [5], at=100)
    restored = [single(7) for _ in range(2)]
    for other in restored:
        other.prefix_cache_restore(snapshot)
    feed(restored[0], [1, 1], row=1, at=100)
    assert same(restored[1], single(100))
    feed(restored[1], [5], at=100)
    assert same(restored[1], cache)

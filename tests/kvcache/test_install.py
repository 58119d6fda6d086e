"""Packed caches in the places of plain ones, by mlx-vlm's rules, and the report about them."""

from __future__ import annotations

from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
)

from turboquant_mlx.errors import OptionError
from turboquant_mlx.kvcache.cache import BatchTurboQuantKVCache, TurboQuantKVCache
from turboquant_mlx.kvcache.install import (
    CacheReport,
    get_kv_quant_scheme,
    get_quantized_kv_bits,
    maybe_quantize_kv_cache,
    pack_prompt_cache,
)
from turboquant_mlx.kvcache.spec import KVSpec


def plain(n: int) -> KVCache:
    cache = KVCache()
    if n:
        values = np.random.default_rng(0).standard_normal((2, 1, 2, n, 64))
        cache.update_and_fetch(*(mx.array(v.astype(np.float32)) for v in values))
    return cache


def convert(cache, start=0, bits=3.5, **options):
    prompt_cache = [cache]
    maybe_quantize_kv_cache(prompt_cache, start, 64, bits, **options)
    return prompt_cache[0]


def test_half_bits_are_turboquant_and_whole_ones_when_asked_for():
    made = convert(plain(70))
    assert isinstance(made, TurboQuantKVCache)
    assert (made.offset, made.spec.key_bits, made.spec.value_bits) == (70, 3, 4)
    made = convert(plain(0), bits=4, kv_quant_scheme="turboquant")
    assert (made.spec.key_scheme, made.spec.group_size) == ("turboquant", 0)
    made = convert(plain(0), bits=4)
    assert (made.spec.key_scheme, made.spec.group_size) == ("uniform", 64)


def test_one_side_may_be_given_in_its_own_way():
    made = convert(
        plain(0),
        bits=4,
        kv_key_bits=8,
        kv_key_scheme="turboquant",
        kv_value_scheme="uniform",
        kv_min_tokens=4,
    )
    assert made.spec == KVSpec(8, 4, "turboquant", "uniform", group_size=64, min_tokens=4)
    made = convert(plain(0), bits=None, kv_key_bits=8, kv_value_bits=3)
    assert (made.spec.key_bits, made.spec.value_bits) == (8, 3)


def test_nothing_happens_without_bits():
    cache = plain(5)
    assert convert(cache, bits=None) is cache
    assert convert(cache, bits=0) is cache


def test_the_start_holds_for_caches_with_tokens_and_empty_ones_wait_inside():
    cache = plain(70)
    assert convert(cache, start=71) is cache
    assert isinstance(convert(cache, start=70), TurboQuantKVCache)
    empty = convert(plain(0), start=71)
    assert isinstance(empty, TurboQuantKVCache) and empty.spec.start == 71


def test_converting_what_is_there_equals_packing_from_the_start():
    keys, values = plain(70).keys_and_values()
    fresh = TurboQuantKVCache(3.5)
    fresh.update_and_fetch(keys, values)
    made = convert(plain(70))
    for a, b in zip(made.keys_and_values(), fresh.keys_and_values(), strict=True):
        assert mx.array_equal(a, b)


def test_lists_are_walked_and_other_kinds_left_alone():
    others = [RotatingKVCache(8), ArraysCache(2), ChunkedKVCache(16)]
    nested = CacheList(KVCache(), RotatingKVCache(8))
    prompt_cache = [*others, nested, (KVCache(), ArraysCache(1)), BatchKVCache([0, 2])]
    maybe_quantize_kv_cache(prompt_cache, 0, 64, 3.5)
    assert prompt_cache[:3] == others
    assert isinstance(nested[0], TurboQuantKVCache) and type(nested[1]) is RotatingKVCache
    assert isinstance(prompt_cache[4][0], TurboQuantKVCache)
    assert isinstance(prompt_cache[5], BatchTurboQuantKVCache)
    report = CacheReport.of(prompt_cache)
    assert (report.layers, report.packed) == (8, 3)
    assert report.left == {"RotatingKVCache": 2, "ArraysCache": 2, "ChunkedKVCache": 1}
    assert report.left_alone() == (
        "3 of 8 layers are packed; left as they are: "
        "2 ArraysCache, 1 ChunkedKVCache, 2 RotatingKVCache"
    )


def test_the_second_cache_of_a_list_is_packed_only_where_it_belongs_to_attention():
    for model_type, expected in ((None, False), ("deepseek_v32", False), ("longcat_flash", True)):
        prompt_cache = [CacheList(KVCache(), KVCache())]
        pack_prompt_cache(prompt_cache, KVSpec(4, 4), SimpleNamespace(model_type=model_type))
        assert isinstance(prompt_cache[0][0], TurboQuantKVCache)
        assert isinstance(prompt_cache[0][1], TurboQuantKVCache) is expected


def test_converting_twice_changes_nothing():
    made = convert(plain(70))
    assert convert(made) is made


def test_converting_a_list_twice_leaves_the_keys_of_an_index_alone():
    prompt_cache = [CacheList(KVCache(), KVCache())]
    for _ in range(2):
        maybe_quantize_kv_cache(prompt_cache, 0, 64, 3.5)
        pack_prompt_cache(prompt_cache, KVSpec(3, 4))
    assert [type(c) for c in prompt_cache[0].caches] == [TurboQuantKVCache, KVCache]


def test_protected_layers_stay_plain():
    prompt_cache = [KVCache() for _ in range(6)]
    pack_prompt_cache(prompt_cache, KVSpec(3, 4, protect_first=1, protect_last=2))
    packed = [isinstance(c, TurboQuantKVCache) for c in prompt_cache]
    assert packed == [False, True, True, True, False, False]


def test_the_report_counts_real_bytes():
    prompt_cache = [plain(300), plain(300)]
    before = CacheReport.of(prompt_cache)
    assert before.describe() == "key-value cache: 1.0 MB, not packed"
    prompt_cache[0] = convert(prompt_cache[0])
    after = CacheReport.of(prompt_cache)
    assert after.held == sum(c.nbytes for c in prompt_cache)
    assert after.plain == prompt_cache[1].nbytes + 300 * 2 * 2 * 64 * 4
    assert "1 of 2 layers packed" in after.describe()


def test_variables_of_the_server(monkeypatch, capsys):
    monkeypatch.delenv("KV_BITS", raising=False)
    monkeypatch.delenv("KV_QUANT_SCHEME", raising=False)
    assert get_quantized_kv_bits() is None
    assert get_kv_quant_scheme() == "uniform"
    monkeypatch.setenv("KV_BITS", "3.5")
    monkeypatch.setenv("KV_QUANT_SCHEME", "turboquant")
    assert get_quantized_kv_bits() == get_quantized_kv_bits("org/model-4bit") == 3.5
    assert get_kv_quant_scheme() == "turboquant"
    assert capsys.readouterr().err == ""
    assert get_quantized_kv_bits("org/gemma-3-4b-it-qat-4bit") is None
    assert "trained with quantization awareness" in capsys.readouterr().err
    monkeypatch.setenv("KV_BITS", "0")
    assert get_quantized_kv_bits() is None
    monkeypatch.setenv("KV_BITS", "3.3")
    with pytest.raises(OptionError, match=r"3\.3 bits"):
        get_quantized_kv_bits()


def test_caches_of_mlx_vlm_are_packed_too():
    theirs = pytest.importorskip("mlx_vlm.models.cache")
    cache, keys, values = theirs.KVCache(), *plain(70).keys_and_values()
    cache.update_and_fetch(keys, values)
    prompt_cache = [cache, theirs.RotatingKVCache(8), theirs.CacheList(theirs.KVCache())]
    maybe_quantize_kv_cache(prompt_cache, 0, 64, 3.5)
    for a, b in zip(prompt_cache[0].keys_and_values(), convert(plain(70)).keys_and_values(),
                    strict=True):  # fmt: skip
        assert mx.array_equal(a, b)
    assert isinstance(prompt_cache[2][0], TurboQuantKVCache)
    assert CacheReport.of(prompt_cache).left == {"RotatingKVCache": 1}


def test_mlx_vlms_prefix_cache_keeps_and_merges_rows():
    made, empty = convert(plain(70)), TurboQuantKVCache(3.5)
    restored = TurboQuantKVCache(3.5)
    restored.prefix_cache_restore(made.prefix_cache_snapshot())
    assert restored.offset == 70
    assert restored.prefix_cache_reserve(100) == ()
    batch = made.prefix_cache_merge([restored, KVCache(), empty], [70, 0, 0])
    assert batch.offset.tolist() == [70, 0, 0]
    assert made.prefix_cache_merge([restored], [69]) is None
    assert made.prefix_cache_merge([convert(plain(70), bits=2.5)], [70]) is None

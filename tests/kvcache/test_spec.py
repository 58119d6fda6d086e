"""One parser for every spelling of a packed cache."""

from __future__ import annotations

import pytest

from turboquant_mlx.errors import OptionError
from turboquant_mlx.kvcache.spec import (
    KVOptions,
    KVSpec,
    is_quantization_aware,
    options_from_environment,
    resolve,
    split_bits,
    turboquant_enabled,
    validate_bits,
)


def widths(spec: KVSpec | None) -> tuple[int, int] | None:
    return spec and (spec.key_bits, spec.value_bits)


@pytest.mark.parametrize(
    ("bits", "expected"),
    [(4, (4, 4)), ("4", (4, 4)), (3.5, (3, 4)), ("3.5", (3, 4)), (1.5, (1, 2)), (8.0, (8, 8))],
)
def test_half_bits_give_the_floor_to_keys_and_the_ceiling_to_values(bits, expected):
    assert split_bits(bits) == expected


@pytest.mark.parametrize("bits", [3.3, 0.5, 8.5, 9, -1, "x", "nan", "inf", None, "", "1e9"])
def test_other_bits_are_refused(bits):
    with pytest.raises(OptionError):
        split_bits(bits)


def test_validate_bits_returns_a_number():
    assert validate_bits("2.5") == 2.5
    with pytest.raises(OptionError, match=r"3\.25 bits"):
        validate_bits(3.25)


def test_turboquant_is_enabled_by_name_or_by_fractional_bits():
    assert turboquant_enabled(3.5)
    assert turboquant_enabled(3.5, "uniform")
    assert turboquant_enabled(4, "turboquant")
    assert not turboquant_enabled(4)
    assert not turboquant_enabled(4.0, "uniform")
    assert not turboquant_enabled(None, "turboquant")
    with pytest.raises(OptionError, match="unknown scheme"):
        turboquant_enabled(4, "affine")


def test_nothing_said_means_no_packing():
    assert resolve(KVOptions(), {}) is None
    assert resolve(KVOptions(bits=0), {"KV_BITS": "4"}) is None
    assert resolve(KVOptions(), {"KV_BITS": "0"}) is None


def test_presets_have_names():
    for name in ("safe", "balanced", "small"):
        spec = resolve(KVOptions(bits=name), {})
        assert spec is not None and spec.key_bits >= spec.value_bits
    with pytest.raises(OptionError, match="neither a number of bits nor a preset"):
        resolve(KVOptions(bits="tiny"), {})


def test_flags_set_every_field():
    spec = resolve(KVOptions(key_bits=8, value_bits=3, group_size=32, min_tokens=4, start=100), {})
    assert spec == KVSpec(8, 3, group_size=32, min_tokens=4, start=100)
    assert spec.describe() == "K8/V3"


def test_variables_are_read_and_a_flag_wins_over_its_variable():
    env = {"KV_BITS": "3.5", "KV_GROUP_SIZE": "32", "QUANTIZED_KV_START": "10"}
    assert resolve(KVOptions(), env) == KVSpec(3, 4, group_size=32, start=10)
    assert resolve(KVOptions(bits=4, start=0), env) == KVSpec(4, 4, group_size=32)
    env = {"KV_KEY_BITS": "8", "KV_VALUE_BITS": "3"}
    assert widths(resolve(KVOptions(), env)) == (8, 3)
    assert widths(resolve(KVOptions(bits=2), env)) == (2, 2)


def test_a_variable_of_one_side_overrides_the_common_one_as_in_mlx_vlm():
    assert widths(resolve(KVOptions(), {"KV_BITS": "3.5", "KV_KEY_BITS": "4"})) == (4, 4)


def test_an_absent_flag_leaves_the_variable_its_say():
    """mlx-vlm 0.7.10 writes its flags' defaults over the variables."""
    spec = resolve(KVOptions(), {"KV_BITS": "4", "KV_QUANT_SCHEME": "turboquant"},
                   default_scheme="uniform")  # fmt: skip
    assert spec is not None and spec.key_scheme == spec.value_scheme == "turboquant"


def test_the_default_scheme_holds_for_whole_bits_only():
    for bits, scheme in ((4, "uniform"), (3.5, "turboquant")):
        spec = resolve(KVOptions(bits=bits), {}, default_scheme="uniform")
        assert spec is not None and spec.key_scheme == scheme


def test_each_side_may_have_its_own_scheme():
    spec = resolve(KVOptions(bits=4, key_scheme="uniform"), {})
    assert spec is not None
    assert (spec.key_scheme, spec.value_scheme) == ("uniform", "turboquant")
    assert spec.describe() == "K4 uniform/V4"
    env = {"KV_QUANT_SCHEME": "uniform", "KV_VALUE_SCHEME": "turboquant"}
    spec = resolve(KVOptions(bits=4), env)
    assert spec is not None
    assert (spec.key_scheme, spec.value_scheme) == ("uniform", "turboquant")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (KVOptions(bits=4, key_bits=4), "--kv-bits and --kv-k-bits exclude each other"),
        (KVOptions(key_bits=4), "--kv-k-bits needs --kv-v-bits"),
        (KVOptions(value_bits=4), "--kv-v-bits needs --kv-k-bits"),
        (KVOptions(key_bits=1, value_bits=4), "--kv-k-bits must be a whole number from 2 to 8"),
        (KVOptions(key_bits=4, value_bits=3.5), "--kv-v-bits must be a whole number"),
        (KVOptions(bits=9), "--kv-bits: 9 bits are not supported"),
        (KVOptions(bits=3.5, scheme="uniform"), "--kv-bits 3.5 is no width of the uniform scheme"),
        (KVOptions(bits=7, scheme="uniform"), "no 7-bit code"),
        (KVOptions(bits=4, group_size=48), "a group of 48 values is not supported"),
        (KVOptions(bits=4, group_size=16, scheme="uniform"), "a group of 16 values"),
        (KVOptions(min_tokens=4), "--kv-min-tokens has no effect"),
        (KVOptions(group_size=64), "--kv-group-size has no effect"),
        (KVOptions(start=5), "--quantized-kv-start has no effect"),
        (KVOptions(scheme="turboquant"), "--kv-quant-scheme has no effect"),
        (KVOptions(bits=0, min_tokens=4), "--kv-min-tokens has no effect"),
        (KVOptions(bits=4, min_tokens=2**21), "--kv-min-tokens must be"),
    ],
)
def test_what_cannot_hold_is_refused_with_the_reason(flags, words):
    with pytest.raises(OptionError) as caught:
        resolve(flags, {})
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"KV_BITS": "3.3"}, "KV_BITS: 3.3 bits"),
        ({"KV_BITS": "none"}, "KV_BITS"),
        ({"KV_KEY_BITS": "4"}, "KV_KEY_BITS needs KV_VALUE_BITS"),
        ({"KV_QUANT_SCHEME": "affine"}, "KV_QUANT_SCHEME is 'affine'"),
        ({"KV_GROUP_SIZE": "-1"}, "KV_GROUP_SIZE must be a whole number"),
        ({"QUANTIZED_KV_START": "1.5"}, "QUANTIZED_KV_START must be a whole number"),
    ],
)
def test_a_bad_variable_is_refused_by_its_name(env, words):
    with pytest.raises(OptionError) as caught:
        resolve(KVOptions(), env)
    assert words in caught.value.message


def test_an_empty_variable_says_nothing():
    assert options_from_environment({"KV_BITS": " ", "KV_GROUP_SIZE": ""}) == KVOptions()


def test_bytes_of_a_packed_token():
    assert KVSpec(3, 4).token_bytes(128) == 48 + 1 + 64 + 1
    assert KVSpec(3, 4, group_size=64).token_bytes(128) == 48 + 2 + 64 + 2
    assert KVSpec(4, 4, group_size=64).token_bytes(32) == 16 + 1 + 16 + 1
    assert KVSpec(4, 4, "uniform", "uniform").token_bytes(128) == 2 * (64 + 8)
    # 3.5 bits, head 128: at most 1/4.2 of 16 bits
    assert 2 * 2 * 128 / KVSpec(3, 4).token_bytes(128) > 4.2


def test_a_group_that_does_not_divide_the_head_is_refused_with_what_does():
    with pytest.raises(OptionError) as caught:
        KVSpec(4, 4, group_size=64).group_of("turboquant", 80)
    assert "does not divide this model's head size 80" in caught.value.message
    assert "16" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("name", "aware"),
    [
        ("google/gemma-3-4b-it-qat-q4_0", True),
        ("models/Gemma-QAT/", True),
        ("some/qatar-7b", False),
        ("qat/llama", False),
        (None, False),
    ],
)
def test_a_model_trained_with_quantization_awareness_is_known_by_its_name(name, aware):
    assert is_quantization_aware(name) is aware

"""Options that cannot be meant are refused before anything is loaded."""

from __future__ import annotations

import pytest

from turboquant_mlx.errors import OptionError
from turboquant_mlx.evaluate.candidates import list_candidates
from turboquant_mlx.evaluate.options import EvaluateOptions, parse_variant


def names(**options) -> list[str]:
    return [candidate.name for candidate in list_candidates(EvaluateOptions(**options))]


def test_the_default_rows():
    assert names() == [
        "affine 2-bit g64",
        "TurboQuant 2-bit",
        "TurboQuant 2-bit + QJL",
        "affine 3-bit g64",
        "TurboQuant 3-bit",
        "TurboQuant 3-bit + QJL",
        "affine 4-bit g64",
        "mxfp4",
        "nvfp4",
        "TurboQuant 4-bit",
        "TurboQuant 4-bit + QJL",
    ]


def test_each_option_has_its_rows():
    assert names(bits=(3,), qjl=False) == ["affine 3-bit g64", "TurboQuant 3-bit"]
    assert names(bits=(4,), affine=False, qjl=False) == ["TurboQuant 4-bit"]
    assert names(bits=(2,), group_size=32, qjl=False) == [
        "affine 2-bit g32",
        "TurboQuant 2-bit g32",
    ]
    assert names(bits=(3,), affine=False, qjl=False, variants=("--attn-bits 4",)) == [
        "TurboQuant 3-bit",
        "TurboQuant 3-bit --attn-bits 4",
    ]
    assert names(compare=("some/where/smol-3bit", "owner/name")) == ["smol-3bit", "name"]
    assert names(compare=("x/model", "y/model", "z/other")) == ["x/model", "y/model", "other"]
    assert names(compare=("a",), bits=(3,), affine=False, qjl=False) == ["TurboQuant 3-bit", "a"]


def test_only_a_group_size_that_was_given_is_handed_to_the_converter():
    """Otherwise the converter's own default is what is measured."""
    (plain,) = list_candidates(EvaluateOptions(bits=(3,), affine=False, qjl=False))
    assert plain.options == {"bits": 3}
    (given,) = list_candidates(EvaluateOptions(bits=(3,), group_size=64, affine=False, qjl=False))
    assert given.options == {"bits": 3, "group_size": 64}


def test_what_is_given_twice_is_done_once():
    options = EvaluateOptions(bits=(3, 3, 2), compare=("a", "a"))
    assert options.bits == (3, 2) and options.compare == ("a",)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"bits": (5,)}, "--bits 5 is not one of 2, 3, 4"),
        ({"group_size": 48}, "--group-size 48 is not one of 32, 64, 128"),
        ({"num_samples": 0}, "--num-samples 0 is not a positive number"),
        ({"seq_len": 2}, "--seq-len 2 is too short"),
        ({"cache_gb": -1.0}, "--cache-limit -1.0 is not a size"),
        ({"cache_gb": float("nan")}, "--cache-limit nan is not a size"),
        ({"cache_gb": float("inf")}, "--cache-limit inf is not a size"),
        ({"cache_gb": 1e300}, "--cache-limit 1e+300 is not a size"),
        ({"cache_dir": ""}, "--cache-dir is empty"),
        ({"compare": ("a",), "group_size": 64}, "--group-size has no effect without --bits"),
        ({"compare": ("a",), "variants": ("--use-qjl",)}, "--variant has no effect without --bits"),
        ({"variants": ("--attn-bits 4 --bits 3",)}, "--bits is set by evaluate itself"),
        ({"variants": ("--hf-path elsewhere",)}, "--hf-path is set by evaluate itself"),
        ({"variants": ("--mlx-path elsewhere",)}, "--mlx-path is set by evaluate itself"),
        ({"variants": ("",)}, "--variant is empty"),
        ({"variants": ("--attn-bits '4",)}, "cannot be read: No closing quotation"),
        ({"variants": ("--attn-bits 7",)}, "invalid choice: 7"),
        ({"variants": ("--no-such-thing",)}, "unrecognized arguments: --no-such-thing"),
        ({"variants": ("--dtype float16 --streaming",)}, "not supported together"),
        ({"variants": ("--target-bpw 3.7",)}, "--target-bpw takes the place of a width"),
        ({"bits": (3,), "variants": ("--target-bpw 3",)}, "variants run at each of --bits"),
    ],
)
def test_options_that_cannot_be_meant(given, message, capsys):
    with pytest.raises(OptionError) as caught:
        EvaluateOptions(**given)
    assert message in caught.value.message
    assert "\n" not in caught.value.message and not caught.value.message.endswith(".")
    assert capsys.readouterr() == ("", "")


def test_a_variant_holds_what_it_gives_and_no_defaults():
    assert parse_variant("--attn-bits 4 --rotation none") == {"attn_bits": 4, "rotation": "none"}
    assert parse_variant("-g 32 --use-qjl") == {"group_size": 32, "use_qjl": True}

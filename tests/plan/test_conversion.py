"""What --convert predicts is, to the byte, what turboquant-convert then writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from converting import Workshop
from turboquant_mlx.checkpoint.source import inspect_folder
from turboquant_mlx.convert.options import ConvertOptions
from turboquant_mlx.errors import OptionError, UnsupportedModelError
from turboquant_mlx.plan.conversion import convert_projection, parse_options
from turboquant_mlx.plan.headers import open_model


@pytest.fixture(scope="module")
def workshop(tmp_path_factory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("conversions"))


# --convert, and the same for turboquant-convert
DENSE = {
    "bits=2": ("--bits", "2"),
    "bits=3": ("--bits", "3"),
    "bits=4,codec=scalar": ("--bits", "4", "--codec", "scalar"),
    "bits=3,group=64,codec=scalar,extras": (
        *("--bits", "3", "--group-size", "64", "--codec", "scalar", "--quantize-extras"),
    ),
    "bits=2,extras,extras-bits=8,extras-group-size=32": (
        *("--bits", "2", "--quantize-extras", "--extras-bits", "8", "--extras-group-size", "32"),
    ),
    "attn-bits=4,mlp-bits=2,qjl": ("--attn-bits", "4", "--mlp-bits", "2", "--use-qjl"),
    "rotation=none,bits=4": ("--rotation", "none", "--bits", "4"),
    "dtype=float16": ("--dtype", "float16"),
}
EXPERTS = {
    "bits=3": ("--bits", "3"),
    "ternary": ("--ternary-experts",),
    "bits=2,protect=0": ("--bits", "2", "--protect-expert-layers", "0"),
    "ternary,protect=1,protect-bits=4,expert-down-bits=4": (
        *("--ternary-experts", "--protect-expert-layers", "1", "--protect-bits", "4"),
        *("--expert-down-bits", "4"),
    ),
    "bits=2,mlp-group-size=32,codec=scalar,extras": (
        *("--bits", "2", "--mlp-group-size", "32", "--codec", "scalar", "--quantize-extras"),
    ),
}


def predicted(source: Path, text: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    conversion = convert_projection(open_model(str(source)), parse_options(text), text)
    assert conversion.weight_bytes == sum(info.nbytes for info in conversion.tensors.values())
    return {name: (info.dtype, info.shape) for name, info in conversion.tensors.items()}


def written(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    tensors = inspect_folder(folder).tensors
    return {name: (info.dtype, tuple(info.shape)) for name, info in tensors.items()}


class TestExactness:
    @pytest.mark.parametrize("text", DENSE)
    @pytest.mark.parametrize("model_type", ["llama", "qwen3"])  # own head, tied head
    def test_dense(self, workshop, model_type, text):
        source = workshop.source(model_type)
        done = workshop.converted(source, *DENSE[text])
        assert predicted(source, text) == written(done.folder)

    @pytest.mark.parametrize("text", EXPERTS)
    @pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
    def test_experts(self, workshop, model_type, text):
        source = workshop.source(model_type)
        done = workshop.converted(source, *EXPERTS[text])
        assert predicted(source, text) == written(done.folder)

    @pytest.mark.parametrize("model_type", ["deepseek_v3", "gemma3", "granitemoe"])
    def test_stacked_split_and_dropped_tensors(self, workshop, model_type):
        source = workshop.source(model_type)
        done = workshop.converted(source, "--bits", "3")
        assert predicted(source, "bits=3") == written(done.folder)

    def test_shards_and_mxfp4_sources(self, workshop):
        source = workshop.source("gpt_oss", experts="mxfp4", shards=2)
        done = workshop.converted(source, "--bits", "4")
        assert predicted(source, "bits=4") == written(done.folder)

    @pytest.mark.model
    @pytest.mark.heavy
    @pytest.mark.parametrize("text", ["bits=2", "bits=3,extras", "bits=4,codec=scalar"])
    def test_the_real_smollm2(self, workshop, smollm2, text):
        flags = {
            "bits=2": ("--bits", "2"),
            "bits=3,extras": ("--bits", "3", "--quantize-extras"),
            "bits=4,codec=scalar": ("--bits", "4", "--codec", "scalar"),
        }
        done = workshop.converted(smollm2, *flags[text])
        assert predicted(smollm2, text) == written(done.folder)

    def test_a_target_of_bits_per_weight_is_a_bound(self, workshop):
        source = workshop.source("llama")
        text = "target-bpw=3.4,codec=scalar"
        conversion = convert_projection(open_model(str(source)), parse_options(text), text)
        assert not conversion.exact
        done = workshop.converted(source, "--target-bpw", "3.4", "--codec", "scalar", balanced=True)
        real = inspect_folder(done.folder).weight_bytes
        assert real <= conversion.weight_bytes <= 1.05 * real

    def test_nothing_is_left_behind(self, workshop, tmp_path, monkeypatch):
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        monkeypatch.setattr("tempfile.tempdir", None)
        predicted(workshop.source("llama"), "bits=3")
        assert list(tmp_path.iterdir()) == []


class TestOptions:
    def test_names_are_those_of_the_converter(self):
        assert parse_options("bits=2,attn-bits=4,use_qjl") == ConvertOptions(
            bits=2, attn_bits=4, use_qjl=True
        )

    def test_nothing_stands_for_the_defaults(self):
        assert parse_options("") == ConvertOptions()

    def test_short_names_and_switches(self):
        wanted = ConvertOptions(group_size=64, quantize_extras=True, balance=False)
        assert parse_options("g=64, extras, no-balance") == wanted
        assert parse_options("group=64,extras=yes,balance=off") == wanted

    def test_layers_are_joined_by_plus(self):
        assert parse_options("protect=0-2+5").protect_expert_layers == (0, 1, 2, 5)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("bits=3,bits=4", "bits is given twice"),
            ("group=64,g=32", "group-size is given twice"),
            ("bits=3,target-bpw=3", "bits and target-bpw exclude each other"),
            ("protect-bits=3", "--protect-bits has no effect without"),
            ("bits=3.0", "--bits 3.0 is not one of 2, 3, 4"),
            ("mlp-group-size=32.0", "--mlp-group-size 32.0 is not one of"),
            ("error-feedback,feedback-text=/nope", "no such text file: /nope"),
        ],
    )
    def test_what_the_converter_would_refuse(self, text, message):
        with pytest.raises(OptionError) as caught:
            parse_options(text)
        assert message in caught.value.message

    @pytest.mark.parametrize("text", ["bist=3", "bits", "bits=5", "bits=three", "extras=maybe"])
    def test_anything_else_is_an_option_error(self, text):
        with pytest.raises(OptionError):
            parse_options(text)

    def test_a_converted_model_is_refused(self, workshop):
        done = workshop.converted(workshop.source("llama"), "--bits", "3")
        with pytest.raises(UnsupportedModelError, match="already a TurboQuant model"):
            convert_projection(open_model(str(done.folder)), ConvertOptions(), "")

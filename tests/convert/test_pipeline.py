"""Whole conversions: what comes out stands for what went in."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import mlx.core as mx
import mlx_lm
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model as load_stock

import tiny
from converting import (
    Conversion,
    Workshop,
    arrays,
    config_of,
    contents,
    convert,
    manifest_of,
    modules_that_differ,
    packed_weight,
    stored,
    stored_error,
    write_model,
)
from distances import cosines
from turboquant_mlx.checkpoint.loader import load_model
from turboquant_mlx.checkpoint.source import inspect_folder
from turboquant_mlx.convert.pipeline import convert as convert_function
from turboquant_mlx.convert.source_model import READ_EMBEDDING_DIRECTLY

ROOT = Path(__file__).resolve().parents[2]
PREDECESSOR = ROOT / "tests" / "fixtures" / "predecessor"
IDS = mx.array([tiny.token_ids()])

# Relative error of a rotated Gaussian weight with searched scales, and a little more.
LARGEST_ERROR = {2: 0.36, 3: 0.20, 4: 0.11}
SMALLEST_ERROR = {2: 0.20, 3: 0.10, 4: 0.05}


def stock_parameters(source: Path) -> dict[str, mx.array]:
    """What stock mlx-lm reads from a source in the spelling of transformers 4."""
    model, _ = load_stock(source, lazy=True)
    return dict(tree_flatten(model.parameters()))


def assert_stands_for(done: Conversion, parameters: dict[str, mx.array], bits: int) -> None:
    """Every parameter is there: its values, or a code of the expected accuracy."""
    manifest = manifest_of(done.folder)
    tensors = arrays(done.folder)
    # the strict counterpart: nothing else is in the folder
    assert set(tensors) == {
        *manifest.tensors(),
        *(n for n in parameters if n.removesuffix(".weight") not in manifest.modules),
    }
    for name, value in parameters.items():
        if name.removesuffix(".weight") not in manifest.modules:
            assert tensors[name].dtype == value.dtype, name
            assert mx.array_equal(tensors[name], value), name
    for path, entry in manifest.modules.items():
        error = stored_error(packed_weight(done.folder, path), parameters[f"{path}.weight"])
        assert entry.bits == bits
        assert SMALLEST_ERROR[bits] < error < LARGEST_ERROR[bits], path


class TestRoundTrip:
    @pytest.mark.parametrize("model_type", tiny.MODEL_TYPES)
    def test_every_parameter_is_kept_or_coded(self, workshop: Workshop, model_type: str) -> None:
        source = workshop.source(model_type, transformers5=False)
        done = workshop.converted(source)
        assert_stands_for(done, stock_parameters(source), bits=3)

    @pytest.mark.parametrize("model_type", ["qwen2", "gpt_oss", "deepseek_v3"])
    def test_and_with_channels_balanced(self, workshop: Workshop, model_type: str) -> None:
        source = workshop.source(model_type, transformers5=False)
        done = workshop.converted(source, balanced=True)
        assert_stands_for(done, stock_parameters(source), bits=3)

    @pytest.mark.parametrize("bits", [2, 3, 4])
    def test_more_bits_are_closer(self, workshop: Workshop, bits: int) -> None:
        source = workshop.source("qwen3_moe", transformers5=False)
        done = workshop.converted(source, "--bits", str(bits))
        assert_stands_for(done, stock_parameters(source), bits)

    @pytest.mark.parametrize("experts", ["split", "mxfp4"])
    def test_experts_in_both_layouts_that_mlx_lm_reads(
        self, workshop: Workshop, experts: str
    ) -> None:
        source = workshop.source("gpt_oss", experts=experts, transformers5=False)
        done = workshop.converted(source)
        parameters = stock_parameters(source)
        if experts == "mxfp4":
            assert "note: the source is quantized (mxfp4); its weights are expanded first" in (
                done.notes
            )
            parameters = expanded(source)
        assert_stands_for(done, parameters, bits=3)
        assert len([path for path in manifest_of(done.folder).modules if ".experts." in path]) == 6

    def test_biases_and_a_tied_head(self, workshop: Workshop) -> None:
        done = workshop.converted(workshop.source("qwen2", transformers5=False))
        entries = manifest_of(done.folder).modules
        assert "lm_head" not in entries
        biased = {path.rpartition(".")[2] for path, entry in entries.items() if entry.bias}
        assert biased == {"q_proj", "k_proj", "v_proj"}
        assert stored(done.folder)["model.layers.0.self_attn.q_proj.bias"][0] == "BF16"

    def test_routers_stay_as_they_are(self, workshop: Workshop) -> None:
        routers = {
            "qwen3_moe": "model.layers.0.mlp.gate.weight",
            "mixtral": "model.layers.0.block_sparse_moe.gate.weight",
            "gpt_oss": "model.layers.0.mlp.router.weight",
            "granitemoe": "model.layers.0.block_sparse_moe.router.layer.weight",
            "deepseek_v2": "model.layers.1.mlp.gate.weight",
            "deepseek_v3": "model.layers.1.mlp.gate.weight",
        }
        assert set(routers) == set(tiny.MOE_TYPES)
        for model_type, name in routers.items():
            done = workshop.converted(workshop.source(model_type, transformers5=False))
            assert stored(done.folder)[name][0] == "BF16"

    def test_per_head_projections_of_latent_attention_stay_as_they_are(
        self, workshop: Workshop
    ) -> None:
        source = workshop.source("deepseek_v3", transformers5=False)
        done = workshop.converted(source, "--quantize-extras")
        tensors = stored(done.folder)
        for name in ("embed_q", "unembed_out"):
            assert tensors[f"model.layers.0.self_attn.{name}.weight"][0] == "BF16"
        row = done.out.partition("per-head projections of latent attention")[2].split()
        assert row[0] == "4"


class TestResult:
    @pytest.mark.parametrize("model_type", tiny.MODEL_TYPES)
    def test_is_a_folder_that_the_strict_loader_takes(
        self, workshop: Workshop, model_type: str
    ) -> None:
        source = workshop.source(model_type, transformers5=False)
        model, config = load_model(workshop.converted(source, "--bits", "4").folder)
        reference, _ = load_model(source)
        assert config["model_type"] == model_type
        assert cosines(model(IDS), reference(IDS)).mean() > 0.9

    @pytest.mark.parametrize("flags", [[], ["--use-qjl"], ["--quantize-extras", "--keep-mtp"]])
    def test_follows_the_schema(self, workshop: Workshop, moe: Path, flags: list[str]) -> None:
        schema = json.loads((ROOT / "docs" / "reference" / "format.schema.json").read_text())
        block = config_of(workshop.converted(moe, *flags).folder)["turboquant"]
        jsonschema.Draft202012Validator(schema).validate(block)

    def test_holds_everything_that_a_model_folder_needs(
        self, workshop: Workshop, llama: Path
    ) -> None:
        files = contents(workshop.converted(llama).folder)
        assert set(files) == {
            "README.md",
            "chat_template.jinja",
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "model.safetensors.index.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "turboquant_model.py",
        }
        for name in ("chat_template.jinja", "generation_config.json", "tokenizer.json"):
            assert files[name] == (llama / name).read_bytes()

    @pytest.mark.parametrize(
        ("dtype", "name"), [("float16", "F16"), ("bfloat16", "BF16"), ("float32", "F32")]
    )
    def test_what_is_kept_has_the_type_of_the_source(
        self, workshop: Workshop, dtype: str, name: str
    ) -> None:
        done = workshop.converted(workshop.source("qwen2", dtype=dtype))
        tensors = stored(done.folder)
        names = ["model.embed_tokens.weight", "model.norm.weight"]
        names += ["model.layers.0.self_attn.q_proj.bias"]
        assert {tensors[name][0] for name in names} == {name}

    def test_summary_counts_stored_bytes(self, workshop: Workshop, moe: Path) -> None:
        done = workshop.converted(moe, "--json", "--quantize-extras", "--use-qjl")
        report, tensors = json.loads(done.out), stored(done.folder)
        modules = manifest_of(done.folder).modules
        in_modules = sum(
            len(data)
            for name, (_, _, data) in tensors.items()
            if name.rpartition(".")[0] in modules and not name.endswith(".bias")
        )
        weights = sum(entry.num_weights for entry in modules.values())
        assert report["source_bytes"] == inspect_folder(moe).weight_bytes
        assert report["stored_bytes"] == sum(len(data) for *_, data in tensors.values())
        assert report["quantized_bytes"] == in_modules == sum(r["bytes"] for r in report["by_kind"])
        assert report["quantized_weights"] == weights
        assert report["bits_per_weight"] == pytest.approx(in_modules * 8 / weights)
        kept = sum(row["bytes"] for row in report["kept"])
        assert kept + in_modules == report["stored_bytes"]

    def test_shards_are_as_large_as_asked(
        self, workshop: Workshop, llama: Path, tmp_path: Path
    ) -> None:
        convert_function(llama, tmp_path / "out", balance=False, max_shard_bytes=40_000)
        folder = inspect_folder(tmp_path / "out")
        assert len(folder.weight_files) > 3
        assert folder.index is not None
        tensors = [folder.headers[file].tensors.values() for file in folder.weight_files]
        sizes = [sum(info.nbytes for info in infos) for infos in tensors]
        # the embedding alone is larger than that, and has a file to itself
        assert sorted(sizes)[-1] == tiny.VOCAB_SIZE * 128 * 2
        assert sorted(sizes)[-2] <= 40_000
        assert modules_that_differ(tmp_path / "out", workshop.converted(llama).folder) == set()
        whole, _ = load_model(workshop.converted(llama).folder)
        parts, _ = load_model(tmp_path / "out")
        assert mx.array_equal(whole(IDS), parts(IDS))

    def test_the_python_function_does_what_the_command_does(
        self, workshop: Workshop, llama: Path, tmp_path: Path
    ) -> None:
        said: list[tuple[str, str]] = []
        report = convert_function(
            llama,
            tmp_path / "out",
            bits=4,
            balance=False,
            expert_down_bits=2,
            say=lambda kind, text: said.append((kind, text)),
        )
        command = workshop.converted(llama, "--bits", "4", "--expert-down-bits", "2")
        assert modules_that_differ(tmp_path / "out", command.folder) == set()
        assert [f"{kind}: {text}" for kind, text in said] == command.messages
        assert [text for _, text in said] == [*report.notices, *report.warnings]

    def test_a_folder_name_full_of_pattern_characters(self, llama: Path, tmp_path: Path) -> None:
        source, target = tmp_path / "so[u]rce *?", tmp_path / "ta[r]get *?"
        shutil.copytree(llama, source)
        assert convert(source, target).code == 0
        model, _ = load_model(target)
        assert model(IDS).shape[-1] == tiny.VOCAB_SIZE


@pytest.mark.parametrize("value", [0, "", "x.py"])
def test_a_key_of_our_format_is_not_taken_from_the_source(llama, tmp_path, value):
    source = tmp_path / "source"
    shutil.copytree(llama, source)
    config = config_of(source) | {"source_model_file": value}
    (source / "config.json").write_text(json.dumps(config))
    done = convert(source, tmp_path / "out", "--no-balance")
    assert done.code == 0, done.err
    assert "source_model_file" not in config_of(done.folder)
    load_model(done.folder, lazy=True)


class TestAwkwardWidths:
    def test_a_smaller_group_is_taken_where_the_requested_one_does_not_divide(
        self, workshop: Workshop
    ) -> None:
        source = workshop.source("llama", hidden_size=144, head_dim=72, transformers5=False)
        done = workshop.converted(source, "--codec", "scalar")
        groups = {e.width: e.group_size for e in manifest_of(done.folder).modules.values()}
        assert groups == {144: 16, 192: 32}
        assert (
            "note: 13 modules use group size 16: 32 does not divide the width 144" in done.messages
        )
        assert_stands_for(done, stock_parameters(source), bits=3)

    def test_width_576_with_groups_of_128(self, workshop: Workshop) -> None:
        source = workshop.source(
            "llama", hidden_size=576, num_attention_heads=9, num_hidden_layers=1
        )
        done = workshop.converted(source, "--group-size", "128")
        groups = {e.width: e.group_size for e in manifest_of(done.folder).modules.values()}
        assert groups == {576: 64, 192: 64}

    def test_what_no_group_divides_is_left_and_listed(self, workshop: Workshop) -> None:
        source = workshop.source("llama", intermediate_size=100)
        done = workshop.converted(source)
        assert not any("down_proj" in path for path in manifest_of(done.folder).modules)
        row = done.out.partition("input width that no group size divides")[2].split()[:2]
        assert row == ["2", "25,600"]
        assert "no group size divides the width 100" in done.err
        load_model(done.folder)

    def test_a_conversion_that_quantizes_nothing_fails(self, tmp_path: Path) -> None:
        source = tmp_path / "source"
        tiny.build_source(source, "llama", hidden_size=100, intermediate_size=100, head_dim=50)
        done = convert(source, tmp_path / "out", "--quantize-extras")
        assert done.code == 2
        assert "can be quantized with these options" in done.messages[-2]
        assert "input width that no group size divides" in done.messages[-2]
        assert [path.name for path in tmp_path.iterdir()] == ["source"]


# --- sources that are quantized already ---------------------------------------------------------


def expanded(source: Path) -> dict[str, mx.array]:
    """A quantized source's parameters after stock mlx-lm has expanded them."""
    model, _ = load_stock(source, lazy=True)
    return dict(tree_flatten(mlx_lm.utils.dequantize_model(model).parameters()))


def float8_blocks(weight: mx.array, block: int = 128) -> tuple[mx.array, mx.array]:
    """DeepSeek's layout: 8-bit floats, and one float32 scale for each square block."""
    rows, width = weight.shape
    blocks = weight.reshape(rows // block, block, width // block, block).astype(mx.float32)
    scale = mx.abs(blocks).max(axis=(1, 3)) / 448
    codes = mx.to_fp8(blocks / scale[:, None, :, None])
    return codes.reshape(rows, width), scale


# What whole blocks of 128 by 128 make up.
FLOAT8_SHAPES = [(128, 128)]


class TestQuantizedSources:
    @pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
    def test_affine_of_mlx_is_expanded(
        self, workshop: Workshop, tmp_path: Path, model_type: str
    ) -> None:
        plain = workshop.source(model_type, transformers5=False)
        source = tmp_path / "affine"
        mlx_lm.convert(str(plain), mlx_path=str(source), quantize=True, q_bits=4)
        done = workshop.converted(source)
        assert "note: the source is quantized (affine); its weights are expanded first" in (
            done.notes
        )
        assert_stands_for(done, expanded(source), bits=3)
        assert "quantization" not in config_of(done.folder)
        load_model(done.folder)

    def test_float8_is_expanded_where_the_model_type_can(
        self, workshop: Workshop, tmp_path: Path
    ) -> None:
        def to_float8(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
            result = dict(tensors)
            for name, value in tensors.items():
                if name.endswith("_proj.weight") and value.shape in FLOAT8_SHAPES:
                    result[name], result[f"{name}_scale_inv"] = float8_blocks(value)
            assert len(result) > len(tensors)
            return result

        source = tmp_path / "source"
        config = tiny.text_config("deepseek_v3", hidden_size=128)
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        write_model(source, config, change=to_float8)
        done = workshop.converted(source)
        assert "note: the source is quantized (fp8); its weights are expanded first" in done.notes
        assert_stands_for(done, stock_parameters(source), bits=3)

    def test_awq_is_expanded(self, workshop: Workshop, tmp_path: Path) -> None:
        source = tmp_path / "source"
        config = tiny.text_config("llama", dtype="float16")
        config["quantization_config"] = {
            "quant_method": "awq",
            "version": "gemm",
            "bits": 4,
            "group_size": 64,
            "zero_point": True,
        }
        write_model(source, config, change=to_awq, dtype=mx.float16)
        done = workshop.converted(source)
        assert "note: the source is quantized (awq); its weights are expanded first" in done.notes
        assert_stands_for(done, expanded(source), bits=3)

    def test_a_description_in_a_file_of_its_own_is_seen(
        self, workshop: Workshop, tmp_path: Path
    ) -> None:
        codes: list[mx.array] = []

        def to_nvfp4(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
            codes.extend(mx.quantize(tensors[NAME], group_size=16, bits=4, mode="nvfp4"))
            return tensors | {NAME: codes[0], NAME.replace("weight", "scales"): codes[1]}

        source = tmp_path / "source"
        model = write_model(source, tiny.text_config("llama"), change=to_nvfp4)
        description = {"quantization": {"quant_algo": "NVFP4", "group_size": 16}}
        (source / "hf_quant_config.json").write_text(json.dumps(description))
        done = workshop.converted(source)
        assert "note: the source is quantized (modelopt)" in done.err
        values = mx.dequantize(*codes, group_size=16, bits=4, mode="nvfp4")
        parameters = dict(tree_flatten(model.parameters())) | {NAME: values}
        assert_stands_for(done, parameters, bits=3)

    @pytest.mark.parametrize("kind", ["bitsandbytes", "fp8", "int8", "undescribed"])
    def test_what_mlx_lm_cannot_expand_is_refused(self, tmp_path: Path, kind: str) -> None:
        source = tmp_path / "source"
        config = tiny.text_config("llama")
        if (block := UNSUPPORTED[kind][0]) is not None:
            config["quantization_config"] = block
        write_model(source, config, change=UNSUPPORTED[kind][1])
        done = convert(source, tmp_path / "out")
        assert done.code == 2
        assert done.messages[-2].startswith(f"error: {source}")
        assert done.messages[-1].startswith("hint: convert the 16-bit model")
        assert [path.name for path in tmp_path.iterdir()] == ["source"]

    @pytest.mark.parametrize("kind", ["ours", "predecessor"])
    def test_a_converted_model_is_refused(
        self, workshop: Workshop, llama: Path, tmp_path: Path, kind: str
    ) -> None:
        ours, theirs = workshop.converted(llama).folder, PREDECESSOR / "dense-3bit-g64"
        done = convert(ours if kind == "ours" else theirs, tmp_path / "out")
        assert done.code == 2
        assert done.messages[-2].endswith(" is already a TurboQuant model")
        assert done.messages[-1] == "hint: convert the 16-bit model that it was made from"


def to_awq(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    """AutoAWQ's layout: qweight [I, O/8], qzeros [I/g, O/8], scales [I/g, O]."""
    order = mx.array([0, 2, 4, 6, 1, 3, 5, 7])
    powers = mx.array([1 << (4 * i) for i in range(8)], mx.uint32)

    def pack(values: mx.array) -> mx.array:
        grouped = values.reshape(values.shape[0], -1, 8)[..., order].astype(mx.uint32)
        return (grouped * powers).sum(-1).astype(mx.uint32).view(mx.int32)

    result = {}
    for name, value in tensors.items():
        if not name.endswith("_proj.weight"):
            result[name] = value
            continue
        path = name.removesuffix(".weight")
        columns = value.astype(mx.float32).T.reshape(-1, 64, value.shape[0])
        low, high = columns.min(1, keepdims=True), columns.max(1, keepdims=True)
        scale = (high - low) / 15
        zero = mx.round(-low / scale)
        codes = mx.clip(mx.round(columns / scale) + zero, 0, 15)
        result[f"{path}.qweight"] = pack(codes.reshape(value.shape[::-1]))
        result[f"{path}.qzeros"] = pack(zero[:, 0])
        result[f"{path}.scales"] = scale[:, 0].astype(mx.float16)
    return result


Change = Callable[[dict[str, mx.array]], dict[str, mx.array]]
NAME = "model.layers.0.mlp.up_proj.weight"


def with_integers(suffix: str | None) -> Change:
    """One weight as 8-bit integers, its scale under a name that mlx-lm has no use for."""

    def change(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
        codes = mx.zeros(tensors[NAME].shape, mx.int8)
        extra = {} if suffix is None else {NAME + suffix: mx.ones(codes.shape[0])}
        return tensors | {NAME: codes} | extra

    return change


UNSUPPORTED: dict[str, tuple[dict[str, Any] | None, Change]] = {
    "bitsandbytes": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        lambda tensors: (
            tensors | {NAME: mx.zeros((8192, 1), mx.uint8), f"{NAME}.absmax": mx.zeros(128)}
        ),
    ),
    "fp8": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        with_integers("_scale_inv"),
    ),
    "int8": (
        {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
                }
            },
        },
        with_integers("_scale"),
    ),
    "undescribed": (None, with_integers(None)),
}


# --- parts that a text model does not take over -------------------------------------------------


class TestDroppedParts:
    @pytest.fixture
    def seeing(self, workshop: Workshop) -> Conversion:
        return workshop.converted(workshop.source("gemma3"))

    def test_a_model_that_sees_keeps_its_text_part(
        self, workshop: Workshop, seeing: Conversion
    ) -> None:
        assert seeing.notes[-2:] == [
            "note: the vision part is dropped, 7 tensors of 46.0 kB: only text remains",
            "note: the projector part is dropped, 1 tensor of 8.2 kB: only text remains",
        ]
        assert not any("vision" in name for name in stored(seeing.folder))
        assert "vision_config" not in config_of(seeing.folder)
        model, _ = load_model(seeing.folder)
        reference, _ = load_model(workshop.source("gemma3_text"))
        assert cosines(model(IDS), reference(IDS)).mean() > 0.8

    def test_the_summary_lists_what_was_dropped(self, seeing: Conversion) -> None:
        rows = seeing.out.partition("not taken over")[2].splitlines()[1:3]
        assert [row.split() for row in rows] == [
            ["vision", "7", "46.0", "kB"],
            ["projector", "1", "8.2", "kB"],
        ]

    def test_further_layers_are_a_head_too(self, workshop: Workshop, tmp_path: Path) -> None:
        # glm4_moe calls its head layer 2, the one behind the last
        source, config = tmp_path / "source", tiny.text_config("deepseek_v3")
        head = {"model.layers.2.eh_proj.weight": mx.ones((128, 256), mx.bfloat16)}
        config |= {"model_type": "glm4_moe", "head_dim": 64, "num_nextn_predict_layers": 1}
        config |= {"use_qk_norm": False, "partial_rotary_factor": 1.0, "rope_scaling": None}
        write_model(source, config, extra=head)
        dropped = workshop.converted(source)
        assert any("multi-token-prediction head is dropped, 1 tensor" in n for n in dropped.notes)
        kept = mx.load(str(workshop.converted(source, "--keep-mtp").folder / "mtp.safetensors"))
        assert mx.array_equal(kept["model.layers.2.eh_proj.weight"], head.popitem()[1])


class TestTiedEmbeddings:
    CONFIG = tiny.text_config("llama") | {"model_type": "seed_oss", "tie_word_embeddings": True}

    def test_an_embedding_that_is_read_as_an_array_is_never_affine(
        self, workshop: Workshop, tmp_path: Path
    ) -> None:
        source = tmp_path / "source"
        stock = write_model(source, self.CONFIG)
        done = workshop.converted(source, "--bits", "4", "--quantize-extras")
        assert any("leaves model.embed_tokens as it is" in note for note in done.notes)
        assert stored(done.folder)["model.embed_tokens.weight"][0] == "BF16"
        model, _ = load_model(done.folder)
        assert cosines(model(IDS), stock(IDS)).mean() > 0.9

    def test_with_a_head_of_its_own_it_may_be(self, workshop: Workshop, tmp_path: Path) -> None:
        source = tmp_path / "source"
        write_model(source, self.CONFIG | {"tie_word_embeddings": False})
        done = workshop.converted(source, "--quantize-extras")
        assert manifest_of(done.folder).modules["model.embed_tokens"].kind == "affine_embedding"

    def test_the_list_of_such_classes_is_complete(self) -> None:
        models = Path(mlx_lm.__file__).parent / "models"
        found = {
            file.stem for file in models.glob("*.py") if "@ self.model.embed" in file.read_text()
        }
        assert found == READ_EMBEDDING_DIRECTLY

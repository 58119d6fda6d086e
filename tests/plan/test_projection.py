"""The sum, the ceiling and the verdict, on machines that are made up."""

from __future__ import annotations

from dataclasses import replace

import pytest

import tiny
from turboquant_mlx.checkpoint.headers import TensorInfo, tensor_bytes
from turboquant_mlx.errors import OptionError
from turboquant_mlx.kvcache.spec import KVSpec
from turboquant_mlx.plan.headers import ModelFiles, open_model
from turboquant_mlx.plan.machine import GB, GIB, MIB, Machine, metal_working_set, with_overrides
from turboquant_mlx.plan.projection import CHUNKS, Request, plan_model
from turboquant_mlx.plan.weights import TEXT_ONLY

CONFIG = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
MOE = CONFIG | {
    "model_type": "qwen3_moe",
    "num_experts": 64,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1024,
    "head_dim": 128,
}


def files(config=CONFIG, **shapes) -> ModelFiles:
    """A model of tensors that exist only as headers."""
    tensors, end = {}, 0
    for name, (dtype, shape) in shapes.items():
        size = tensor_bytes(dtype, shape)
        tensors[name.replace("__", ".")] = TensorInfo(dtype, shape, end, end + size)
        end += size
    home = dict.fromkeys(tensors, "model.safetensors")
    return ModelFiles("made-up", "local", dict(config), tensors, home, {"model.safetensors": end})


def dense(gigabytes: float) -> ModelFiles:
    rows = int(gigabytes * GB / 2 / 4096)
    return files(model__layers__0__mlp__up_proj__weight=("BF16", (rows, 4096)))


def mixture(expert_gigabytes: float) -> ModelFiles:
    rows = int(expert_gigabytes * GB / 2 / 64 / 4096)
    return files(
        MOE,
        model__layers__0__self_attn__q_proj__weight=("BF16", (4096, 4096)),
        model__layers__0__mlp__switch_mlp__up_proj__weight=("BF16", (64, rows, 4096)),
    )


def mac(gibibytes: int) -> Machine:
    ram = gibibytes * GIB
    return Machine("metal", "", ram, metal_working_set(ram), "a test")


class TestTheSum:
    def test_peak_is_the_sum_of_its_terms(self):
        projection = plan_model(dense(4), mac(64), Request()).projection
        assert projection.peak == sum(term.bytes for term in projection.terms.values())
        assert all(term.basis for term in projection.terms.values())
        assert projection.headroom == projection.ceiling.bytes - projection.peak

    def test_the_cache_is_that_of_the_geometry(self):
        projection = plan_model(dense(4), mac(64), Request(context=32768)).projection
        assert projection.kv.bytes == 32 * 8 * 256 * 2 * 32768
        assert projection.kv_per_token == 32 * 8 * 256 * 2

    def test_a_packed_cache_takes_less(self):
        full = plan_model(dense(4), mac(64), Request()).projection
        packed = plan_model(dense(4), mac(64), Request(kv=KVSpec(4, 4))).projection
        assert packed.kv.bytes < 0.3 * full.kv.bytes
        assert packed.kv_note == "32 full; 32 packed as K4/V4"

    def test_a_larger_chunk_takes_more_workspace(self):
        sizes = [
            plan_model(dense(4), mac(64), Request(prefill_step_size=n)).projection.workspace.bytes
            for n in sorted(CHUNKS)
        ]
        assert sizes == sorted(sizes)

    def test_what_is_unknown_is_not_zero(self):
        config = CONFIG | {"model_type": "something_new"}
        plan = plan_model(replace(dense(4), config=config), mac(64), Request())
        assert plan.projection.kv.bytes is None
        assert plan.projection.peak is None
        assert plan.verdict.mode == "unknown"
        assert not plan.verdict.runnable
        assert plan.warnings == (
            "the key-value cache is unknown: no rule for the caches of model type 'something_new'",
        )

    def test_fp8_is_expanded_at_load(self):
        plan = plan_model(
            files(model__layers__0__mlp__up_proj__weight=("F8_E4M3", (4096, 4096))),
            mac(64),
            Request(),
        )
        assert plan.weights.total == 4096 * 4096
        assert plan.weights.loaded == 2 * 4096 * 4096

    def test_ngram_tables_can_stay_on_disk(self):
        model = files(
            model__layers__0__mlp__up_proj__weight=("BF16", (4096, 4096)),
            model__ngram_embeddings__weight=("BF16", (100_000, 512)),
        )
        kept = plan_model(model, mac(64), Request()).projection.weights.bytes
        served = plan_model(model, mac(64), Request(ngram_offload=True)).projection.weights.bytes
        assert kept - served == 100_000 * 512 * 2

    @pytest.mark.parametrize(
        "values",
        [
            {"context": 0},
            {"context": "8192"},
            {"context": None},
            {"context": True},
            {"prefill_step_size": -1},
            {"prefill_step_size": 512.5},
            {"kv": 4},
            {"ngram_offload": "no"},
        ],
    )
    def test_values_and_their_types_are_checked(self, values):
        with pytest.raises(OptionError):
            Request(**values)


class TestTheChunk:
    def test_is_the_largest_that_is_safe(self):
        roomy = plan_model(dense(4), mac(64), Request()).projection
        assert roomy.step == 2048
        tight = plan_model(dense(5.4), mac(16), Request()).projection
        assert tight.step < 2048
        assert tight.peak <= 0.95 * mac(16).ceiling_bytes

    def test_a_smaller_one_is_a_warning_that_says_where_to_set_it(self):
        plan = plan_model(dense(5.4), mac(16), Request())
        step = plan.projection.step
        assert any(f"prefill_step_size={step}" in text for text in plan.warnings)
        assert plan.verdict.flags == ("--prefill-step-size", str(step))

    def test_it_is_recommended_where_the_usual_one_fits_without_a_margin(self):
        usual = plan_model(dense(4), mac(64), Request(prefill_step_size=2048)).projection
        room = usual.peak / 0.97 / GB
        tight = plan_model(dense(4), with_overrides(None, None, room), Request())
        [text] = [text for text in tight.warnings if "chunks of" in text]
        assert "are recommended" in text
        narrow = plan_model(dense(4), with_overrides(None, None, usual.peak * 0.97 / GB), Request())
        [text] = [text for text in narrow.warnings if "chunks of" in text]
        assert "only if" in text

    def test_none_is_named_where_none_makes_it_fit(self):
        plan = plan_model(dense(40), mac(16), Request())
        assert not any("chunks of" in text for text in plan.warnings)
        assert plan.verdict.flags == ()

    def test_a_given_one_is_kept(self):
        request = Request(prefill_step_size=384)
        assert plan_model(dense(4), mac(64), request).projection.step == 384


class TestTheVerdict:
    def test_resident(self):
        verdict = plan_model(dense(4), mac(64), Request()).verdict
        assert (verdict.mode, verdict.runnable, verdict.needs_wired_bump) == (
            "resident",
            True,
            False,
        )

    def test_no_fit(self):
        assert plan_model(dense(40), mac(16), Request()).verdict.mode == "no-fit"

    def test_a_raised_wired_limit_comes_with_the_command(self):
        verdict = plan_model(dense(9.5), mac(16), Request()).verdict
        assert verdict.mode == "resident"
        assert verdict.needs_wired_bump
        [command] = verdict.commands
        words, _, limit = command.rpartition("=")
        assert words == "sudo sysctl iogpu.wired_limit_mb"
        peak = plan_model(dense(9.5), mac(16), Request()).projection.peak
        assert peak <= int(limit) * MIB <= 16 * GIB

    def test_a_source_that_is_too_large_is_referred_to_its_conversion(self):
        plan = plan_model(mixture(60), mac(32), Request())
        assert plan.verdict.mode == "no-fit"
        assert "--convert" in plan.verdict.reason

    def test_streaming_says_how_much_stays_and_where_the_cliff_is(self, monkeypatch):
        from turboquant_mlx.plan import projection

        plan = plan_model(mixture(60), mac(32), Request())
        converted = replace(plan.weights, quantization="turboquant")
        verdict = projection.judge(converted, mac(32), plan.projection)
        assert verdict.mode == "streaming"
        assert f"below {plan.weights.token_experts / GB:.2f} GB" in verdict.reason

    def test_streaming_is_not_in_this_version_and_no_flag_is_made_up(self):
        from turboquant_mlx.plan import projection

        plan = plan_model(mixture(60), mac(32), Request())
        converted = replace(plan.weights, quantization="turboquant")
        verdict = projection.judge(converted, mac(32), plan.projection)
        assert "this version cannot" in verdict.reason
        assert not verdict.runnable
        assert verdict.flags == ()

    def test_every_flag_is_an_option_of_the_command_that_generates(self):
        from turboquant_mlx.generate.parser import build_parser

        known = {text for action in build_parser()._actions for text in action.option_strings}
        kv = KVSpec(8, 3, key_scheme="uniform", group_size=32, min_tokens=16, start=5)
        flags = plan_model(dense(4), mac(64), Request(kv=kv, ngram_offload=True)).verdict.flags
        words = [word for word in flags if word.startswith("--")]
        assert len(words) >= 5
        assert set(words) <= known

    @pytest.mark.parametrize(
        ("kv", "said", "words"),
        [
            (KVSpec(1, 1), None, "--kv-bits 1"),
            (KVSpec(1, 2), "1.5", "--kv-bits 1.5"),
            (KVSpec(3, 4), None, "--kv-bits 3.5"),
            (KVSpec(5, 4), "balanced", "--kv-bits balanced"),
            (KVSpec(5, 4), None, "--kv-k-bits 5 --kv-v-bits 4"),
            (KVSpec(8, 3), "4", "--kv-k-bits 8 --kv-v-bits 3"),
            (
                KVSpec(3, 4, "uniform", "uniform", min_tokens=0),
                None,
                "--kv-k-bits 3 --kv-v-bits 4 --kv-key-scheme uniform --kv-value-scheme uniform",
            ),
            (
                KVSpec(4, 4, group_size=32, min_tokens=0, start=100),
                None,
                "--kv-bits 4 --kv-group-size 32 --kv-min-tokens 0 --quantized-kv-start 100",
            ),
        ],
    )
    def test_the_flags_ask_the_command_for_this_cache(self, kv, said, words):
        from turboquant_mlx.generate.parser import build_parser
        from turboquant_mlx.kvcache.options import kv_options
        from turboquant_mlx.kvcache.spec import resolve

        flags = plan_model(dense(4), mac(64), Request(kv=kv, kv_bits=said)).verdict.flags
        assert flags == tuple(words.split())
        args = build_parser().parse_args(["--model", "m", "--prompt", "p", *flags])
        assert resolve(kv_options(args), {}) == kv

    @pytest.mark.parametrize("kv", [KVSpec(8, 1), KVSpec(4, 4, protect_first=1)])
    def test_a_packing_that_only_python_can_ask_for_is_said(self, kv):
        plan = plan_model(dense(4), mac(64), Request(kv=kv))
        assert plan.verdict.flags == ()
        assert any("no options of the commands" in text for text in plan.warnings)

    def test_below_the_experts_of_one_token_streaming_is_no_help(self):
        from turboquant_mlx.plan import projection

        plan = plan_model(mixture(400), mac(16), Request())
        converted = replace(plan.weights, quantization="turboquant")
        verdict = projection.judge(converted, mac(16), plan.projection)
        assert verdict.mode == "no-fit"
        assert "one token uses" in verdict.reason

    def test_a_token_uses_its_share_of_the_experts(self):
        weights = plan_model(mixture(64), mac(32), Request()).weights
        assert weights.token_experts == weights.experts * 4 // 64
        assert weights.resident == weights.loaded - weights.experts

    def test_memory_that_nobody_knows_is_unknown(self):
        assert plan_model(dense(4), Machine("cpu"), Request()).verdict.mode == "unknown"


class TestMachines:
    def test_ram_is_counted_as_it_is_sold(self):
        machine = with_overrides(None, 16, None)
        assert machine.ram_bytes == 16 * 2**30
        assert machine.device_bytes == machine.ram_bytes * 2 // 3
        assert machine.assumed

    def test_a_working_set_is_counted_in_decimal_units(self):
        machine = with_overrides(None, None, 12.5)
        assert machine.device_bytes == 12_500_000_000
        assert machine.ram_bytes is None
        assert machine.raised_ceiling_bytes is None

    def test_large_macs_give_three_quarters(self):
        assert metal_working_set(64 * GIB) == 48 * GIB

    def test_a_gpu_keeps_some_of_its_memory_for_the_driver(self):
        machine = Machine("cuda", "some GPU", 64 * GIB, 24 * GIB, "memory of the GPU")
        assert machine.ceiling_bytes == 24 * GIB - 600 * MIB

    def test_a_cpu_takes_main_memory_and_expands_weights(self):
        machine = Machine("cpu", "", 64 * GIB)
        projection = plan_model(dense(4), machine, Request()).projection
        assert projection.expanded.bytes == pytest.approx(8 * GB, rel=0.01)
        small = plan_model(dense(4), Machine("cpu", "", 12 * GIB), Request()).projection
        assert small.expanded.bytes == 0
        assert "decoded on each call" in small.expanded.basis


class TestTowers:
    """Vision-language folders: mlx-lm loads their text part, mlx-vlm the whole."""

    @pytest.fixture
    def folder(self, tmp_path):
        tiny.build_source(tmp_path / "gemma3", "gemma3")
        return tmp_path / "gemma3"

    def test_what_mlx_lm_leaves_out_is_not_counted(self, folder):
        from mlx.utils import tree_flatten
        from mlx_lm.utils import load_model

        found = plan_model(open_model(str(folder)), mac(16), Request())
        model, _ = load_model(folder, lazy=True)
        held = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
        assert found.weights.loaded == found.projection.weights.bytes == held
        assert found.weights.senses == found.weights.total - held > 0
        assert any("mlx-vlm" in text for text in found.warnings)

    def test_types_that_only_mlx_vlm_loads_are_counted_whole(self, folder):
        model = open_model(str(folder))
        model = replace(model, config=model.config | {"model_type": "aya_vision"})
        found = plan_model(model, mac(16), Request())
        assert found.weights.loaded == found.weights.total
        assert any("not counted" in text for text in found.warnings)

    @pytest.mark.parametrize("model_type", sorted(TEXT_ONLY))
    def test_the_installed_mlx_lm_loads_these_types(self, model_type):
        import importlib.util

        from mlx_lm.utils import MODEL_REMAPPING

        name = f"mlx_lm.models.{MODEL_REMAPPING.get(model_type, model_type)}"
        assert importlib.util.find_spec(name) is not None

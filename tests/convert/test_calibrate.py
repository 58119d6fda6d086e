"""The pass that measures channels: what it adds up, what it holds in memory, how it fails."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import llama as llama_module
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.utils import load_model as load_stock

from converting import Workshop, arrays, convert, manifest_of, modules_that_differ, stored
from turboquant_mlx.checkpoint.loader import load_tokenizer
from turboquant_mlx.convert.balance import load_text
from turboquant_mlx.convert.calibrate import (
    PIECE_TOKENS,
    PIECES,
    column_energy,
    measure_channels,
    text_tokens,
)
from turboquant_mlx.convert.pipeline import convert as convert_function
from turboquant_mlx.kernels import attention_hook
from turboquant_mlx.kernels.dispatch import force_backend

TEXT = "All happy codes are alike; every unhappy code is unhappy in its own way. " * 99


class Letters:
    """A tokenizer of one token per character."""

    def __init__(self, begin: int | None = None):
        self.bos_token_id = begin

    def encode(self, text: str, add_special_tokens: bool = True, **_: Any) -> list[int]:
        lead = [self.bos_token_id] if self.bos_token_id is not None and add_special_tokens else []
        return lead + [ord(c) % 50 for c in text]


def measured(build: Callable[[], nn.Module], *groups: list[str], text: str = TEXT) -> Any:
    """The statistics of a model for these groups, the first of each its leader."""
    return measure_channels(build, {group[0]: group for group in groups}, Letters(), text)


# --- small models of our own -----------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int = 32):
        super().__init__()
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.gate = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return x + self.down(nn.silu(self.gate(x)) * self.up(x))


class Toy(nn.Module):
    """Embedding, blocks that may be called more than once, head."""

    def __init__(self, layers: int = 3, loops: int = 1, block: Callable[[], nn.Module] = Block):
        super().__init__()
        self.loops = loops
        self.embed = nn.Embedding(50, 32)
        self.layers = [block() for _ in range(layers)]
        self.lm_head = nn.Linear(32, 50, bias=False)

    def __call__(self, ids: mx.array) -> mx.array:
        x = self.embed(ids)
        for _ in range(self.loops):
            for layer in self.layers:
                x = layer(x)
        return self.lm_head(x)


def make(kind: Callable[[], nn.Module], **changes: mx.array) -> nn.Module:
    """A model that is the same each time, its weights lazy."""
    model = kind()
    names = [name for name, _ in tree_flatten(model.parameters())]
    shapes = dict(tree_flatten(model.parameters()))
    weights = {
        name: mx.random.normal(shapes[name].shape, key=mx.random.key(i)) * 0.1
        for i, name in enumerate(names)
    }
    model.update(tree_unflatten(list((weights | changes).items())))
    return model


def squares(x: mx.array) -> np.ndarray:
    return np.square(np.array(x, dtype=np.float64)).reshape(-1, x.shape[-1]).sum(axis=0)


class TestStatistics:
    def test_are_sums_of_squares_of_the_very_inputs(self) -> None:
        build = partial(make, Toy)
        found = measured(build, ["layers.1.up", "layers.1.gate"], ["layers.1.down"], ["lm_head"])
        model: Any = build()
        x = model.embed(mx.array(text_tokens(Letters(), TEXT, None)))
        x = model.layers[0](x)
        expected = {"layers.1.up": squares(x)}
        block = model.layers[1]
        expected["layers.1.down"] = squares(nn.silu(block.gate(x)) * block.up(x))
        expected["lm_head"] = squares(model.layers[2](block(x)))
        assert found.channels.keys() == expected.keys()
        for leader, energy in expected.items():
            assert np.allclose(found.channels[leader].input_energy, energy, rtol=1e-4), leader
        assert not found.warnings
        assert not found.notices

    def test_weights_of_all_members_count(self) -> None:
        build = partial(make, Toy)
        found = measured(build, ["layers.0.up", "layers.0.gate"], ["lm_head"])
        model: Any = build()
        block = model.layers[0]
        both = squares(block.up.weight) + squares(block.gate.weight)
        assert np.allclose(found.channels["layers.0.up"].weight_energy, both)
        assert np.allclose(found.channels["lm_head"].weight_energy, squares(model.lm_head.weight))

    @pytest.mark.parametrize("shape", [(7, 32), (3, 5, 32)])
    @pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
    def test_columns_are_added_up_block_by_block(
        self, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], dtype: mx.Dtype
    ) -> None:
        monkeypatch.setattr("turboquant_mlx.convert.calibrate.BLOCK_BYTES", 4 * 32 * 2)
        weight = mx.random.normal(shape).astype(dtype)
        assert np.allclose(column_energy(weight), squares(weight.astype(mx.float32)))

    @pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "qwen3_moe", "deepseek_v3"])
    def test_of_real_model_code_reach_every_group(
        self, workshop: Workshop, model_type: str
    ) -> None:
        source = workshop.source(model_type, transformers5=False)
        groups = manifest_of(workshop.converted(source).folder).groups()
        tokenizer = load_tokenizer(source, {})
        found = measure_channels(
            lambda: load_stock(source, lazy=True)[0], groups, tokenizer, load_text()
        )
        assert found.channels.keys() == groups.keys()
        assert not found.warnings

    def test_are_the_same_on_every_back_end(self) -> None:
        groups = ["layers.0.up", "layers.0.gate"], ["layers.2.down"], ["lm_head"]
        here = measured(partial(make, Toy), *groups)
        with force_backend("portable"):
            there = measured(partial(make, Toy), *groups)
        assert here.channels.keys() == there.channels.keys()
        for leader, channels in here.channels.items():
            assert np.allclose(channels.input_energy, there.channels[leader].input_energy)

    def test_are_the_same_each_time(self, workshop: Workshop) -> None:
        """To the last bit, in products large enough to be shared between threads."""
        source = workshop.source(
            "llama",
            hidden_size=576,
            intermediate_size=1536,
            num_attention_heads=9,
            transformers5=False,
        )
        groups = manifest_of(workshop.converted(source).folder).groups()
        tokenizer = load_tokenizer(source, {})
        results = [
            measure_channels(
                lambda: load_stock(source, lazy=True)[0], groups, tokenizer, load_text()
            ).channels
            for _ in range(4)
        ]
        for leader in groups:
            first, *others = (result[leader].input_energy for result in results)
            assert all(np.array_equal(first, other) for other in others), leader

    def test_leave_no_trace_behind(self) -> None:
        assert not attention_hook.is_installed()
        kinds = (nn.Linear.__call__, nn.Embedding.as_linear)
        measured(partial(make, Toy), ["layers.0.up"])
        assert not attention_hook.is_installed()
        assert kinds == (nn.Linear.__call__, nn.Embedding.as_linear)


class Routed(nn.Module):
    """Experts in a stack; tokens go to expert 1 or 2, by the sign of their first value."""

    def __init__(self) -> None:
        super().__init__()
        self.up = SwitchLinear(32, 64, 4, bias=False)
        self.down = SwitchLinear(64, 32, 4, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        to = mx.where(x[..., :1] > 0, 1, 2)
        y = self.up(mx.expand_dims(x, (-2, -3)), to)
        return x + self.down(y, to).squeeze((-2, -3))


class Listed(nn.Module):
    """The same with one linear layer per expert."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = [nn.Linear(32, 32, bias=False) for _ in range(4)]

    def __call__(self, x: mx.array) -> mx.array:
        flat = x.reshape(-1, 32)
        positive = np.array(flat[:, 0]) > 0
        out = mx.zeros_like(flat)
        for expert, chosen in ((1, positive), (2, ~positive)):
            rows = mx.array(np.flatnonzero(chosen))
            out[rows] = self.experts[expert](flat[rows])
        return x + out.reshape(x.shape)


class TestExperts:
    def test_of_a_stack_share_the_sums_of_all_tokens_sent_to_any(self) -> None:
        build = partial(make, partial(Toy, layers=1, block=Routed))
        found = measured(build, ["layers.0.up"], ["layers.0.down"])
        model: Any = build()
        x = model.embed(mx.array(text_tokens(Letters(), TEXT, None)))
        channels = found.channels["layers.0.up"]
        assert np.allclose(channels.input_energy, squares(x), rtol=1e-4)
        assert np.allclose(channels.weight_energy, squares(model.layers[0].up.weight))

    def test_that_were_not_reached_are_counted_once_per_block(self) -> None:
        found = measured(
            partial(make, partial(Toy, layers=2, block=Routed)),
            *([f"layers.{i}.{name}"] for i in range(2) for name in ("up", "down")),
        )
        assert found.notices == [
            "the text for balancing reached 4 of 8 experts; the others take the statistics of "
            "their block"
        ]

    def test_of_a_list_take_the_sum_of_their_block_where_none_was_sent(self) -> None:
        paths = [f"layers.0.mlp.experts.{e}" for e in range(4)]

        class Wrapped(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.mlp = Listed()

            def __call__(self, x: mx.array) -> mx.array:
                return self.mlp(x)

        build = partial(make, partial(Toy, layers=1, block=Wrapped))
        found = measured(build, *([path] for path in paths))
        energy = {path: found.channels[path].input_energy for path in paths}
        assert np.allclose(energy[paths[0]], energy[paths[1]] + energy[paths[2]])
        assert np.array_equal(energy[paths[0]], energy[paths[3]])
        assert not np.allclose(
            found.channels[paths[0]].weight_energy, found.channels[paths[3]].weight_energy
        )
        assert "reached 2 of 4 experts" in found.notices[0]


class TestMemory:
    def test_only_one_layer_is_in_memory(self) -> None:
        """Weights of 4 MB a layer: never two of them."""
        seen = []

        class Watched(Block):
            def __init__(self) -> None:
                super().__init__(width=410)

            def __call__(self, x: mx.array) -> mx.array:
                y = super().__call__(mx.pad(x, [(0, 0), (0, 0), (0, 410 - 32)]))[..., :32]
                mx.eval(y)
                seen.append(mx.get_active_memory())
                return y

        build = partial(make, partial(Toy, layers=4, block=Watched))
        measured(build, *([f"layers.{i}.up", f"layers.{i}.gate"] for i in range(4)))
        assert len(seen) == 4
        assert max(seen[1:]) - min(seen[1:]) < 1e5, seen

    @pytest.mark.parametrize("loops", [2, 3])
    def test_a_layer_that_is_called_again_is_read_again(self, loops: int) -> None:
        builds = []

        def build() -> nn.Module:
            builds.append(make(partial(Toy, loops=loops)))
            return builds[-1]

        found = measured(build, ["layers.1.up", "layers.1.gate"], ["lm_head"])
        assert len(builds) == loops
        model: Any = make(Toy)
        x = model.embed(mx.array(text_tokens(Letters(), TEXT, None)))
        expected = np.zeros(32)
        for _ in range(loops):
            for number, layer in enumerate(model.layers):
                if number == 1:
                    expected += squares(x)
                x = layer(x)
        assert np.allclose(found.channels["layers.1.up"].input_energy, expected, rtol=1e-3)
        assert np.allclose(found.channels["lm_head"].input_energy, squares(x), rtol=1e-3)

    def test_the_head_is_never_multiplied(self) -> None:
        class Head(nn.Linear):
            def __call__(self, x: mx.array) -> mx.array:
                raise AssertionError("the head ran")

        class Model(Toy):
            def __init__(self) -> None:
                super().__init__()
                self.lm_head = Head(32, 50, bias=False)

        found = measured(partial(make, Model), ["lm_head"])
        assert found.channels.keys() == {"lm_head"}


class TestTokens:
    def test_begin_with_the_begin_token_where_the_tokenizer_puts_one(self) -> None:
        tokens = text_tokens(Letters(begin=7), TEXT, 50)
        assert tokens.shape == (PIECES, PIECE_TOKENS)
        assert (tokens[:, 0] == 7).all()

    def test_do_not_where_a_begin_token_only_has_a_name(self) -> None:
        class Named(Letters):
            def encode(self, text: str, add_special_tokens: bool = True, **_: Any) -> list[int]:
                return super().encode(text, add_special_tokens=False)

        plain, named = (text_tokens(t, TEXT, 50) for t in (Letters(), Named(begin=7)))
        assert np.array_equal(plain, named)


class TestFailures:
    def test_a_model_that_cannot_run_is_not_balanced_and_says_why(self) -> None:
        class Broken(Toy):
            def __call__(self, ids: mx.array) -> mx.array:
                raise ValueError("needs\nan image")

        found = measured(partial(make, Broken), ["layers.0.up"])
        assert not found.channels
        assert len(found.warnings) == 1
        assert "cannot be run (ValueError: needs an image)" in found.warnings[0]
        assert not attention_hook.is_installed()

    def test_ids_beyond_the_vocabulary_are_seen_before_they_are_looked_up(self) -> None:
        groups = {"layers.0.up": ["layers.0.up"]}
        found = measure_channels(partial(make, Toy), groups, Letters(), TEXT, vocabulary=40)
        assert not found.channels
        assert "its vocabulary ends at 39" in found.warnings[0]

    def test_inputs_that_are_no_numbers_are_named(self) -> None:
        bad = {"layers.1.down.weight": mx.full((32, 64), float("inf"))}
        found = measured(
            partial(make, Toy, **bad), ["layers.0.up"], ["layers.1.down"], ["layers.2.up"]
        )
        assert "layers.0.up" in found.channels
        assert "layers.2.up" not in found.channels
        assert found.warnings == [
            "the input of layers.2.up is not balanced: inputs that are infinite or not numbers"
        ]

    def test_layers_that_the_text_does_not_get_to_are_named(self) -> None:
        class Short(Toy):
            def __call__(self, ids: mx.array) -> mx.array:
                return self.lm_head(self.layers[0](self.embed(ids)))

        found = measured(partial(make, Short), ["layers.0.up"], ["layers.1.up"], ["layers.1.down"])
        assert found.channels.keys() == {"layers.0.up"}
        assert found.warnings == [
            "the inputs of 2 groups of layers, layers.1.up first, are not balanced: the text does "
            "not get there"
        ]


class TestConversion:
    def test_shows_a_progress_bar(self, llama: Path, tmp_path: Path) -> None:
        done = convert(llama, tmp_path / "out")
        assert "balancing: 100%" in done.err
        assert "balancing" not in done.out

    def test_of_a_model_that_cannot_run_goes_on_with_a_warning(
        self, llama: Path, workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(*_: Any, **__: Any) -> None:
            raise RuntimeError("no forward")

        monkeypatch.setattr(llama_module.LlamaModel, "__call__", broken)
        done = convert(llama, tmp_path / "out")
        assert done.code == 0
        assert [w for w in done.warnings if "RuntimeError: no forward" in w]
        plain = workshop.converted(llama).folder
        assert modules_that_differ(done.folder, plain) == set()

    def test_without_rotation_scales_the_channels_all_the_same(
        self, workshop: Workshop, llama: Path
    ) -> None:
        folder = workshop.converted(llama, "--rotation", "none", balanced=True).folder
        multipliers = {n: v for n, v in arrays(folder).items() if n.endswith(".multiplier")}
        assert multipliers
        for name, value in multipliers.items():
            assert (value > 0).all().item(), name
            assert value.max().item() > 1.1 * value.min().item(), name

    def test_measures_the_model_that_is_converted(self, workshop: Workshop, tmp_path: Path) -> None:
        """--dtype casts before everything else."""
        wide, narrow = (workshop.source("llama", dtype=name) for name in ("float32", "float16"))
        cast = tmp_path / "cast"
        convert_function(wide, cast, dtype="float16")
        convert_function(narrow, tmp_path / "plain")
        assert stored(cast) == stored(tmp_path / "plain")

    def test_streaming_finds_the_same_scales(self, workshop: Workshop, moe: Path) -> None:
        plain, streamed = (
            workshop.converted(moe, *flags, balanced=True).folder for flags in ([], ["--streaming"])
        )
        assert stored(plain) == stored(streamed)

    def test_a_text_that_is_too_short_is_refused(self, llama: Path, tmp_path: Path) -> None:
        text = tmp_path / "text.txt"
        text.write_text("Hello")
        done = convert(llama, tmp_path / "out", "--balance-text", str(text))
        assert done.code == 2
        assert "too short" in "\n".join(done.messages)
        assert not (tmp_path / "out").exists()

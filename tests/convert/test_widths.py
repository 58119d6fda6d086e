"""--target-bpw: the budget holds to the byte, what matters gets more, other options win."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest

from converting import Workshop, contents, convert, manifest_of
from turboquant_mlx.convert import sensitivity
from turboquant_mlx.convert import widths as widths_module
from turboquant_mlx.convert.sensitivity import losses_by_width, measure_losses
from turboquant_mlx.convert.source_model import open_source


def bpw(done) -> float:
    return json.loads(done.out)["bits_per_weight"]


@pytest.mark.parametrize("target", ["2.6", "3.2"])
def test_the_target_holds_and_is_used(workshop: Workshop, moe: Path, target: str) -> None:
    done = workshop.converted(moe, "--target-bpw", target, "--json", balanced=True)
    assert float(target) - 0.4 < bpw(done) <= float(target)
    widths = {entry.bits for entry in manifest_of(done.folder).modules.values()}
    assert len(widths) > 1
    assert manifest_of(done.folder).options["target_bpw"] == float(target)


def test_it_is_the_same_each_time(workshop: Workshop, llama: Path, tmp_path: Path) -> None:
    first = workshop.converted(llama, "--target-bpw", "3", balanced=True)
    again = convert(llama, tmp_path / "again", "--target-bpw", "3")
    assert (
        contents(again.folder)["model.safetensors"] == contents(first.folder)["model.safetensors"]
    )


def test_layers_whose_width_is_given_keep_it(workshop: Workshop, moe: Path) -> None:
    done = workshop.converted(
        moe, "--target-bpw", "3", "--attn-bits", "4", "--ternary-experts", "--json", balanced=True
    )
    modules = manifest_of(done.folder).modules
    assert {e.bits for path, e in modules.items() if ".self_attn." in path} == {4}
    assert {e.code for path, e in modules.items() if ".switch_mlp." in path} == {"ternary"}
    assert bpw(done) <= 3


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--target-bpw", "2.0"], "--target-bpw 2 is out of reach: with 2 bits wherever"),
        (["--target-bpw", "0.5"], "--target-bpw 0.5 is not a number of bits between 1 and 8"),
        (["--target-bpw", "nan"], "--target-bpw nan is not a number of bits between 1 and 8"),
        (["--target-bpw", "3", "--bits", "3"], "--bits and --target-bpw exclude each other"),
        (["--target-bpw", "3", "--streaming"], "--target-bpw and --streaming exclude each other"),
        (
            ["--target-bpw", "3", "--attn-bits", "3", "--mlp-bits", "3"],
            "--target-bpw has nothing to share out: other options fix all widths",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    workshop: Workshop, tmp_path: Path, flags: list[str], message: str
) -> None:
    tied = workshop.source("llama", tie_word_embeddings=True)
    refused = convert(tied, tmp_path / "out", *flags)
    assert refused.code == 2
    assert any(line.startswith(f"error: {message}") for line in refused.messages)
    assert not (tmp_path / "out").exists()


def test_more_than_there_is_gets_a_notice_and_measures_nothing(
    workshop: Workshop, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(widths_module, "measure_losses", lambda *a, **k: pytest.fail("measured"))
    done = workshop.converted(llama, "--target-bpw", "7", balanced=True)
    assert {entry.bits for entry in manifest_of(done.folder).modules.values()} == {4}
    assert any("is more than 4 bits everywhere take" in line for line in done.notes)


class TestMeasuring:
    def probe(self, path: str, weight: mx.array) -> mx.array:
        """Ruins the MLP of layer 1 alone."""
        return mx.zeros_like(weight) if "layers.1.mlp" in path else weight

    def measure(self, folder: Path) -> dict[str, float]:
        source = open_source(folder)
        parts = {
            "0": ["model.layers.0.mlp.up_proj"],
            "1": ["model.layers.1.mlp.up_proj", "model.layers.1.mlp.down_proj"],
            "head": ["lm_head"],
        }
        text = "a text with enough words to learn something from " * 40
        return measure_losses(source.build_again, parts, self.probe, source.tokenizer, text)

    def test_only_what_changed_loses(self, llama: Path) -> None:
        losses = self.measure(llama)
        assert losses["0"] == 0
        assert losses["head"] == 0
        assert losses["1"] > 1e-4

    def test_replaying_equals_running_everything(
        self, llama: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fast = self.measure(llama)
        real = sensitivity._Replay.run

        def run(self, changed):
            out = real(self, changed)
            if changed is not None:
                self.start = 0
                self.calls = 0
                out = real_from_start(self)
            return out

        def real_from_start(self):
            logits = self.model(self.tokens).astype(mx.float32)
            logits = logits.reshape(-1, logits.shape[-1])
            return logits - mx.logsumexp(logits, axis=-1, keepdims=True)

        monkeypatch.setattr(sensitivity._Replay, "run", run)
        assert self.measure(llama) == fast

    def test_a_quarter_of_the_loss_with_each_bit(self) -> None:
        losses = losses_by_width(1.0, "trellis")
        assert losses[3] == 1
        assert 3 < losses[2] < 4.5
        assert 3 < 1 / losses[4] < 4.5

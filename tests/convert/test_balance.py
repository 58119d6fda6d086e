"""Channel balancing: the arithmetic of the scales, and the text that they come from."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from turboquant_mlx.convert.balance import (
    MAX_SCALE,
    MIN_TOKENS,
    channel_scales,
    input_multiplier,
    load_text,
    sample_tokens,
)
from turboquant_mlx.errors import OptionError
from turboquant_mlx.quant.rotation import random_signs
from turboquant_mlx.quant.spec import QuantSpec
from turboquant_mlx.quant.weight import dequantize_weight, quantize_weight

WIDTH = 128


def energies(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Of inputs and weight columns, over three orders of magnitude."""
    draw = np.random.default_rng(seed)
    return 10 ** draw.uniform(-1.5, 1.5, WIDTH), 10 ** draw.uniform(-1.5, 1.5, WIDTH)


class TestScales:
    def test_minimise_the_error_of_the_output(self) -> None:
        """(sum a s^2) (sum h / s^2), what a white error in W diag(s) does to the output."""
        h, a = energies()

        def error(s: np.ndarray) -> float:
            return float((a * s**2).sum() * (h / s**2).sum())

        best = channel_scales(h, a)
        draw = np.random.default_rng(1)
        assert error(best) < 0.3 * error(np.ones(WIDTH))
        # a floor under the weakest channels keeps it from being the least possible exactly
        assert error(best) < 1.01 * float(np.sqrt(a * h).sum() ** 2)
        for _ in range(20):
            assert error(best) < error(best * np.exp(draw.normal(0, 0.5, WIDTH)))

    def test_depend_on_ratios_only(self) -> None:
        h, a = energies()
        assert np.allclose(channel_scales(h, a), channel_scales(1e6 * h, 1e-6 * a))
        assert np.log(channel_scales(h, a)).mean() == pytest.approx(0, abs=1e-9)

    def test_of_equal_channels_are_one(self) -> None:
        assert np.allclose(channel_scales(np.full(WIDTH, 7.0), np.full(WIDTH, 0.1)), 1)

    @pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
    def test_channels_that_the_text_never_excites_are_not_given_up(self, share: float) -> None:
        h, a = np.ones(WIDTH), np.ones(WIDTH)
        h[: int(share * WIDTH)] = 0
        scales = channel_scales(h, a)
        assert scales.max() / scales.min() < 10

    def test_columns_of_zeros_and_single_spikes_stay_within_bounds(self) -> None:
        for h, a in [
            (np.ones(WIDTH), np.arange(WIDTH) == 3),
            (np.arange(WIDTH) == 3, np.ones(WIDTH)),
            (np.where(np.arange(WIDTH) == 3, 1e30, 1e-30), np.full(WIDTH, 1e-30)),
        ]:
            scales = channel_scales(h, a)
            assert scales.min() >= 1 / MAX_SCALE
            assert scales.max() <= MAX_SCALE

    @pytest.mark.parametrize("zero", ["input", "weights"])
    def test_are_one_where_there_is_nothing_to_balance(self, zero: str) -> None:
        h, a = energies()
        (h if zero == "input" else a)[:] = 0
        assert (channel_scales(h, a) == 1).all()


class TestMultiplier:
    def test_is_the_signs_over_the_scales_in_float16(self) -> None:
        signs = random_signs(WIDTH, 42, "x")
        scales = channel_scales(*energies())
        multiplier = input_multiplier(signs, scales)
        assert multiplier.dtype == np.float16
        assert (np.sign(multiplier) == signs).all()
        assert np.allclose(np.abs(multiplier) * scales, 1, rtol=1e-3)

    def test_is_the_signs_alone_without_scales(self) -> None:
        signs = random_signs(WIDTH, 42, "x")
        assert (input_multiplier(signs, None) == signs).all()

    def test_holds_the_largest_scales_in_full_precision(self) -> None:
        ends = np.array([MAX_SCALE, 1 / MAX_SCALE])
        multiplier = input_multiplier(np.array([-1, 1], np.int8), ends)
        assert (multiplier == [-1 / MAX_SCALE, MAX_SCALE]).all()
        assert np.abs(multiplier).min() > 16 * np.finfo(np.float16).tiny

    def test_lowers_the_error_of_the_output_at_the_same_bits(self) -> None:
        draw = np.random.default_rng(0)
        deviations = np.exp(draw.normal(0, 1, WIDTH))
        deviations[5] = 100  # what real models have
        x = draw.standard_normal((256, WIDTH)) * deviations
        w = draw.standard_normal((64, WIDTH)) / np.where(np.arange(WIDTH) == 5, 20, 1)
        signs = random_signs(WIDTH, 42, "x")
        spec = QuantSpec(bits=3, rotation_block=WIDTH)

        def error(scales: np.ndarray | None) -> float:
            weight = mx.array(w.astype(np.float32))
            made = quantize_weight(weight, spec, multiplier=input_multiplier(signs, scales))
            difference = x @ (np.array(dequantize_weight(made)) - w).T
            return float((difference**2).sum() / ((x @ w.T) ** 2).sum())

        balanced = error(channel_scales((x**2).sum(0), (w**2).sum(0)))
        assert balanced < 0.3 * error(None)


class TestSample:
    def test_spreads_pieces_over_the_text(self) -> None:
        letters = "abcdefghijklmnop"
        sample = sample_tokens(lambda text: [ord(c) for c in text], letters * 50, 4, 16)
        assert sample.dtype == np.int32
        assert sample.shape == (4, 16)
        text = "".join(chr(100 + i) for i in range(1000))
        sample = sample_tokens(lambda part: [ord(c) - 100 for c in part], text, 4, 16)
        assert sample[:, 0].tolist() == [0, 250, 500, 750]
        assert (np.diff(sample, axis=1) == 1).all()

    def test_takes_equal_pieces_of_a_short_text(self) -> None:
        text = "".join(chr(100 + i) for i in range(90))
        sample = sample_tokens(lambda text: [ord(c) for c in text], text, 4, 128)
        assert sample.shape == (4, 22)

    def test_never_encodes_more_of_a_long_text_than_it_needs(self) -> None:
        lengths = []

        def encode(text: str) -> list[int]:
            lengths.append(len(text))
            return list(range(len(text)))

        sample_tokens(encode, "x" * 1_000_000, 4, 128)
        assert max(lengths) < 4096

    def test_refuses_a_text_that_says_too_little(self) -> None:
        with pytest.raises(OptionError, match="too short") as caught:
            sample_tokens(lambda text: [0] * len(text), "x" * (MIN_TOKENS - 4), 4, 128)
        assert caught.value.hint is not None
        assert str(MIN_TOKENS) in caught.value.hint

    def test_refuses_a_text_that_repeats_itself(self) -> None:
        with pytest.raises(OptionError, match="only 2 different tokens"):
            sample_tokens(lambda text: [ord(c) for c in text], "ab" * 5000, 4, 128)


class TestText:
    def test_comes_with_the_package(self) -> None:
        text = load_text()
        assert 15_000 < len(text.encode()) < 25_000

    def test_is_varied(self) -> None:
        text = load_text()
        scripts = {unicodedata.name(c).split()[0] for c in text if c.isalpha()}
        assert {"LATIN", "CYRILLIC", "CJK", "HIRAGANA", "ARABIC", "DEVANAGARI"} <= scripts
        for kind in (r"^def \w+\(", r"^SELECT ", r"^1\. ", r"^User: ", r"\\int", r'^"', r"^\| "):
            assert re.search(kind, text, flags=re.M), kind

    def test_may_be_the_users(self, tmp_path: Path) -> None:
        file = tmp_path / "text.txt"
        file.write_text("Grüße\n", encoding="utf-8")
        assert load_text(file) == "Grüße\n"

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (None, "no such text file"),
            (b"\xff\xfe\x00", "is not UTF-8 text"),
            (b" \n\t", "is empty"),
            ("folder", "cannot read the text file"),
        ],
    )
    def test_faults_of_a_file_are_named(
        self, tmp_path: Path, content: bytes | str | None, message: str
    ) -> None:
        file = tmp_path / "text.txt"
        if isinstance(content, bytes):
            file.write_bytes(content)
        elif content == "folder":
            file.mkdir()
        with pytest.raises(OptionError, match=message) as caught:
            load_text(file)
        assert str(file) in caught.value.message

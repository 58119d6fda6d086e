#!/usr/bin/env python3
"""Draw the pictures of docs/concepts from a real model, and print the numbers in them.

    python scripts/plot_concepts.py MODEL [--only NAME ...] [--out FOLDER]

MODEL is the folder of a 16-bit model (Llama family), for the committed pictures SmolLM2-135M as
``scripts/example_model.py smollm2 MODEL --dither`` makes it. Codebooks, trellis and qjl need
none. Matplotlib draws, and is asked for only here: pip install "matplotlib>=3.9".

One SVG for each name goes to FOLDER (default: docs/concepts/images), transparent and in colours
that hold on white and on black and that differ in lightness, too. The last line of standard output
is JSON with the figures that the documents quote.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from turboquant_mlx.errors import OptionError, TurboQuantError

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "concepts" / "images"

BLUE, RED, GREEN, GREY = "#3b8fd4", "#d55e00", "#0f9d74", "#808080"
SEED = 42

# KL(16-bit || 3-bit trellis) in nats per token by the text that the feedback was learnt from. The
# commands of docs/concepts/error-feedback.md take an hour, so these are copied from their output.
FEEDBACK_KL = {
    "no feedback": 0.3331,
    "a licence": 0.3086,
    "the package's text": 0.3087,
    "the model's own text": 0.2481,
    "WikiText-2, other half": 0.2422,
}

Figures = dict[str, Any]


class Model:
    """A 16-bit model: its weights, and the inputs of its layers on the text of the package."""

    def __init__(self, path: Path):
        from turboquant_mlx.convert.source_model import open_source

        self.source = open_source(path)
        self.modules = dict(self.source.model.named_modules())

    def weight(self, path: str) -> np.ndarray:
        """float32 [O, I]."""
        import mlx.core as mx

        if path not in self.modules:
            raise OptionError(f"the model has no layer {path}")
        return np.array(self.modules[path].weight.astype(mx.float32))

    @cached_property
    def groups(self) -> dict[str, list[str]]:
        """Leader of each rotation group -> its members."""
        from turboquant_mlx.convert.options import ConvertOptions
        from turboquant_mlx.convert.recipe import plan_modules
        from turboquant_mlx.convert.source_model import list_modules

        groups: dict[str, list[str]] = {}
        for decision in plan_modules(list_modules(self.source.model), ConvertOptions()).decisions:
            if decision.action == "quantize" and decision.rotation_group is not None:
                groups.setdefault(decision.rotation_group, []).append(decision.path)
        return groups

    def leader(self, path: str) -> str:
        """The leader of a layer's rotation group."""
        return next(leader for leader, members in self.groups.items() if path in members)

    @cached_property
    def scales(self) -> dict[str, np.ndarray]:
        """The channel scales of every rotation group."""
        from turboquant_mlx.convert.balance import channel_scales, load_text
        from turboquant_mlx.convert.calibrate import measure_channels

        found = measure_channels(
            self.source.build_again, self.groups, self.source.tokenizer, load_text()
        )
        return {
            leader: channel_scales(channels.input_energy, channels.weight_energy)
            for leader, channels in found.channels.items()
        }

    def inputs(self, path: str, tokens: np.ndarray) -> np.ndarray:
        """float32 [n, I]: what a layer is given."""
        import mlx.core as mx

        from turboquant_mlx.convert.layer_pass import LayerPass, intercept

        seen: list[np.ndarray] = []

        def watch(call: Callable[..., Any], x: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(np.array(x.astype(mx.float32)).reshape(-1, x.shape[-1]))
            return call(x, *args, **kwargs)

        class Pass(LayerPass):
            def intercept(self) -> None:
                intercept(self.modules[path], watch)

        Pass(self.source.build_again, {path: [path]}, path).run(tokens, progress=False)
        return np.concatenate(seen)

    @cached_property
    def package_text(self) -> np.ndarray:
        """int32 [pieces, length]: tokens of the text that comes with the package."""
        from turboquant_mlx.convert.balance import load_text
        from turboquant_mlx.convert.calibrate import text_tokens

        return text_tokens(self.source.tokenizer, load_text(), None)

    @cached_property
    def own_text(self) -> np.ndarray:
        """int32 [sequences, length]: tokens that the model writes."""
        from turboquant_mlx.convert.feedback import make_tokens

        source = self.source
        vocabulary = source.config.get("vocab_size")
        return make_tokens(source.build_again, source.tokenizer, None, vocabulary, False)


def signs_of(path: str, width: int) -> np.ndarray:
    from turboquant_mlx.quant.rotation import random_signs

    return random_signs(width, SEED, path).astype(np.float32)


def rotated(weight: np.ndarray, multiplier: np.ndarray) -> np.ndarray:
    """W diag(1/m) H^T, [O, I]."""
    from turboquant_mlx.quant.rotation import block_size, hadamard_columns

    columns = np.ascontiguousarray((weight / multiplier).T, np.float32)
    return hadamard_columns(columns, block_size(len(columns))).T


def quantized(weight: np.ndarray, multiplier: np.ndarray, **spec: Any) -> np.ndarray:
    """What a code makes of a weight."""
    import mlx.core as mx

    from turboquant_mlx.quant.rotation import block_size
    from turboquant_mlx.quant.spec import QuantSpec
    from turboquant_mlx.quant.weight import dequantize_weight, quantize_weight

    defaults = {
        "group_size": 32,
        "scale_layout": "log8",
        "rotation_block": block_size(weight.shape[1]),
    }
    packed = quantize_weight(
        mx.array(weight), QuantSpec(**defaults | spec), multiplier=multiplier, name="weight"
    )
    return np.array(dequantize_weight(packed))


# ------------------------------------------------------------------------------------ pictures


def draw_rotation(plt: Any, model: Model, save: Callable[[Any], None]) -> Figures:
    """Tails of the layer in which balancing makes them heaviest, and of all layers."""

    def versions(leader: str, member: str) -> dict[str, np.ndarray]:
        weight, s = model.weight(member), model.scales[leader]
        turned = rotated(weight, signs_of(leader, len(s)) / s)
        found = {"plain": weight, "balanced": weight * s, "balanced, rotated": turned}
        return {k: v / np.sqrt(np.square(v).mean(axis=1, keepdims=True)) for k, v in found.items()}

    layers = [(leader, member) for leader in model.groups for member in model.groups[leader]]
    tails = [{k: float((v**4).mean()) - 3 for k, v in versions(*it).items()} for it in layers]
    kinds = {kind: [tail[kind] for tail in tails] for kind in tails[0]}
    number = int(np.argmax(kinds["balanced"]))
    path, shown = layers[number][1], versions(*layers[number])

    figure, (left, right) = plt.subplots(1, 2, figsize=(7.4, 3.0), width_ratios=(3, 2))
    size = np.linspace(0, 14, 141)
    colours = (GREY, RED, BLUE)
    for (kind, values), colour in zip(shown.items(), colours, strict=True):
        beyond = 1 - np.searchsorted(np.sort(np.abs(values), axis=None), size) / values.size
        left.plot(size, np.where(beyond > 0, beyond, np.nan), color=colour, label=kind)
    beyond = [math.erfc(x / math.sqrt(2)) for x in size]
    left.plot(size, beyond, ":", color=GREEN, label="normal distribution", lw=2)
    left.set(yscale="log", ylim=(5e-6, 1.5), xlabel="|weight| / root mean square of its row")
    left.set(ylabel="share of larger weights", title=path.removeprefix("model."))
    left.legend(loc="upper right")

    for (kind, values), colour, marker in zip(kinds.items(), colours, "ov^", strict=True):
        right.plot(np.sort(values), np.linspace(0, 100, len(values)), color=colour, label=kind)
        right.plot(np.median(values), 50, marker, color=colour)
    right.set(xscale="symlog", xlabel="excess kurtosis (normal: 0)", ylabel="% of layers up to")
    right.set(title=f"all {len(values)} layers", xlim=(-0.5, None))
    save(figure)
    return {
        kind: {"median": np.median(values), "largest": max(values), "shown": values[number]}
        for kind, values in kinds.items()
    }


def draw_balancing(plt: Any, model: Model, save: Callable[[Any], None]) -> Figures:
    """Where the energy of an input is, where the error of a weight is, and what comes of both."""
    path = "model.layers.12.self_attn.v_proj"
    leader = model.leader(path)
    weight, x = model.weight(path), model.inputs(leader, model.package_text)
    signs, s = signs_of(leader, weight.shape[1]), model.scales[leader]
    energy = np.square(x, dtype=np.float64).mean(axis=0)
    output = float(np.square(x @ weight.T, dtype=np.float64).sum())
    order = np.argsort(-energy)
    ranks = np.unique(np.geomspace(1, len(order), 90).astype(int))  # what a logarithmic axis shows
    chosen = order[ranks - 1]

    errors, figures = {}, {"share of the largest channel": energy.max() / energy.sum()}
    methods = {
        "not rotated": (np.ones_like(s), 1),
        "rotated": (signs, 192),
        "balanced, rotated": (signs / s, 192),
    }
    for name, (multiplier, block) in methods.items():
        error = weight - quantized(weight, multiplier, bits=3, rotation_block=block)
        errors[name] = np.square(error, dtype=np.float64).sum(axis=0)
        figures[name] = {
            "error of the weights": errors[name].sum() / np.square(weight).sum(),
            "error of the output": float(np.square(x @ error.T, dtype=np.float64).sum()) / output,
        }

    figure, (left, right) = plt.subplots(1, 2, figsize=(7.4, 3.0))
    left.plot(ranks, energy[chosen] / energy.mean(), color=GREY, label="input energy")
    for name, colour in (("rotated", RED), ("balanced, rotated", BLUE)):
        level = errors[name][chosen] / errors["rotated"].mean()
        left.plot(ranks, level, color=colour, label=f"error, {name}", lw=1.1)
    left.set(xscale="log", yscale="log", xlabel="input channels, by energy")
    left.set(ylabel="relative to the mean", title="per channel")
    left.legend()

    for name, colour, line in zip(methods, (GREEN, RED, BLUE), (":", "-", "-"), strict=True):
        reaches = np.cumsum(errors[name][order] * energy[order]) * len(x) / output
        right.plot(ranks, 100 * reaches[ranks - 1], line, color=colour, label=name)
    right.set(xscale="log", xlabel="input channels, by energy", ylim=(0, None))
    right.set(ylabel="% of the output's energy", title="error that reaches the output, summed")
    right.legend(loc="center left")
    save(figure)
    return figures


def draw_codebooks(plt: Any, model: Model | None, save: Callable[[Any], None]) -> Figures:
    """Levels for a normal distribution, and how near they come to what is possible."""
    from turboquant_mlx.quant.codebook import boundaries, lloyd_max, ternary

    figure, (left, right) = plt.subplots(1, 2, figsize=(7.4, 3.0))
    x = np.linspace(-3.2, 3.2, 301)
    density = np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    left.plot(x, density, color=GREY)
    levels = lloyd_max(3)
    for border in boundaries(levels):
        left.plot([border] * 2, [0, np.interp(border, x, density)], "--", color=GREY, lw=0.8)
    left.vlines(levels, 0, np.interp(levels, x, density), color=BLUE, lw=2)
    left.plot(levels, np.zeros(8), "o", color=BLUE, clip_on=False, label="levels")
    left.plot([], [], "--", color=GREY, lw=0.8, label="borders")
    left.set(ylim=(0, 0.43), xlabel="weight / scale", ylabel="density", title="3 bits")
    left.legend(loc="upper left")

    bits = np.arange(1, 6)
    best = [lloyd_error(lloyd_max(int(b))) for b in bits]
    even = [min(lloyd_error(evenly(int(b), step)) for step in STEPS) for b in bits]
    three = lloyd_error(ternary())
    right.plot(bits, even, "v:", color=RED, label="evenly spaced levels")
    right.plot(bits, best, "o-", color=BLUE, label="Lloyd-Max")
    right.plot(math.log2(3), three, "s", color=BLUE, mfc="none", label="ternary")
    right.plot(bits, 4.0**-bits, "--", color=GREEN, label="bound 4^-bits")
    right.set(yscale="log", xticks=bits, xlabel="bits per weight", ylabel="mean square error")
    right.set(title="distortion of a normal distribution")
    right.legend()
    save(figure)
    return {
        "Lloyd-Max": dict(zip(map(str, bits), best, strict=True)),
        "evenly spaced": dict(zip(map(str, bits), even, strict=True)),
        "ternary": three,
    }


STEPS = np.geomspace(0.1, 1.8, 600)


def evenly(bits: int, step: float) -> np.ndarray:
    return step * (np.arange(1 << bits) - ((1 << bits) - 1) / 2)


def lloyd_error(levels: np.ndarray) -> float:
    """Mean square error of a table on N(0, 1)."""
    from statistics import NormalDist

    normal = NormalDist()
    level = levels.astype(np.float64)
    borders = [-math.inf, *((level[1:] + level[:-1]) / 2), math.inf]
    mass = np.diff([normal.cdf(b) for b in borders])
    pdf = [normal.pdf(b) if math.isfinite(b) else 0.0 for b in borders]
    return float(1 + 2 * (level * np.diff(pdf)).sum() + (level * level * mass).sum())


def draw_trellis(plt: Any, model: Model | None, save: Callable[[Any], None]) -> Figures:
    """How windows share bits, and what that gains."""
    from turboquant_mlx.quant.codebook import lloyd_max
    from turboquant_mlx.quant.trellis_table import trellis_table
    from turboquant_mlx.quant.viterbi import best_windows, make_trellis

    figure, (left, right) = plt.subplots(1, 2, figsize=(7.4, 3.0), width_ratios=(3, 2))
    n_bits, k, window = 18, 2, 8
    stream = np.random.default_rng(3).integers(0, 2, n_bits)
    for i, bit in enumerate(stream):
        colour = (BLUE, GREY)[i // k % 2]
        left.add_patch(plt.Rectangle((i, 0), 0.92, 0.8, fill=False, ec=colour, lw=1.2))
        left.text(i + 0.46, 0.38, bit, ha="center", va="center", color=colour)
    for weight in range(5):
        start, y = k * weight, -0.75 - 0.7 * weight
        left.plot([start, start + window - 0.08], [y, y], color=GREEN, lw=4, alpha=0.45)
        left.plot([start, start + k - 0.08], [y, y], color=BLUE, lw=4)
        name = f"weight {weight}: table[window]"
        left.text(start + window + 0.3, y, name, va="center", color=GREY)
    left.plot([], [], color=BLUE, lw=4, label="2 bits of its own")
    left.plot([], [], color=GREEN, lw=4, alpha=0.45, label="6 shared with those that follow")
    left.legend(loc="upper center", bbox_to_anchor=(0.5, 0.02), ncols=2)
    left.set(xlim=(-0.3, n_bits + 0.3), ylim=(-4, 1.1), title="a stream of 2 bits per weight")
    left.axis("off")

    figures: Figures = {}
    widths = (2, 3, 4)
    x = np.random.default_rng(12345).standard_normal((512, 1024), np.float32)
    for bits in widths:
        levels = trellis_table(bits)
        windows = best_windows(x, make_trellis(levels, bits, window))
        error = float(np.square(x - levels[windows], dtype=np.float64).mean() / np.square(x).mean())
        figures[str(bits)] = {"Lloyd-Max": lloyd_error(lloyd_max(bits)), "trellis": error}
    for kind, colour, marker in (("Lloyd-Max", RED, "v"), ("trellis", BLUE, "o")):
        ratio = [figures[str(b)][kind] * 4**b for b in widths]
        right.plot(widths, ratio, f"{marker}-", color=colour, label=kind)
        for bits, value in zip(widths, ratio, strict=True):
            right.annotate(
                f"{value:.2f}", (bits, value), (-2, 6), textcoords="offset points", ha="right"
            )
    right.axhline(1, ls="--", color=GREEN, label="no code can do better")
    right.set(xticks=widths, xlim=(1.5, 4.2), ylim=(0.9, 3.0), xlabel="bits per weight")
    right.set(ylabel="error / bound", title="distance from the bound")
    right.legend(loc="upper left")
    save(figure)
    return figures


DAMPING = np.geomspace(0.003, 10, 11)


def draw_feedback(plt: Any, model: Model, save: Callable[[Any], None]) -> Figures:
    """What feedback gains where it was learnt and elsewhere, and what that means for the text."""
    from turboquant_mlx.convert.balance import input_multiplier
    from turboquant_mlx.convert.feedback import second_moments
    from turboquant_mlx.quant.codebook import lloyd_max
    from turboquant_mlx.quant.feedback import damping_of, feed_forward, inverse_factor
    from turboquant_mlx.quant.rotation import block_size
    from turboquant_mlx.quant.scales import search_scales
    from turboquant_mlx.quant.spec import QuantSpec

    path = "model.layers.16.mlp.down_proj"
    weight = model.weight(path)
    width = weight.shape[1]
    m = input_multiplier(signs_of(path, width), model.scales[path])
    block = block_size(width)
    texts = {"the text it learnt from": model.own_text, "another text": model.package_text}
    moments = {
        name: second_moments(model.inputs(path, tokens), block, m) / tokens.size
        for name, tokens in texts.items()
    }
    stored = np.ascontiguousarray(rotated(weight, m.astype(np.float32)).T)
    spec = QuantSpec(bits=3, group_size=32, scale_layout="log8", rotation_block=block)
    levels = lloyd_max(3)

    def output_errors(scales: np.ndarray, idx: np.ndarray) -> dict[str, float]:
        error = stored - levels[idx] * np.repeat(scales, 32, axis=0)
        return {
            name: float(((h @ error) * error).sum() / ((h @ stored) * stored).sum())
            for name, h in moments.items()
        }

    scale, idx = search_scales(stored.reshape(-1, 32, stored.shape[1]), levels, "log8")
    nearest = output_errors(scale[:, 0], idx.reshape(stored.shape))
    learnt = moments["the text it learnt from"]
    found = []
    ours = damping_of(width, model.own_text.size)
    for damping in (*DAMPING, ours):
        scales, idx = feed_forward(stored.copy(), inverse_factor(learnt, damping), levels, spec)
        found.append(output_errors(scales, idx))

    figure, (left, right) = plt.subplots(1, 2, figsize=(7.4, 3.0))
    for name, colour, marker in zip(texts, (BLUE, RED), "ov", strict=True):
        relative = [errors[name] / nearest[name] for errors in found]
        left.plot(DAMPING, relative[:-1], f"{marker}-", color=colour, label=f"on {name}", ms=4)
        left.plot(ours, relative[-1], marker, color=colour, ms=9, mfc="none", mew=1.6)
    left.axhline(1, ls="--", color=GREY, label="rounding to the nearest level")
    left.set(xscale="log", ylim=(0, None), xlabel="damping (rings: what is used)")
    left.set(ylabel="error of the output, relative", title=path.removeprefix("model."))
    left.legend()

    names = list(FEEDBACK_KL)
    place = np.arange(len(names))
    values = list(FEEDBACK_KL.values())
    right.barh(place, values, 0.6, color=[GREY, *[BLUE] * (len(values) - 1)])
    for y, value in zip(place, values, strict=True):
        right.text(value + 0.006, y, f"{value:.3f}", va="center")
    right.set(yticks=place, yticklabels=names, xlabel="KL to the 16-bit model, nats per token")
    right.set(title="trellis, 3 bits", xlim=(0, 1.2 * max(values)))
    right.invert_yaxis()
    right.grid(False, axis="y")
    save(figure)
    return {
        "nearest": nearest,
        "feedback, damping 0.01": dict(found[int(np.abs(np.log(DAMPING / 0.01)).argmin())]),
        f"feedback, damping {ours:.2f}": found[-1],
    }


def draw_qjl(plt: Any, model: Model | None, save: Callable[[Any], None]) -> Figures:
    """What a one-bit sketch of a residual leaves of it, against one more bit in the code."""
    from turboquant_mlx.quant.codebook import lloyd_max

    mean = math.sqrt(2 / math.pi)  # of |x| over N(0, 1)
    factor = np.linspace(0, 1.6, 161)
    best, unbiased = mean, 1 / mean
    remains = {c: 1 - 2 * c * mean + c * c for c in (best, unbiased)}
    wider = {b: lloyd_error(lloyd_max(b + 1)) / lloyd_error(lloyd_max(b)) for b in (2, 3)}

    figure, axes = plt.subplots(figsize=(5.6, 3.0))
    axes.plot(factor, 100 * (1 - 2 * factor * mean + factor**2), color=BLUE, label="with a sketch")
    axes.plot(best, 100 * remains[best], "o", color=BLUE)
    axes.annotate(
        f"least error: sqrt(2/π), {100 * remains[best]:.0f} %",
        (best, 100 * remains[best]),
        (0, 20),
        textcoords="offset points",
        ha="center",
    )
    axes.plot(unbiased, 100 * remains[unbiased], "v", color=RED)
    axes.annotate(
        f"unbiased: sqrt(π/2), {100 * remains[unbiased]:.0f} %",
        (unbiased, 100 * remains[unbiased]),
        (-4, 14),
        textcoords="offset points",
        ha="right",
    )
    axes.axhline(100 * wider[3], ls="--", color=GREEN)
    axes.text(0.02, 100 * wider[3] - 8, f"one bit more in the code: {100 * wider[3]:.0f} %")
    axes.set(xlabel="factor of the decoded sketch", ylabel="% of the residual's energy left")
    axes.set(ylim=(0, 105), xlim=(0, 1.6))
    save(figure)
    return {"least error": remains[best], "unbiased": remains[unbiased], "one bit more": wider}


Draw = Callable[[Any, Any, Callable[[Any], None]], Figures]
WITH_MODEL: dict[str, Draw] = {
    "rotation": draw_rotation,
    "balancing": draw_balancing,
    "error-feedback": draw_feedback,
}
WITHOUT: dict[str, Draw] = {
    "codebooks": draw_codebooks,
    "trellis": draw_trellis,
    "qjl": draw_qjl,
}


def load_matplotlib() -> Any:
    """matplotlib.pyplot, set up for all pictures.

    Raises:
        OptionError: it is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise OptionError(
            "matplotlib is not installed", hint='pip install "matplotlib>=3.9"'
        ) from None
    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    texts = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    plt.rcParams.update(dict.fromkeys(texts, GREY))
    plt.rcParams.update(
        {
            "axes.grid": True,
            "axes.spines.right": False,
            "axes.spines.top": False,
            "axes.titlesize": "medium",
            "figure.constrained_layout.use": True,
            "font.size": 9,
            "grid.alpha": 0.25,
            "grid.color": GREY,
            "legend.fontsize": "small",
            "legend.framealpha": 0,
            "svg.fonttype": "none",  # a third of the size, and text stays text
            "svg.hashsalt": "concepts",  # or every run names its parts anew
        }
    )
    return plt


def save_as(path: Path, figure: Any) -> None:
    figure.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})


def plain(value: Any) -> Any:
    """Numbers that JSON knows, to 4 digits."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    return float(f"{float(value):.4g}")


def main(argv: Sequence[str] | None = None) -> int:
    from turboquant_mlx.cli import print_error

    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog=__doc__.partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", nargs="?", type=Path, help="folder of a 16-bit model")
    names = [*WITHOUT, *WITH_MODEL]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"of {names}")
    parser.add_argument("--out", type=Path, default=IMAGES, help="folder for the pictures")
    args = parser.parse_args(argv)
    wanted = args.only or names
    try:
        print(json.dumps(draw(wanted, args.model, args.out)))
    except TurboQuantError as error:
        print_error(error)
        return error.exit_code
    return 0


def draw(wanted: Sequence[str], folder: Path | None, out: Path) -> Figures:
    """Draw the pictures of some names; returns the figures in each."""
    for name in wanted:
        if name in WITH_MODEL and folder is None:
            raise OptionError(f"the picture {name} needs the folder of a model")
    plt = load_matplotlib()
    model = None if folder is None else Model(folder)
    out.mkdir(parents=True, exist_ok=True)
    figures = {}
    for name in wanted:
        picture = (WITH_MODEL | WITHOUT)[name]
        figures[name] = plain(picture(plt, model, partial(save_as, out / f"{name}.svg")))
        plt.close("all")
        print(f"{name}.svg", file=sys.stderr)
    return figures


if __name__ == "__main__":
    sys.exit(main())

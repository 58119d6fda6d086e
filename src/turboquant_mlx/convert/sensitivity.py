"""How much text a model loses when one part of it is quantized: measured, part by part.

The 16-bit model reads a short text once; what each decoder layer returned is kept. Then, one part
after the other, the weights of a part are replaced by what 3 bits leave of them, the model runs
again from the part's layer on, and the divergence of its predictions is the part's loss. Other
widths follow from the distortion of their codes, as the loss grows in proportion to it while it
is small (HIGGS, arXiv 2411.17525, section 4).

The whole 16-bit model and the outputs of all layers have to fit into memory.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from tqdm import tqdm

from ..cli import bars_are_off
from ..errors import TurboQuantError, UnsupportedModelError
from ..kernels.dispatch import backend
from ..layers import cpu
from .calibrate import describe, text_tokens
from .layer_pass import Build, Call, intercept, layer_paths

PIECES = 2
PIECE_TOKENS = 128
PROBE_BITS = 3

Probe = Callable[[str, mx.array], mx.array]

# Mean square error on N(0, 1), by codec and bits: Lloyd-Max tables, and the trained tables of
# trellis codes (scripts/plot_concepts.py --only trellis prints these).
DISTORTION = {
    "scalar": {2: 0.1175, 3: 0.03454, 4: 0.009497},
    "trellis": {2: 0.0753, 3: 0.0201, 4: 0.0054},
}


def losses_by_width(loss: float, codec: str) -> dict[int, float]:
    """From a loss at PROBE_BITS to that at all widths, nats per token.

    Args:
        loss: measured with PROBE_BITS.
        codec: "scalar" or "trellis".
    """
    table = DISTORTION[codec]
    return {bits: loss * table[bits] / table[PROBE_BITS] for bits in table}


def measure_losses(
    build: Build,
    parts: Mapping[str, Sequence[str]],
    probe: Probe,
    tokenizer: Any,
    text: str,
    *,
    vocabulary: int | None = None,
    progress: bool = False,
) -> dict[str, float]:
    """The loss that each part causes alone.

    Args:
        build: makes the model anew, every weight lazy and floating point.
        parts: name -> paths of the modules of the part, all in one decoder layer or in none.
        probe: ``probe(path, weight)`` returns the weight as PROBE_BITS leave it, same shape, dtype.
        tokenizer: of the model.
        text: what to run.
        vocabulary: number of token ids that the model knows.
        progress: show a progress bar on stderr.

    Returns:
        name -> KL(16-bit || part quantized), nats per token, never negative.

    Raises:
        UnsupportedModelError: the model cannot be run.
        OptionError: the text is too short.
    """
    try:
        tokens = text_tokens(tokenizer, text, vocabulary, PIECES, PIECE_TOKENS)
        return _measure(build(), parts, probe, tokens, progress)
    except TurboQuantError:
        raise
    except Exception as error:  # whatever the model's code raises
        raise UnsupportedModelError(
            f"--target-bpw needs to run the model, which fails ({describe(error)})",
            hint="give --bits, --attn-bits and --mlp-bits instead",
        ) from None
    finally:
        gc.collect()


def _measure(
    model: nn.Module,
    parts: Mapping[str, Sequence[str]],
    probe: Probe,
    tokens: np.ndarray,
    progress: bool,
) -> dict[str, float]:
    if backend() == "cpu":
        cpu.prepare(model)
    modules = dict(model.named_modules())
    replay = _Replay(model, modules, tokens)
    expected = replay.run(None)
    losses = {}
    for name, paths in tqdm(
        parts.items(),
        unit="part",
        disable=bars_are_off(progress),
        dynamic_ncols=True,
        desc="sensitivity",
    ):
        kept = {path: modules[path].weight for path in paths}
        for path, weight in kept.items():
            modules[path].weight = probe(path, weight)
        found = replay.run(paths[0])
        losses[name] = max(0.0, _divergence(expected, found))
        for path, weight in kept.items():
            modules[path].weight = weight
    return losses


class _Replay:
    """Runs a model again from one layer on, with what the layers before it returned."""

    def __init__(self, model: nn.Module, modules: Mapping[str, nn.Module], tokens: np.ndarray):
        self.model = model
        self.tokens = mx.array(tokens)
        self.outputs: list[Any] = []
        self.first_call: dict[str, int] = {}
        self.calls = self.start = 0
        self.recording = True
        for path in layer_paths(modules):
            intercept(modules[path], partial(self._run_layer, path))

    def run(self, changed: str | None) -> mx.array:
        """Log probabilities [tokens, vocabulary], float32.

        Args:
            changed: path of a module that is not what it was, None in the first run.
        """
        self.recording, self.calls = changed is None, 0
        layer = next((p for p in self.first_call if (changed or "").startswith(f"{p}.")), None)
        # what is in no layer comes before all of them, or after: the head, which runs anyway
        self.start = self.first_call[layer] if layer is not None else len(self.outputs)
        logits = self.model(self.tokens).astype(mx.float32)
        logits = logits.reshape(-1, logits.shape[-1])
        result = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        mx.eval(result)
        return result

    def _run_layer(self, path: str, call: Call, *args: Any, **kwargs: Any) -> Any:
        number, self.calls = self.calls, self.calls + 1
        if not self.recording and number < self.start:
            return self.outputs[number]
        out = call(*args, **kwargs)
        mx.eval(out)
        if self.recording:
            self.outputs.append(out)
            self.first_call.setdefault(path, number)
        return out


def _divergence(expected: mx.array, found: mx.array) -> float:
    """Mean KL of rows of log probabilities."""
    return float((mx.exp(expected) * (expected - found)).sum(axis=-1).mean())

"""Quantize a model with error feedback, layer by layer, each on what the layers before it give.

One forward pass (``layer_pass``) over a few thousand tokens. When a layer of a rotation group is
called for the first time, the second moments H = E[z z^T] of its balanced and rotated input are
taken from all tokens at once, the whole group is quantized with them (``quant.feedback``), and the
pass goes on with the quantized weights. So every group sees exactly what the quantized layers
before it produce, inside a decoder layer too, in the order in which the model runs them, and no
layer runs twice. One decoder layer's weights and one H are in memory at a time; what is coded goes
to disk until it is written.

Each matrix of an expert stack has second moments of its own, those of the tokens that it is sent.
Where these are few, the moments of its whole block, worth PRIOR_TOKENS tokens, weigh in.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from ..checkpoint.schema import ModuleEntry
from ..errors import TurboQuantError
from ..kernels.blas import one_thread
from ..kernels.cpu_matrix import as_numpy
from ..kernels.dispatch import is_traced
from ..quant.feedback import (
    Factors,
    damping_of,
    inverse_factor,
    quantize_weight_with_feedback,
)
from ..quant.forecast import expected_seconds
from ..quant.rotation import rotate
from ..quant.threads import for_each
from ..quant.weight import PackedWeight, dequantize_weight
from .calibrate import begin_tokens, describe, text_tokens
from .feedback_store import FeedbackStore
from .layer_pass import Build, Call, LayerPass, intercept, no_product
from .self_text import LENGTH, SEQUENCES, sample_sequences

TEXT_PIECES = 16
TEXT_LENGTH = 512
"""Tokens of a text of the user's."""

PRIOR_TOKENS = 256
"""Tokens that the inputs of a block of experts count for beside those of each expert."""

KEPT_FACTORS = 1 << 30
"""Bytes of an expert stack's factors that are kept for the next layer with the same input."""

_CHUNK = 1024  # inputs that are rotated at a time
_ROWS = 192  # rows of the second moments that one thread adds to at a time


@dataclass
class Outcome:
    """What a pass did: the paths of the coded layers, and what to tell the user."""

    coded: set[str] = field(default_factory=set)
    notices: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def quantize_with_feedback(
    build: Build,
    groups: Mapping[str, Sequence[str]],
    multiplier: Callable[[str], np.ndarray],
    make_tokens: Callable[[], np.ndarray],
    store: FeedbackStore,
    *,
    progress: bool = False,
) -> Outcome:
    """Run the pass and put every layer that it reaches into the store.

    Args:
        build: makes the model anew, every weight lazy and floating point.
        groups: rotation groups, path of the leader -> paths of all members.
        multiplier: the input multiplier of a group, by its leader.
        make_tokens: gives int32 [pieces, length].
        store: takes the layers; those that an earlier run has left there are taken as they are.
        progress: show a progress bar on stderr.

    Returns:
        what was done. Layers that were not reached are named in a warning, and so is a model that
        cannot run.

    Raises:
        TurboQuantError: a weight that cannot be quantized, or a disk that takes no more layers.
    """
    work = None
    try:
        tokens = store.tokens()
        if tokens is None:
            tokens = make_tokens()
            store.keep_tokens(tokens)
        work = _Pass(build, groups, multiplier, store)
        work.run(tokens, progress)
        return work.outcome()
    except TurboQuantError:
        raise
    except Exception as error:  # whatever the model's code, or the tokenizer's, raises
        coded = set() if work is None else work.outcome().coded
        total = sum(map(len, groups.values()))
        warning = (
            f"no error feedback for {total - len(coded):,} of {total:,} layers: this model cannot "
            f"be run ({describe(error)})"
        )
        return Outcome(coded, warnings=[warning])
    finally:
        # modules and what was attached to them refer to each other
        gc.collect()


class _Pass(LayerPass):
    """One pass that quantizes the layers as it comes to them."""

    def __init__(
        self,
        build: Build,
        groups: Mapping[str, Sequence[str]],
        multiplier: Callable[[str], np.ndarray],
        store: FeedbackStore,
    ):
        super().__init__(build, groups, "error feedback")
        self.multiplier = multiplier
        self.store = store
        self.seen: set[str] = set()
        self.not_finite: list[str] = []
        self.sparse: dict[str, tuple[int, int]] = {}

    def intercept(self) -> None:
        for leader, members in self.groups.items():
            for member in members:
                intercept(self.modules[member], partial(self._arrive, leader, member))

    def layer_refilled(self, path: str) -> None:
        for leader in self.led_in[path]:
            for member in self.groups[leader]:
                if member in self.store:
                    self._replace(member, self.store.get(member))

    def _arrive(
        self, leader: str, member: str, call: Call, x: mx.array, *args: Any, **kwargs: Any
    ) -> Any:
        """Quantize the group of a layer that is called for the first time, then go on."""
        if is_traced(x):
            return call(x, *args, **kwargs)
        rows = self.modules[member].weight.shape[0]
        if leader not in self.seen:
            self.seen.add(leader)
            stack = self.modules[member].weight.ndim == 3
            indices = (args[0] if args else kwargs["indices"]) if stack else None
            self._quantize(leader, x, indices)
        if self.is_head(member):
            return no_product(rows, x)
        return call(x, *args, **kwargs)

    def _quantize(self, leader: str, x: mx.array, indices: mx.array | None) -> None:
        if all(member in self.store for member in self.groups[leader]):  # by an earlier run
            for member in self.groups[leader]:
                self._replace(member, self.store.get(member))
            return
        spec = self.store.entries[leader].spec
        moments = partial(second_moments, block=spec.rotation_block, m=self.multiplier(leader))
        values = as_numpy(x)
        if not np.isfinite(values).all():
            self.not_finite.append(leader)
            return
        factors: Factors
        if indices is None:
            flat = values.reshape(-1, values.shape[-1])
            found = moments(flat)
            if not found.any():
                return  # nothing to learn from inputs that are all zero
            factor = inverse_factor(found, damping_of(flat.shape[1], len(flat)))
            factors = lambda _: factor  # noqa: E731
        else:
            experts = _Experts(values, np.array(indices), self.modules[leader].weight, moments)
            self.sparse[leader.rpartition(".")[0]] = (experts.sparse, experts.count)
            factors = experts
        for member in self.groups[leader]:
            with one_thread():  # the rounding has threads of its own
                packed = quantize_weight_with_feedback(
                    self.modules[member].weight,
                    self.store.entries[member].spec,
                    factors,
                    multiplier=self.multiplier(leader),
                    label=member,
                )
            self.store.put(member, packed)
            self._replace(member, packed)

    def _replace(self, member: str, packed: PackedWeight) -> None:
        module = self.modules[member]
        module.weight = dequantize_weight(packed, dtype=module.weight.dtype)

    def outcome(self) -> Outcome:
        """What was done so far."""
        coded = {m for members in self.groups.values() for m in members if m in self.store}
        found = Outcome(coded)
        if self.not_finite:
            found.warnings.append(
                f"no error feedback for {len(self.not_finite):,} groups of layers, "
                f"{self.not_finite[0]} first: inputs that are infinite or not numbers"
            )
        missed = [leader for leader in self.groups if leader not in self.seen]
        if missed:
            found.warnings.append(
                f"no error feedback for {len(missed):,} groups of layers, {missed[0]} first: the "
                "text does not get there"
            )
        sparse = sum(few for few, _ in self.sparse.values())
        if sparse:
            total = sum(count for _, count in self.sparse.values())
            found.notices.append(
                f"the text for error feedback sent fewer than {PRIOR_TOKENS} tokens to "
                f"{sparse:,} of {total:,} experts; the inputs of their block mostly stand in"
            )
        return found


class _Experts:
    """The factors of a stack's matrices, made when they are asked for."""

    def __init__(
        self,
        values: np.ndarray,
        indices: np.ndarray,
        weight: mx.array,
        moments: Callable[[np.ndarray], np.ndarray],
    ):
        self.count, _, width = weight.shape
        self.moments = moments
        lead = np.broadcast_shapes(values.shape[:-2], indices.shape)
        self.chosen = np.broadcast_to(indices, lead).reshape(-1)
        number = np.arange(np.prod(values.shape[:-2])).reshape(values.shape[:-2])
        self.rows = np.broadcast_to(number, lead).reshape(-1)
        self.values = values.reshape(number.size, -1, width)
        self.sparse = int((np.bincount(self.chosen, minlength=self.count) < PRIOR_TOKENS).sum())
        flat = values.reshape(-1, width)
        self.prior = moments(flat) * (PRIOR_TOKENS / len(flat))
        self.kept: dict[int, np.ndarray] = {}
        self.keep = 4 * width * width * self.count <= KEPT_FACTORS

    def __call__(self, expert: int) -> np.ndarray:
        if expert in self.kept:
            return self.kept[expert]
        own = self.values[self.rows[self.chosen == expert]]
        found = self.prior.copy()
        if len(own):
            found += self.moments(own.reshape(-1, own.shape[-1]))
        factor = np.eye(len(found), dtype=np.float32)
        if found.any():
            damping = damping_of(len(found), PRIOR_TOKENS + own.shape[0] * own.shape[1])
            factor = inverse_factor(found, damping)
        if self.keep:
            self.kept[expert] = factor
        return factor


def second_moments(x: np.ndarray, block: int, m: np.ndarray) -> np.ndarray:
    """The sum of z z^T over inputs, z = H (m * x).

    Args:
        x: float32 [n, I].
        block: of the rotation.
        m: float16 [I], the input multiplier.

    Returns:
        float64 [I, I].
    """
    width = x.shape[1]
    total = np.zeros((width, width))
    multiplier = mx.array(m.astype(np.float32))
    for start in range(0, len(x), _CHUNK):
        z = as_numpy(rotate(mx.array(x[start : start + _CHUNK]), block, multiplier))

        def add(first: int, z: np.ndarray = z) -> None:
            rows = slice(first, first + _ROWS)
            total[rows, first:] += z[:, rows].T @ z[:, first:]

        with one_thread():
            for_each(add, range(0, width, _ROWS))
    upper = np.triu(total)
    return upper + np.triu(upper, 1).T


def make_tokens(
    build: Build, tokenizer: Any, text: str | None, vocabulary: int | None, progress: bool
) -> np.ndarray:
    """int32 [pieces, length] of a text, or of what the model writes."""
    if text is not None:
        return text_tokens(tokenizer, text, vocabulary, TEXT_PIECES, TEXT_LENGTH)
    lead = begin_tokens(tokenizer)
    return sample_sequences(build(), tokenizer, lead, vocabulary=vocabulary, progress=progress)


def forecast(
    groups: Mapping[str, Sequence[str]],
    entries: Mapping[str, ModuleEntry],
    config: Mapping[str, Any],
    *,
    writes: bool,
) -> str:
    """What to tell the user before it starts: how long it takes, and how much memory.

    Args:
        groups: rotation groups.
        entries: what the manifest says of each layer.
        config: of the model, which may say how many experts a token is sent to.
        writes: whether the model writes the text.
    """
    tokens = SEQUENCES * LENGTH if writes else TEXT_PIECES * TEXT_LENGTH
    flops, seconds, memory, active = 0.0, 0.0, 0, 0.0
    chosen = config.get("num_experts_per_tok") or (config.get("text_config") or {}).get(
        "num_experts_per_tok"
    )
    speed = _speed()
    for leader, members in groups.items():
        width = entries[leader].width
        matrices = entries[leader].shape[0] if len(entries[leader].shape) == 3 else 1
        share = min(1.0, (chosen or 4) / matrices)
        flops += 2.0 * width * width * tokens * (1 if matrices == 1 else 1 + matrices * share)
        flops += 2.0 * width**3 * matrices
        memory = max(memory, 32 * width * width)
        for member in members:
            weights = float(np.prod(entries[member].shape))
            flops += weights * width + 2 * weights * share * tokens
            seconds += _ROUNDING * expected_seconds(int(weights), entries[member].spec)
            active += weights * share
    seconds += flops / speed
    if writes:
        seconds += LENGTH * active * (4 / _READ_SPEED + 2 * SEQUENCES / speed)
    return (
        f"error feedback will take about {_duration(seconds)}, and {memory / 1e9:.1f} GB of memory "
        "for the inputs' second moments"
    )


_READ_SPEED = 10e9  # bytes of expanded weights a second
_ROUNDING = 2  # times what quantizing without feedback takes


def _speed() -> float:
    """Floating-point operations a second of a matrix product."""
    side = 768
    a = np.ones((side, side), np.float32)
    a @ a
    began = time.perf_counter()
    a @ a
    return 2 * side**3 / (time.perf_counter() - began)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(5, round(seconds / 5) * 5)} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"

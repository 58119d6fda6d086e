"""Run a text through the source model and measure the channels of every layer's input.

One forward pass (``layer_pass``), in which the leader of each rotation group adds up x_j^2 of what
it is given.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import TurboQuantError
from ..kernels.dispatch import is_traced
from .balance import sample_tokens
from .layer_pass import Build, Call, LayerPass, intercept, no_product
from .roles import role_of

PIECES = 4
PIECE_TOKENS = 256
"""Text of one pass. Twice as much finds no better scales; half of it does a little worse."""

BLOCK_BYTES = 8 * 2**20
"""Float32 bytes of a weight that are squared and summed at a time."""


@dataclass(frozen=True)
class Channels:
    """The input channels of one rotation group.

    Attributes:
        input_energy: float64 [I], sum of x_j^2 over the text; a token counts once for every
            expert that it is sent to.
        weight_energy: float64 [I], sum of W_ij^2 over the rows of all members, all experts.
    """

    input_energy: np.ndarray
    weight_energy: np.ndarray


@dataclass
class Statistics:
    """What one pass found: leader of a rotation group -> its channels, and what to tell the user.

    Groups without usable statistics are absent; ``warnings`` says which and why.
    """

    channels: dict[str, Channels] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


class _CannotRunError(Exception):
    """The text and the model do not go together."""


def begin_tokens(tokenizer: Any) -> list[int]:
    """What the model's tokenizer puts before every text: its begin token, or nothing."""
    begin = getattr(tokenizer, "bos_token_id", None)
    # some tokenizers name a begin token that their models are never given
    return [begin] if begin is not None and list(tokenizer.encode("a"))[:1] == [begin] else []


def text_tokens(
    tokenizer: Any,
    text: str,
    vocabulary: int | None,
    pieces: int = PIECES,
    length: int = PIECE_TOKENS,
) -> np.ndarray:
    """A sample of a text as the model sees it, each piece after the begin token if there is one.

    Args:
        tokenizer: of the model.
        text: any text.
        vocabulary: number of token ids that the model knows, None if unknown.
        pieces: how many pieces to take.
        length: tokens of each; fewer where the text is too short for that many.

    Returns:
        int32 [pieces, length].

    Raises:
        OptionError: the text is too short.
    """
    lead = begin_tokens(tokenizer)
    encode = partial(tokenizer.encode, add_special_tokens=False, verbose=False)
    body = sample_tokens(encode, text, pieces, length - len(lead))
    sample = np.hstack([np.tile(np.array(lead, np.int32), (len(body), 1)), body])
    if vocabulary is not None and sample.max() >= vocabulary:
        raise _CannotRunError(
            f"its tokenizer gives the id {sample.max()}, its vocabulary ends at {vocabulary - 1}"
        )
    return sample


def measure_channels(
    build: Build,
    groups: Mapping[str, Sequence[str]],
    tokenizer: Any,
    text: str,
    *,
    vocabulary: int | None = None,
    progress: bool = False,
) -> Statistics:
    """Run a sample of the text through the model.

    Args:
        build: makes the model anew, every weight lazy and floating point.
        groups: rotation groups, path of the leader -> paths of all members.
        tokenizer: of the model.
        text: what to run.
        vocabulary: number of token ids that the model knows.
        progress: show a progress bar on stderr.

    Returns:
        the statistics; empty, with a warning that names why, if the model cannot run.

    Raises:
        OptionError: the text is too short.
    """
    try:
        return _measure(build, groups, text_tokens(tokenizer, text, vocabulary), progress)
    except TurboQuantError:
        raise
    except Exception as error:  # whatever the model's code, or the tokenizer's, raises
        return Statistics(
            warnings=[
                "channels are not balanced, which costs much quality: this model cannot be run "
                f"({describe(error)})"
            ]
        )
    finally:
        # modules and what was attached to them refer to each other
        gc.collect()


def _measure(
    build: Build, groups: Mapping[str, Sequence[str]], tokens: np.ndarray, progress: bool
) -> Statistics:
    work = _Pass(build, groups)  # out of reach, and so collectable, when this returns
    work.run(tokens, progress)
    return work.statistics()


def describe(error: Exception) -> str:
    """Why a model cannot run, on one line."""
    reason = " ".join(str(error).split()) or type(error).__name__
    return reason if isinstance(error, _CannotRunError) else f"{type(error).__name__}: {reason}"


class _Pass(LayerPass):
    """One pass that adds up squares."""

    def __init__(self, build: Build, groups: Mapping[str, Sequence[str]]):
        super().__init__(build, groups, "balancing")
        self.input_energy: dict[str, np.ndarray] = {}
        self.weight_energy: dict[str, np.ndarray] = {}
        self.reached: dict[str, np.ndarray] = {}

    def intercept(self) -> None:
        for leader in self.groups:
            intercept(self.modules[leader], partial(self._watch, leader))

    def layer_done(self, path: str) -> None:
        self._measure_weights(self.led_in[path])

    def run(self, tokens: np.ndarray, progress: bool) -> None:
        super().run(tokens, progress)
        self._measure_weights(self.groups)  # of what is in no layer

    def _watch(self, leader: str, call: Call, x: mx.array, *args: Any, **kwargs: Any) -> Any:
        """Add up the squares of an input, then go on."""
        if is_traced(x):
            return call(x, *args, **kwargs)
        energy = mx.square(x.astype(mx.float32)).sum(axis=tuple(range(x.ndim - 1)))
        self.input_energy[leader] = self.input_energy.get(leader, 0.0) + _float64(energy)
        weight = self.modules[leader].weight
        if weight.ndim == 3:
            indices = args[0] if args else kwargs["indices"]
            reached = self.reached.setdefault(leader, np.zeros(weight.shape[0], bool))
            reached[np.array(indices).reshape(-1)] = True
        elif self.is_head(leader):
            return no_product(weight.shape[0], x)
        return call(x, *args, **kwargs)

    def _measure_weights(self, leaders: Iterable[str]) -> None:
        """Add up the columns of groups that were not measured before."""
        for leader in leaders:
            if leader not in self.weight_energy:
                weights = [self.modules[member].weight for member in self.groups[leader]]
                self.weight_energy[leader] = np.sum([column_energy(w) for w in weights], axis=0)

    def statistics(self) -> Statistics:
        """What was found."""
        found = Statistics()
        self._share_with_siblings()
        unused, not_finite = [], []
        for leader in self.groups:
            if leader not in self.input_energy:
                unused.append(leader)
            elif not np.isfinite(self.input_energy[leader]).all():
                not_finite.append(leader)
            elif np.isfinite(self.weight_energy[leader]).all():  # if not, it cannot be quantized
                found.channels[leader] = Channels(
                    self.input_energy[leader], self.weight_energy[leader]
                )
        if unused:
            found.warnings.append(f"{_some(unused)} not balanced: the text does not get there")
        if not_finite:
            found.warnings.append(
                f"{_some(not_finite)} not balanced: inputs that are infinite or not numbers"
            )
        # the members of a block see the same routing
        blocks = {leader.rpartition(".")[0]: reached for leader, reached in self.reached.items()}
        experts = sum(reached.size for reached in blocks.values())
        missed = experts - sum(int(reached.sum()) for reached in blocks.values())
        if missed:
            found.notices.append(
                f"the text for balancing reached {experts - missed:,} of {experts:,} experts; the "
                "others take the statistics of their block"
            )
        return found

    def _share_with_siblings(self) -> None:
        """Give experts that are layers of their own (not rows of a stack) what a stack has: where
        the text never gets to one of them, the sum over the others of its block."""
        blocks: dict[str, list[str]] = {}
        for leader in self.groups:
            name = _without_number(leader)
            if name is not None and role_of(leader, "linear") == "expert":
                blocks.setdefault(name, []).append(leader)
        for name, leaders in blocks.items():
            used = [self.input_energy[g] for g in leaders if g in self.input_energy]
            self.reached[name] = np.array([g in self.input_energy for g in leaders])
            if used:
                for leader in leaders:
                    self.input_energy.setdefault(leader, np.sum(used, axis=0))


def column_energy(weight: mx.array) -> np.ndarray:
    """float64 [I]: sums of the squares of a weight [..., I] over all its rows."""
    rows = weight.reshape(-1, weight.shape[-1])
    step = max(1, BLOCK_BYTES // (4 * rows.shape[1]))
    total = np.zeros(rows.shape[1])
    for start in range(0, rows.shape[0], step):
        block = rows[start : start + step].astype(mx.float32)
        total += _float64(mx.square(block).sum(axis=0))
    return total


def _without_number(path: str) -> str | None:
    """A path without the last number in it; None if that is the decoder layer's, or none."""
    parts = path.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    if len(numbers) < 2:
        return None
    del parts[numbers[-1]]
    return ".".join(parts)


def _float64(array: mx.array) -> np.ndarray:
    return np.array(array).astype(np.float64)


def _some(paths: Sequence[str]) -> str:
    if len(paths) == 1:
        return f"the input of {paths[0]} is"
    return f"the inputs of {len(paths):,} groups of layers, {paths[0]} first, are"

"""Sampling settings: the command line over generation_config.json over "off". Imports no MLX."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .parser import DEFAULT_REP_CTX

FILE = "generation_config.json"


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. A value of 0 means that this step is left out.

    Attributes:
        temp: temperature; 0 takes the likeliest token.
        top_p: share of probability to sample from, 0 < top_p < 1.
        top_k: number of tokens to sample from, less than the vocabulary.
        rep_penalty: factor of the repetition penalty, never 1.
        rep_ctx: latest tokens, prompt included, that the penalty looks at.
        notices: options that were given and cannot have an effect.
    """

    temp: float
    top_p: float = 0.0
    top_k: int = 0
    rep_penalty: float = 0.0
    rep_ctx: int = DEFAULT_REP_CTX
    notices: list[str] = field(default_factory=list, compare=False)

    def describe(self) -> str:
        """The settings in effect, as one short phrase."""
        parts = [f"temp {self.temp:g}" if self.temp else "greedy"]
        if self.temp and self.top_p:
            parts.append(f"top-p {self.top_p:g}")
        if self.temp and self.top_k:
            parts.append(f"top-k {self.top_k}")
        if self.rep_penalty:
            parts.append(f"repetition penalty {self.rep_penalty:g} over {self.rep_ctx} tokens")
        return ", ".join(parts)


def read_generation_config(folder: Path) -> dict[str, Any]:
    """Contents of the folder's generation_config.json, empty when there is none.

    Raises:
        CheckpointError: the file cannot be read or is not a JSON object.
    """
    path = folder / FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return content


def resolve_sampling(
    generation_config: Mapping[str, Any],
    *,
    vocabulary: int,
    temp: float,
    top_p: float | None = None,
    top_k: int | None = None,
    rep_penalty: float | None = None,
    rep_ctx: int | None = None,
    seed: int | None = None,
) -> Sampling:
    """Settings in effect. None means that the option was not given.

    Args:
        generation_config: as ``read_generation_config`` returns it.
        vocabulary: number of tokens to choose from; a top-k as large as that keeps every token.

    Raises:
        CheckpointError: a value of generation_config.json that is needed and makes no sense.
    """
    notices = []
    if temp == 0:
        for flag, value in (("--top-p", top_p), ("--top-k", top_k)):
            if value:
                notices.append(f"{flag} has no effect with --temp 0")
        if seed is not None:
            notices.append("--seed has no effect with --temp 0")
    if top_p is None:
        top_p = _from_file(generation_config, "top_p", "--top-p", at_most=1.0)
    if top_k is None:
        top_k = int(_from_file(generation_config, "top_k", "--top-k", whole=True))
    elif top_k >= vocabulary:
        notices.append(f"--top-k {top_k} has no effect: the vocabulary has {vocabulary} tokens")
    if rep_penalty is None:
        rep_penalty = _from_file(generation_config, "repetition_penalty", "--rep-penalty")
    if rep_penalty == 1:
        rep_penalty = 0.0
    if rep_ctx is not None and not rep_penalty:
        notices.append("--rep-ctx has no effect without a repetition penalty")
    return Sampling(
        temp=temp,
        top_p=0.0 if top_p >= 1 else top_p,
        top_k=0 if top_k >= vocabulary else top_k,
        rep_penalty=rep_penalty,
        rep_ctx=DEFAULT_REP_CTX if rep_ctx is None else rep_ctx,
        notices=notices,
    )


def _from_file(
    config: Mapping[str, Any],
    key: str,
    flag: str,
    *,
    at_most: float = math.inf,
    whole: bool = False,
) -> float:
    value = config.get(key)
    if value is None:
        return 0.0
    kinds: tuple[type, ...] = (int,) if whole else (int, float)
    sensible = isinstance(value, kinds) and not isinstance(value, bool)
    if sensible and whole and value < 0:
        return 0.0  # the usual spelling of "off" besides 0
    if not sensible or not 0 <= value <= min(at_most, sys.float_info.max):
        raise CheckpointError(
            f"{FILE}: {key} is {value!r}, which is no usable value",
            hint=f"{flag} 0 runs the model without it",
        )
    return float(value)

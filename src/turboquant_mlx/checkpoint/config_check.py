"""Values of config.json that no model can have, found before a model is built or when it fails.

Two kinds. Some values make no error anywhere below: a norm with an infinite epsilon runs, and the
model answers nonsense; ten million layers are built one by one before their weights are missed.
``check_config`` refuses these at once. Others make mlx-lm's code fail somewhere with words of its
own ("math domain error"); ``impossible_size`` finds the key to blame afterwards. That is not done
beforehand, as model types differ in which keys they need and a value may be there unused.

No MLX here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import CheckpointError
from .config import TEXT_SECTIONS

_EPSILON = re.compile(r"(.*_)?(eps|epsilon)")
_ROTARY_BASE = re.compile(r"(.*_)?(rope_theta|rope_local_theta|base_freq|rotary_emb_base)")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "top_k_experts",
    "moe_topk",
    "moe_top_k",
)
_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
)


def check_config(config: Mapping[str, Any], num_tensors: int) -> None:
    """Refuse what would run and be wrong, or take forever before it fails.

    Args:
        config: content of config.json.
        num_tensors: tensors in the weight files; every layer has at least one of its own.

    Raises:
        CheckpointError: naming the key. An epsilon must be a finite number that is not negative,
            a rotary base and the numbers of its scaling finite ones, a base more than 0; there
            must be a layer, and no more of them than tensors; a description of a quantization
            must be an object; a token must go to one expert at least and to no more than there
            are, likewise for groups of experts; a window must hold a token where layers have one.
    """
    for where, part in _parts(config):
        _check_experts(where, part)
        _check_window(where, part)
        for key, value in part.items():
            name = f"config.json: {where}{key}"
            if _EPSILON.fullmatch(key):
                _check_numbers(name, value, "a finite number, 0 or more", lambda x: x >= 0)
            elif _ROTARY_BASE.fullmatch(key):
                _check_numbers(name, value, "a finite number above 0", lambda x: x > 0)
            elif key == "rope_scaling" and isinstance(value, Mapping):
                for inner, factor in value.items():
                    if isinstance(factor, float) and not math.isfinite(factor):
                        raise CheckpointError(f"{name}.{inner} is {factor}, not a finite number")
            elif key in _LAYER_COUNTS and _is_int(value):
                if value > num_tensors:
                    raise CheckpointError(
                        f"{name} is {_shown(value)}, but the weight files hold only {num_tensors} "
                        "tensors"
                    )
                if value < 1 and key == "num_hidden_layers":
                    raise CheckpointError(f"{name} {value} is not a positive whole number")
            elif key in ("quantization", "quantization_config") and not isinstance(
                value, Mapping | None
            ):
                raise CheckpointError(f"{name} is not an object")


def _check_experts(where: str, part: Mapping[str, Any]) -> None:
    # a model without experts may keep these keys, with any values
    experts = max(_whole(part, key) or 0 for key in _EXPERTS)
    limits = {**dict.fromkeys(_EXPERTS_PER_TOKEN, experts), "topk_group": _whole(part, "n_group")}
    for key, limit in limits.items():
        value = _whole(part, key)
        if value is not None and limit is not None and limit > 1 and not 1 <= value <= limit:
            raise CheckpointError(
                f"config.json: {where}{key} {_shown(value)} is not between 1 and {_shown(limit)}"
            )


def _check_window(where: str, part: Mapping[str, Any]) -> None:
    kinds, value = part.get("layer_types"), part.get("sliding_window")
    # elsewhere 0 may be another word for no window
    slides = isinstance(kinds, list) and "sliding_attention" in kinds
    if not slides and part.get("sliding_window_pattern") is None:
        return
    if value is not None and (not _is_int(value) or value < 1):
        raise CheckpointError(
            f"config.json: {where}sliding_window {_shown(value)} is not a positive whole number"
        )


def impossible_size(config: Mapping[str, Any]) -> str | None:
    """What is wrong with the first size that is no positive whole number; None if all are."""
    for where, part in _parts(config):
        for key in _SIZES:
            value = part.get(key)
            # some model types list a size for each layer
            if value is None or isinstance(value, list):
                continue
            if not _is_int(value) or value < 1:
                return f"config.json: {where}{key} {_shown(value)} is not a positive whole number"
    return None


def _parts(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield "", config
    for key in TEXT_SECTIONS:
        if isinstance(config.get(key), Mapping):
            yield f"{key}.", config[key]


def _check_numbers(name: str, value: Any, wanted: str, sensible: Any) -> None:
    for number in value if isinstance(value, list) else [value]:
        if number is None:
            continue
        try:
            fits = not isinstance(number, bool) and math.isfinite(number) and sensible(number)
        except (TypeError, OverflowError):
            fits = False
        if not fits:
            raise CheckpointError(f"{name} is {_shown(number)}, not {wanted}")


def _whole(part: Mapping[str, Any], key: str) -> int | None:
    value = part.get(key)
    return value if _is_int(value) else None


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # a number of more digits than Python prints
        return "a number of thousands of digits"
    return text if len(text) <= 60 else text[:60] + " ..."

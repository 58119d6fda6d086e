"""config.json: reading and writing it, and saying what transformers 5 says in mlx-lm's words.

transformers 5 writes rotary settings as one object, ``rope_parameters``, flat or per layer type,
and renamed a few other keys. Most mlx-lm models read only the older keys (``rope_theta``,
``rope_scaling``, ``rope_local_base_freq`` ...), and where one is absent they take a default: the
model runs with the wrong base, fluent but broken. ``normalize_config`` adds the older keys beside
the new ones and changes nothing that is there, so that models which do read the new keys, and
transformers itself, still find them. Where the two contradict each other, or a setting cannot be
said in the older keys, it raises: no model of ours ever runs with a guessed base.

What each model reads was taken from the sources of mlx-lm 0.32.2 and of transformers 5.24.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, UnsupportedModelError

# Parts of a config that describe a text model inside of a larger one.
TEXT_SECTIONS = ("text_config", "language_config", "llm_config")

# Models that read rope_parameters per layer type themselves.
_READ_PER_LAYER = {
    "gemma4",
    "gemma4_text",
    "gemma4_unified",
    "gemma4_unified_text",
    "laguna",
    "mellum",
    "spark2_5",
}
# Where the base of the sliding layers goes in models that have a second base.
_SLIDING_BASE_KEYS = {
    "gear": "rope_local_base_freq",
    "gemma3": "rope_local_base_freq",
    "gemma3_text": "rope_local_base_freq",
    "gemma3n": "rope_local_base_freq",
    "gemma3n_text": "rope_local_base_freq",
    "mimo_v2_flash": "swa_rope_theta",
}
# Models with one base whose sliding layers never use rope_scaling.
_SCALE_FULL_LAYERS_ONLY = {"olmo3"}
# Other names of the same two numbers.
_THETA_KEYS = {"gpt_neox": "rotary_emb_base"}
_PARTIAL_KEYS = {"gpt_neox": "rotary_pct"}
# Models in which every n-th layer has full attention, and what they call n.
_INTERVAL_KEYS = {
    "cohere2": "sliding_window_pattern",
    "gemma3": "sliding_window_pattern",
    "gemma3_text": "sliding_window_pattern",
    "qwen3_5": "full_attention_interval",
    "qwen3_5_moe": "full_attention_interval",
    "qwen3_5_moe_text": "full_attention_interval",
    "qwen3_5_text": "full_attention_interval",
    "qwen3_next": "full_attention_interval",
}
# new name -> name that mlx-lm reads
_RENAMED = {
    "mellum": {"num_local_experts": "num_experts"},
    "qwen3_moe": {"num_local_experts": "num_experts"},
    "qwen3_vl_moe_text": {"num_local_experts": "num_experts"},
}
# transformers derives an absent head_dim, these mlx-lm models do not.
_NEED_HEAD_DIM = {"exaone4", "exaone_moe", "glm4_moe", "qwen3_moe"}
# Models that look up one of the two names of the scaling's type only.
_READ_ONLY_TYPE = {
    "deepseek",
    "hunyuan",
    "hunyuan_v1_dense",
    "internlm2",
    "nemotron",
    "phi3",
    "qwen2_moe",
}
_READ_ONLY_ROPE_TYPE = {"internlm3", "nemotron-nas"}
# mlx-lm's deepseek_v2 knows only YaRN; with factor 1 YaRN is the plain rotation.
_NEUTRAL_YARN = {
    "type": "yarn",
    "rope_type": "yarn",
    "factor": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
    "original_max_position_embeddings": 4096,
}
# Pairs of names (in rope_scaling, in rope_parameters) of the same rotation.
_SAME_SCALING = {("mrope", "default"), ("su", "longrope")}
_NOT_SCALING = ("rope_theta", "partial_rotary_factor", "type", "rope_type")

_FLOAT_TAG = "__float__"
_TAGGED_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def read_json_object(path: str | Path) -> dict[str, Any]:
    """Read a JSON file that holds an object; tagged floats become floats.

    transformers writes a number that is not finite as {"__float__": "Infinity"}.

    Raises:
        CheckpointError: the file cannot be read, is no JSON, or is not an object.
    """
    path = Path(path)
    try:
        text = path.read_bytes().decode("utf-8-sig")
        # a hook makes the parser several times slower, and few files need it
        values = json.loads(text, object_hook=_decode_float if _FLOAT_TAG in text else None)
        if isinstance(values, dict):
            return values
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path}: not valid JSON, the file is damaged") from None
    raise CheckpointError(f"{path}: not a JSON object")


def dump_json(values: Mapping[str, Any]) -> str:
    """JSON text of an object as our files have it: two spaces, tagged floats, a final newline.

    Raises:
        TypeError: a value is nothing that JSON can hold.
    """
    return json.dumps(_encode_floats(values), indent=2, allow_nan=False) + "\n"


def model_dtype(config: Mapping[str, Any]) -> str | None:
    """The number type that a config names ("bfloat16", ...), under its old or its new name."""
    for part in (config, *(config.get(key) for key in TEXT_SECTIONS)):
        if not isinstance(part, Mapping):
            continue
        for key in ("torch_dtype", "dtype"):
            if isinstance(part.get(key), str):
                return part[key].removeprefix("torch.")
    return None


def set_model_dtype(config: dict[str, Any], dtype: str) -> None:
    """Name another number type wherever a config names one (in place)."""
    if "torch_dtype" not in config and "dtype" not in config:
        config["torch_dtype"] = dtype
    for part in (config, *(config.get(key) for key in TEXT_SECTIONS)):
        if isinstance(part, dict):
            for key in ("torch_dtype", "dtype"):
                if key in part:
                    part[key] = dtype


def normalize_config(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Add what mlx-lm reads to a config that transformers 5 wrote.

    A config in the older style comes back equal to what it was, except where mlx-lm could not
    have used it at all.

    Args:
        config: content of a config.json; not changed.

    Returns:
        (the config for mlx-lm, one line for each key added; ``torch_dtype``, which only repeats
        ``dtype``, gets none).

    Raises:
        CheckpointError: the config contradicts itself, or a rotary setting makes no sense.
        UnsupportedModelError: mlx-lm's model of this type cannot do what the config asks for.
    """
    result = copy.deepcopy(dict(config))
    notes: list[str] = []
    _Section(result, "", "", notes).normalize()
    return result, notes


class _Section:
    """The config itself, or the config of a text model inside of it."""

    def __init__(self, values: dict[str, Any], where: str, outer_type: str, notes: list[str]):
        self.values = values
        self.where = where
        self.notes = notes
        model_type = values.get("model_type")
        self.model_type = model_type if isinstance(model_type, str) else outer_type

    def normalize(self) -> None:
        for key in TEXT_SECTIONS:
            if isinstance(self.values.get(key), dict):
                where = f"{self.where}{key}."
                _Section(self.values[key], where, self.model_type, self.notes).normalize()
        self._rename()
        self._rope()
        self._scaling_type_names()
        self._layer_interval()

    def _rename(self) -> None:
        values = self.values
        if isinstance(values.get("dtype"), str) and values.get("torch_dtype") is None:
            values["torch_dtype"] = values["dtype"]
        for new, old in _RENAMED.get(self.model_type, {}).items():
            if values.get(new) is not None:
                self._set(old, values[new], new)
        if self.model_type in _NEED_HEAD_DIM and values.get("head_dim") is None:
            width, heads = values.get("hidden_size"), values.get("num_attention_heads")
            if isinstance(width, int) and isinstance(heads, int) and heads > 0:
                self._set("head_dim", width // heads, "hidden_size")

    def _rope(self) -> None:
        parameters = self.values.get("rope_parameters")
        if parameters is not None and not isinstance(parameters, dict):
            raise self._error("rope_parameters is not an object")
        if parameters:
            per_layer = _per_layer_type(parameters)
            if per_layer is None:
                self._flat(parameters, "rope_parameters")
            elif self.model_type not in _READ_PER_LAYER:
                self._per_layer(per_layer)
        else:
            scaling = self.values.get("rope_scaling")
            if isinstance(scaling, dict) and "rope_theta" in scaling:
                key = _THETA_KEYS.get(self.model_type, "rope_theta")
                self._set(key, self._base(scaling, "rope_scaling"), "rope_scaling")
        if self.model_type == "deepseek_v2" and self.values.get("rope_scaling") is None:
            self._replace("rope_scaling", dict(_NEUTRAL_YARN), "mlx-lm's deepseek_v2 needs one")

    def _flat(self, parameters: dict[str, Any], source: str) -> None:
        """Spread one set of rotary parameters over the older keys."""
        theta_key = _THETA_KEYS.get(self.model_type, "rope_theta")
        if "rope_theta" in parameters:
            self._set(theta_key, self._base(parameters, source), source)
        elif self.values.get(theta_key) is None:
            raise self._error(f"{source} has no rope_theta, the rotary base is unknown")
        partial = parameters.get("partial_rotary_factor")
        if partial is not None:
            self._set(_PARTIAL_KEYS.get(self.model_type, "partial_rotary_factor"), partial, source)
        self._set_scaling(parameters, source)

    def _set_scaling(self, parameters: dict[str, Any], source: str) -> None:
        scaling = _scaling(parameters)
        old = self.values.get("rope_scaling")
        if old is not None:
            if not isinstance(old, dict):
                raise self._error("rope_scaling is not an object")
            self._compare_scaling(old, scaling, source)
        elif scaling is None:
            # Some models have no default for the key.
            self.values.setdefault("rope_scaling", None)
        else:
            self._replace("rope_scaling", scaling, source)
        length = parameters.get("original_max_position_embeddings")
        if _type_of(parameters) in ("longrope", "su") and length is not None:
            self._set("original_max_position_embeddings", length, source)

    def _compare_scaling(
        self, old: dict[str, Any], scaling: dict[str, Any] | None, source: str
    ) -> None:
        kind, new_kind = _type_of(old), _type_of(scaling or {})
        if not (
            kind == new_kind
            or (kind, new_kind) in _SAME_SCALING
            or (new_kind == "default" and _is_neutral(old))
        ):
            raise self._error(f"rope_scaling is {kind!r}, but {source} says {new_kind!r}")
        for key in old.keys() & (scaling or {}).keys() - set(_NOT_SCALING):
            if not _same(old[key], (scaling or {})[key]):
                raise self._error(
                    f"rope_scaling.{key} is {old[key]}, but {source} says {(scaling or {})[key]}"
                )

    def _per_layer(self, per_layer: dict[str, dict[str, Any]]) -> None:
        """Spread parameters that differ by layer type, if the model has words for them."""
        full = per_layer.get("full_attention")
        sliding = per_layer.get("sliding_attention")
        second_key = _SLIDING_BASE_KEYS.get(self.model_type)
        if second_key:
            if not full or not sliding or len(per_layer) != 2:
                raise self._unsupported("other layer types than full and sliding attention")
            if _scaling(sliding) is not None:
                raise self._unsupported("scaled rotation in its sliding layers")
            shares = [p.get("partial_rotary_factor", 1.0) for p in (full, sliding)]
            if not _same(*shares):
                raise self._unsupported("a rotated share of the head for each layer type")
            source = "rope_parameters.sliding_attention"
            self._set(second_key, self._base(sliding, source), source)
            self._flat(full, "rope_parameters.full_attention")
            return
        sets = list(per_layer.values())
        if self.model_type in _SCALE_FULL_LAYERS_ONLY and full and sliding:
            if not _same(full.get("rope_theta"), sliding.get("rope_theta")):
                raise self._unsupported("a rotary base for each layer type")
            if _scaling(sliding) is not None:
                raise self._unsupported("scaled rotation in its sliding layers")
            sets = [full]
        if any(other != sets[0] for other in sets[1:]):
            if "model_file" in self.values:
                return  # code that comes with the model reads its own config
            raise self._unsupported("rotary settings for each layer type")
        self._flat(sets[0], "rope_parameters")

    def _scaling_type_names(self) -> None:
        scaling = self.values.get("rope_scaling")
        if not isinstance(scaling, dict):
            return
        for models, name, other in (
            (_READ_ONLY_TYPE, "type", "rope_type"),
            (_READ_ONLY_ROPE_TYPE, "rope_type", "type"),
        ):
            if self.model_type in models and name not in scaling and other in scaling:
                scaling[name] = scaling[other]
                self.notes.append(f"{self.where}rope_scaling.{name} set to {scaling[name]!r}")

    def _layer_interval(self) -> None:
        """transformers 5 lists every layer's type, where mlx-lm counts: every n-th is full."""
        key = _INTERVAL_KEYS.get(self.model_type)
        types, count = self.values.get("layer_types"), self.values.get("num_hidden_layers")
        if key is None or not isinstance(types, list) or not types:
            return
        types = types[:count] if isinstance(count, int) else types
        given = self.values.get(key)
        full = [kind == "full_attention" for kind in types]
        interval = given if given is not None else full.index(True) + 1 if any(full) else 0
        if not isinstance(interval, int) or interval < 1:
            raise self._unsupported("no layer with full attention")
        if full != [(i + 1) % interval == 0 for i in range(len(types))]:
            if given is not None:
                raise self._error(f"{key} {given} contradicts layer_types")
            raise self._unsupported("full attention at uneven intervals")
        if given is None:
            self._set(key, interval, "layer_types")

    def _base(self, parameters: dict[str, Any], source: str) -> float:
        value = parameters.get("rope_theta")
        number = _number(value)
        if number is None or not math.isfinite(number) or number <= 0:
            raise self._error(f"{source}.rope_theta {value!r} is not a rotary base")
        return value  # type: ignore[return-value]  # an int stays an int in the file

    def _set(self, key: str, value: Any, source: str) -> None:
        """Add a key, or make sure that it already has this value."""
        old = self.values.get(key)
        if old is None:
            self._replace(key, value, source)
        elif not _same(old, value):
            raise self._error(f"{key} is {old}, but {source} says {value}")

    def _replace(self, key: str, value: Any, source: str) -> None:
        self.values[key] = copy.deepcopy(value)
        self.notes.append(f"{self.where}{key} set to {value} ({source})")

    def _error(self, message: str) -> CheckpointError:
        return CheckpointError(f"config.json: {self.where}{message}")

    def _unsupported(self, what: str) -> UnsupportedModelError:
        part = f" ({self.where.rstrip('.')})" if self.where else ""
        return UnsupportedModelError(
            f"config.json{part}: the model has {what}, which mlx-lm's {self.model_type} cannot do"
        )


def _per_layer_type(parameters: dict[str, Any]) -> dict[str, dict[str, Any]] | None:
    """Layer type -> its parameters, or None when one set holds for all layers."""
    if "rope_theta" in parameters or "rope_type" in parameters or "type" in parameters:
        return None
    sets = {name: values for name, values in parameters.items() if isinstance(values, dict)}
    return sets or None


def _type_of(parameters: Mapping[str, Any]) -> str:
    # mlx-lm looks at "type" first; transformers 5 writes "rope_type".
    return str(parameters.get("type") or parameters.get("rope_type") or "default")


def _scaling(parameters: dict[str, Any]) -> dict[str, Any] | None:
    """rope_scaling in the older style: both names of the type, and no base."""
    kind = str(parameters.get("rope_type") or parameters.get("type") or "default")
    if kind == "default" and "mrope_section" not in parameters:
        return None
    rest = {key: value for key, value in parameters.items() if key not in _NOT_SCALING}
    return {"type": kind, "rope_type": kind, **rest}


def _is_neutral(scaling: Mapping[str, Any]) -> bool:
    """Whether a YaRN scaling is the plain rotation."""
    return _type_of(scaling) == "yarn" and _same(scaling.get("factor"), 1.0)


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _same(a: Any, b: Any) -> bool:
    x, y = _number(a), _number(b)
    return a == b if x is None or y is None else math.isclose(x, y, rel_tol=1e-9)


def _decode_float(value: dict[str, Any]) -> Any:
    if len(value) == 1 and value.get(_FLOAT_TAG) in ("Infinity", "-Infinity", "NaN"):
        return _TAGGED_FLOATS[value[_FLOAT_TAG]]
    return value


def _encode_floats(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        name = "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        return {_FLOAT_TAG: name}
    if isinstance(value, Mapping):
        return {key: _encode_floats(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encode_floats(item) for item in value]
    return value

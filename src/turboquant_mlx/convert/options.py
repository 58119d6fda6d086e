"""What a conversion is asked to do: the options, their permitted values and combinations.

One frozen record serves the command line, the Python function and the manifest. It refuses bad
values where it is made, so nothing later has to check them again. No MLX here.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ..errors import OptionError

BITS = (2, 3, 4)
GROUP_SIZES = (32, 64, 128)
MLP_GROUP_SIZES = (16, 32, 64, 128)
CODECS = ("scalar", "trellis")
ROTATIONS = ("hadamard", "blockwise_hadamard", "none")
DTYPES = ("float16", "bfloat16", "float32")
TIERS = ("ternary", "2", "3", "4")
EXTRAS_BITS = (2, 3, 4, 8)
EXTRAS_GROUP_SIZES = (32, 64, 128)

# Group size of scalar codes where the user gives none; trellis codes have one scale per rotation
# block instead.
# With scales of 8 bits, 32 costs the bits of 64 with 16, and KL(16-bit || 3-bit SmolLM2) falls from
# 0.54 to 0.43 (4 bits: 0.116 to 0.105; 2 bits: 2.95 to 2.86).
DEFAULT_GROUP_SIZE = 32

# Far above any real model, low enough that a mistyped range does not fill the memory.
MAX_LAYER = 9999

# Options that only tune another one: (the option, the one that switches it on).
_NEEDS = {
    "protect_bits": "protect_expert_layers",
    "extras_bits": "quantize_extras",
    "extras_group_size": "quantize_extras",
    "feedback_text": "error_feedback",
}


def flag(name: str) -> str:
    """The command-line spelling of an option's name."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class ConvertOptions:
    """Every choice of a conversion besides source and target.

    Attributes:
        bits: bits per weight of everything that no other option names.
        target_bpw: bits per weight of all quantized layers together, every stored byte counted;
            widths are shared out by how much each part matters, and ``bits`` is not used. Options
            that fix the width of some layers hold for those.
        group_size: consecutive weights of a row that share one scale, None for what suits the
            codec.
        codec: "trellis" (the codes of neighbours overlap: the better text by far at equal bits)
            or "scalar" (each weight has a code of its own: converts in half the time).
        rotation: "hadamard" (blocks as long as the width permits, at most 1024),
            "blockwise_hadamard" (blocks inside one scale group) or "none".
        rotation_seed: seed of the random signs.
        use_qjl: store a 1-bit sketch of the residual of every quantized weight.
        dtype: floating-point type to cast the model to first, None for the source's own.
        attn_bits: bits of attention (see ``roles.role_of``), None for ``bits``.
        mlp_bits: bits of MLPs and experts, None for ``bits``.
        mlp_group_size: group size of MLPs and experts, None for that of the others.
        ternary_experts: store routed experts as three values.
        expert_down_bits: bits of the experts' down projections, None for the experts' own.
        streaming: write each layer as soon as it is quantized and free it.
        protect_expert_layers: layers whose experts take ``protect_bits``.
        protect_bits: bits of those experts.
        expert_layer_tiers: layer -> "ternary", "2", "3" or "4" for that layer's experts.
        quantize_extras: turn what our code leaves (embeddings above all) into MLX affine.
        extras_bits, extras_group_size: width and group of those.
        keep_mtp: copy the source's multi-token-prediction head.
        trust_remote_code: let code that comes with the source run.
        balance: scale the input channels by what a text shows of them, see ``balance``.
        balance_text: file with that text, None for the one of the package.
        error_feedback: round for the least error of the layers' outputs, see ``feedback``.
        feedback_text: file with text for that, None for text that the model writes.

    Raises:
        OptionError: a value that is not permitted, or options that exclude or need each other.
    """

    bits: int = 3
    target_bpw: float | None = None
    group_size: int | None = None
    codec: str = "trellis"
    rotation: str = "hadamard"
    rotation_seed: int = 42
    use_qjl: bool = False
    dtype: str | None = None
    attn_bits: int | None = None
    mlp_bits: int | None = None
    mlp_group_size: int | None = None
    ternary_experts: bool = False
    expert_down_bits: int | None = None
    streaming: bool = False
    protect_expert_layers: tuple[int, ...] = ()
    protect_bits: int = 3
    expert_layer_tiers: Mapping[int, str] = field(default_factory=dict)
    quantize_extras: bool = False
    extras_bits: int = 4
    extras_group_size: int = 64
    keep_mtp: bool = False
    trust_remote_code: bool = False
    balance: bool = True
    balance_text: str | None = None
    error_feedback: bool = False
    feedback_text: str | None = None

    def __post_init__(self) -> None:
        layers = self.protect_expert_layers
        if isinstance(layers, str):
            layers = parse_layer_ranges(layers)
        object.__setattr__(self, "protect_expert_layers", tuple(layers or ()))
        object.__setattr__(self, "expert_layer_tiers", dict(self.expert_layer_tiers or {}))
        for name in ("balance_text", "feedback_text"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, str(getattr(self, name)))
        self.validate()

    def validate(self) -> None:
        """Raise OptionError for a bad value or combination."""
        _one_of("bits", self.bits, BITS)
        if self.target_bpw is not None:
            _check_target(self.target_bpw)
        _one_of("group_size", self.group_size, (None, *GROUP_SIZES))
        _one_of("codec", self.codec, CODECS)
        _one_of("rotation", self.rotation, ROTATIONS)
        _one_of("dtype", self.dtype, (None, *DTYPES))
        for name in ("attn_bits", "mlp_bits", "expert_down_bits"):
            _one_of(name, getattr(self, name), (None, *BITS))
        _one_of("mlp_group_size", self.mlp_group_size, (None, *MLP_GROUP_SIZES))
        _one_of("protect_bits", self.protect_bits, BITS)
        _one_of("extras_bits", self.extras_bits, EXTRAS_BITS)
        _one_of("extras_group_size", self.extras_group_size, EXTRAS_GROUP_SIZES)
        if isinstance(self.rotation_seed, bool) or not isinstance(self.rotation_seed, int):
            raise OptionError(f"--rotation-seed {self.rotation_seed!r} is not a whole number")
        for layer in self.protect_expert_layers:
            _check_layer("protect_expert_layers", layer)
        for layer, tier in self.expert_layer_tiers.items():
            _check_layer("expert_layer_tiers", layer)
            if tier not in TIERS:
                raise OptionError(
                    f"--expert-layer-tiers: {tier!r} for layer {layer} is not one of "
                    + ", ".join(TIERS)
                )
        self._check_combinations()

    def _check_combinations(self) -> None:
        for name in ("protect_expert_layers", "expert_down_bits"):
            if self.expert_layer_tiers and getattr(self, name):
                raise OptionError(
                    f"--expert-layer-tiers and {flag(name)} exclude each other",
                    hint="the tiers file can name every layer that differs",
                )
        if self.target_bpw is not None and self.bits != type(self).bits:
            raise OptionError("--bits and --target-bpw exclude each other")
        if self.target_bpw is not None and self.streaming:
            raise OptionError(
                "--target-bpw and --streaming exclude each other",
                hint="to see what matters, the whole 16-bit model has to run in memory",
            )
        if self.rotation == "none" and self.rotation_seed != type(self).rotation_seed:
            raise OptionError("--rotation-seed has no effect with --rotation none")
        if self.balance_text is not None and not self.balance:
            raise OptionError("--balance-text and --no-balance exclude each other")
        if self.error_feedback and self.use_qjl:
            raise OptionError(
                "--error-feedback and --use-qjl exclude each other",
                hint="error feedback is worth more than the bit of a sketch",
            )
        if self.error_feedback and self.streaming and self.feedback_text is None:
            raise OptionError(
                "--error-feedback with --streaming needs --feedback-text",
                hint="the text that it uses otherwise is written by the whole model in memory",
            )
        if self.streaming and self.dtype is not None:
            raise OptionError(
                "--dtype is not supported together with --streaming",
                hint="leave one of them out; without --dtype the source's own type is kept",
            )
        defaults = {f.name: f.default for f in fields(self)}
        check_needs(
            {f.name for f in fields(self) if getattr(self, f.name) != defaults[f.name]}
            # A default_factory has no default to compare with.
            - {"expert_layer_tiers"}
        )

    def to_dict(self) -> dict[str, Any]:
        """The options as JSON can hold them (layer numbers of the tiers become strings)."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["protect_expert_layers"] = list(self.protect_expert_layers)
        values["expert_layer_tiers"] = {str(k): v for k, v in self.expert_layer_tiers.items()}
        return values


def check_needs(given: Collection[str]) -> None:
    """Refuse an option that only tunes another one which was not given.

    Args:
        given: names of the options that the user set.

    Raises:
        OptionError: one of them has no effect.
    """
    for name, needed in _NEEDS.items():
        if name in given and needed not in given:
            raise OptionError(f"{flag(name)} has no effect without {flag(needed)}")


def parse_layer_ranges(text: str) -> tuple[int, ...]:
    """Layer numbers of a list like ``0-5,42-47`` (ends included), ascending, each once.

    Raises:
        OptionError: not such a list, a range that runs backwards, or an absurd number.
    """
    layers: set[int] = set()
    for part in text.split(","):
        first, dash, last = (piece.strip() for piece in part.partition("-"))
        ends = (first, last) if dash else (first,)
        if not all(end.isascii() and end.isdigit() and len(end) <= 9 for end in ends):
            raise OptionError(
                f"{part.strip()!r} is neither a layer number nor a range",
                hint="write layers like 0-5,42-47",
            )
        low, high = int(first), int(ends[-1])
        if high < low:
            raise OptionError(f"the layer range {part.strip()!r} runs backwards")
        if high > MAX_LAYER:
            raise OptionError(f"layer {high} is beyond the highest possible one ({MAX_LAYER})")
        layers.update(range(low, high + 1))
    return tuple(sorted(layers))


def load_tiers(path: str | Path) -> dict[int, str]:
    """Read a tiers file: ``{"0": "4", "1": "ternary"}``, or the same under the key "tiers".

    Returns:
        layer -> tier.

    Raises:
        OptionError: the file is missing, is not such JSON, or names a layer twice.
    """
    try:
        content = json.loads(
            Path(path).read_text(encoding="utf-8"), object_pairs_hook=_object_without_repeats
        )
    except FileNotFoundError:
        raise OptionError(f"no such tiers file: {path}") from None
    except OSError as error:
        raise OptionError(f"cannot read the tiers file {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        reason = str(error) or "it is nested too deeply"
        raise OptionError(f"the tiers file {path} is not valid JSON: {reason}") from None
    if isinstance(content, dict) and set(content) == {"tiers"}:
        content = content["tiers"]
    if not isinstance(content, dict) or not content:
        raise OptionError(
            f"the tiers file {path} does not map layers to tiers",
            hint='it looks like {"0": "4", "1": "ternary"}',
        )
    tiers: dict[int, str] = {}
    for key, tier in content.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 9) or int(key) > MAX_LAYER:
            raise OptionError(f"the tiers file {path}: {key!r} is not a layer number")
        if int(key) in tiers:
            raise OptionError(f"the tiers file {path} names layer {int(key)} twice")
        # A bare 4 can only mean "4".
        tier = str(tier) if isinstance(tier, int) and not isinstance(tier, bool) else tier
        if tier not in TIERS:
            raise OptionError(
                f"the tiers file {path}: {tier!r} for layer {key} is not one of " + ", ".join(TIERS)
            )
        tiers[int(key)] = tier
    return tiers


def _object_without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {repeated!r} appears twice")
    return result


def _one_of(name: str, value: Any, allowed: Iterable[Any]) -> None:
    allowed = tuple(allowed)
    # 3.0 equals 3, but is not what the manifest may hold
    if isinstance(value, (bool, float)) or value not in allowed:
        choices = ", ".join(str(choice) for choice in allowed if choice is not None)
        raise OptionError(f"{flag(name)} {value} is not one of {choices}")


def _check_target(value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1 <= value <= 8:
        raise OptionError(f"--target-bpw {value} is not a number of bits between 1 and 8")


def _check_layer(name: str, layer: Any) -> None:
    if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer <= MAX_LAYER:
        raise OptionError(f"{flag(name)}: {layer!r} is not a layer number")

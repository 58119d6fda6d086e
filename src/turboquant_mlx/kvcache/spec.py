"""How a key-value cache is packed: one record, and the one parser for all its spellings.

Command-line flags, the environment variables of mlx-vlm's server, named presets and the Python
API all end in a :class:`KVSpec`. No MLX here: the planner uses it too.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import OptionError

SCHEMES = ("turboquant", "uniform")
UNIFORM_BITS = (2, 3, 4, 5, 6, 8)
UNIFORM_GROUPS = (32, 64, 128)
GROUPS = (16, 32, 64, 128, 256)
MEAN_TOKENS = 32
"""Tokens whose mean key is taken off every key of a head; before them nothing is packed."""

DEFAULT_MIN_TOKENS = 1
"""The first token draws so much attention that keeping it exact is worth more than a third of a
bit on all the others (see docs/concepts/kv-cache.md)."""

MAX_MIN_TOKENS = 2**20
MAX_START = 2**31 - 1

PRESETS: dict[str, tuple[int, int]] = {"safe": (6, 5), "balanced": (5, 4), "small": (4, 3)}
"""Name -> (bits of keys, bits of values)."""


@dataclass(frozen=True)
class KVSpec:
    """How keys and values of one cache are stored; validated where it is made.

    Attributes:
        key_bits, value_bits: bits of a code, 1 to 8.
        key_scheme, value_scheme: "turboquant" (rotated, one table of values, an 8-bit scale) or
            "uniform" (MLX's own affine quantization in groups, not rotated).
        group_size: values that share a scale; 0 means the whole head for turboquant and 64 for
            uniform. A head that is smaller has one scale.
        min_tokens: so many first tokens of a sequence stay in 16 bits for good.
        start: a sequence stays in 16 bits altogether until it has this many tokens.
        protect_first, protect_last: so many first and last layers stay in 16 bits.

    Raises:
        OptionError: a value that is out of range.
    """

    key_bits: int
    value_bits: int
    key_scheme: str = "turboquant"
    value_scheme: str = "turboquant"
    group_size: int = 0
    min_tokens: int = DEFAULT_MIN_TOKENS
    start: int = 0
    protect_first: int = 0
    protect_last: int = 0

    def __post_init__(self) -> None:
        for side, bits, scheme in (
            ("key", self.key_bits, self.key_scheme),
            ("value", self.value_bits, self.value_scheme),
        ):
            if scheme not in SCHEMES:
                raise OptionError(
                    f"unknown scheme {scheme!r} of {side}s", hint=f"known are {', '.join(SCHEMES)}"
                )
            if not isinstance(bits, int) or not 1 <= bits <= 8:
                raise OptionError(f"{bits} bits of a {side} are not supported (1 to 8 are)")
            if scheme == "uniform" and bits not in UNIFORM_BITS:
                raise OptionError(
                    f"the uniform scheme has no {bits}-bit code for {side}s",
                    hint="it has 2, 3, 4, 5, 6 and 8 bits; turboquant has 1 to 8",
                )
            groups = UNIFORM_GROUPS if scheme == "uniform" else GROUPS
            if self.group_size and self.group_size not in groups:
                raise OptionError(
                    f"a group of {self.group_size} values is not supported by {scheme} {side}s",
                    hint=f"{', '.join(map(str, groups))} are"
                    + ("" if scheme == "uniform" else "; 0 means the whole head"),
                )
        for name, most in (
            ("min_tokens", MAX_MIN_TOKENS),
            ("start", MAX_START),
            ("protect_first", 2**16),
            ("protect_last", 2**16),
        ):
            _check_whole(name, getattr(self, name), most)

    @property
    def mean_tokens(self) -> int:
        """Tokens that the mean key is taken over."""
        return MEAN_TOKENS if self.key_scheme == "turboquant" else 0

    @property
    def warm_tokens(self) -> int:
        """Length up to which a sequence is held in 16 bits: what it needs for the mean key, and
        ``start``."""
        return max(self.min_tokens + self.mean_tokens, self.start)

    def for_window(self, window: int, keep: int = 0) -> KVSpec | None:
        """How the cache of a sliding window is packed, or None for one that stays in 16 bits.

        Such a cache never holds more than ``window`` tokens, so it is packed by the time it is full
        whatever ``start`` is, and of the first tokens only those stay in 16 bits that leave room
        for the mean key. A window of up to ``MEAN_TOKENS`` tokens would never be packed.

        Args:
            window: most tokens that are held. keep: first tokens that are never dropped.
        """
        if window - keep <= self.mean_tokens:
            return None
        first = min(max(self.min_tokens, keep), window - self.mean_tokens)
        return replace(self, min_tokens=first, start=min(self.start, window))

    def group_of(self, scheme: str, width: int) -> int:
        """Values of a head of ``width`` that share a scale.

        Raises:
            OptionError: the group size does not divide the head.
        """
        group = self.group_size or (64 if scheme == "uniform" else width)
        if scheme == "turboquant":
            group = min(group, width)
        if width % group:
            smaller = UNIFORM_GROUPS if scheme == "uniform" else GROUPS
            fitting = ", ".join(str(g) for g in smaller if width % g == 0) or "none"
            raise OptionError(
                f"a group of {group} values does not divide this model's head size {width}",
                hint=f"--kv-group-size takes for it: {fitting}"
                + ("" if scheme == "uniform" else ", or leave it out"),
            )
        return group

    def side_bytes(self, side: str, width: int) -> int:
        """Stored bytes of one token and head of ``side`` ("key" or "value") once it is packed."""
        scheme, bits = (
            (self.key_scheme, self.key_bits)
            if side == "key"
            else (self.value_scheme, self.value_bits)
        )
        groups = width // self.group_of(scheme, width)
        codes = 4 * math.ceil(width * bits / 32)
        return codes + groups * (4 if scheme == "uniform" else 1)

    def token_bytes(self, key_width: int, value_width: int | None = None) -> int:
        """Stored bytes of one packed token in one head, key and value together."""
        other = key_width if value_width is None else value_width
        return self.side_bytes("key", key_width) + self.side_bytes("value", other)

    def describe(self) -> str:
        """The widths as one short phrase: "K3/V4", with the scheme where it is not turboquant."""

        def side(letter: str, bits: int, scheme: str) -> str:
            return f"{letter}{bits}" + (" uniform" if scheme == "uniform" else "")

        return (
            side("K", self.key_bits, self.key_scheme)
            + "/"
            + side("V", self.value_bits, self.value_scheme)
        )


def _check_whole(name: str, value: Any, most: int) -> None:
    if not isinstance(value, int) or not 0 <= value <= most:
        raise OptionError(f"{name} must be a whole number from 0 to {most}, not {value}")


def validate_bits(bits: Any) -> float:
    """``bits`` as a number, if it is a whole or half one from 1 to 8.

    Raises:
        OptionError: it is not.
    """
    value = _number(bits)
    if math.isnan(value):
        raise OptionError(f"{bits!r} is not a number of bits")
    if not math.isfinite(value) or not 1 <= value <= 8 or value * 2 != int(value * 2):
        raise OptionError(
            f"{bits} bits are not supported for the key-value cache",
            hint="whole and half numbers from 1 to 8 are; 3.5 means 3 for keys and 4 for values",
        )
    return value


def split_bits(bits: Any) -> tuple[int, int]:
    """(bits of keys, bits of values): the floor for keys, the ceiling for values, or a preset's.

    Raises:
        OptionError: neither a preset nor a supported number of bits.
    """
    if isinstance(bits, str) and bits.strip().lower() in PRESETS:
        return PRESETS[bits.strip().lower()]
    if isinstance(bits, str) and not re.match(r"\s*[-+.\d]", bits):
        raise OptionError(
            f"{bits!r} is neither a number of bits nor a preset",
            hint=f"presets are {', '.join(PRESETS)}",
        )
    value = validate_bits(bits)
    return math.floor(value), math.ceil(value)


def turboquant_enabled(bits: Any, scheme: str | None = None) -> bool:
    """Whether mlx-vlm's rule picks TurboQuant: by its name, or because the bits are fractional.

    Args:
        bits: number of bits, or None for no quantization.
        scheme: "turboquant", "uniform" or None.

    Raises:
        OptionError: unsupported bits or an unknown scheme.
    """
    if scheme is not None and scheme not in SCHEMES:
        raise OptionError(f"unknown scheme {scheme!r}", hint=f"known are {', '.join(SCHEMES)}")
    if bits is None:
        return False
    value = validate_bits(bits)
    return scheme == "turboquant" or not value.is_integer()


@dataclass(frozen=True)
class KVOptions:
    """What a user said about the cache, by flags or variables; None is "not said".

    Attributes are those of the flags: ``bits`` (a number or the name of a preset), ``key_bits``,
    ``value_bits``, ``scheme``, ``key_scheme``, ``value_scheme``, ``group_size``, ``min_tokens``,
    ``start``.
    """

    bits: Any = None
    key_bits: Any = None
    value_bits: Any = None
    scheme: str | None = None
    key_scheme: str | None = None
    value_scheme: str | None = None
    group_size: int | None = None
    min_tokens: int | None = None
    start: int | None = None


FLAGS = {
    "bits": "--kv-bits",
    "key_bits": "--kv-k-bits",
    "value_bits": "--kv-v-bits",
    "scheme": "--kv-quant-scheme",
    "key_scheme": "--kv-key-scheme",
    "value_scheme": "--kv-value-scheme",
    "group_size": "--kv-group-size",
    "min_tokens": "--kv-min-tokens",
    "start": "--quantized-kv-start",
}
VARIABLES = {
    "bits": "KV_BITS",
    "key_bits": "KV_KEY_BITS",
    "value_bits": "KV_VALUE_BITS",
    "scheme": "KV_QUANT_SCHEME",
    "key_scheme": "KV_KEY_SCHEME",
    "value_scheme": "KV_VALUE_SCHEME",
    "group_size": "KV_GROUP_SIZE",
    "start": "QUANTIZED_KV_START",
}
_WIDTHS = ("bits", "key_bits", "value_bits")
_WHOLE = ("group_size", "start")


def options_from_environment(environment: Mapping[str, str] | None = None) -> KVOptions:
    """What the variables say; an empty one says nothing.

    Raises:
        OptionError: a variable whose value makes no sense, by its name.
    """
    env = os.environ if environment is None else environment
    found: dict[str, Any] = {}
    for name, variable in VARIABLES.items():
        text = env.get(variable, "").strip()
        if not text:
            continue
        if name in _WHOLE:
            if not re.fullmatch(r"[0-9]{1,100}", text):
                raise OptionError(f"{variable} must be a whole number, not {text!r}")
            found[name] = int(text)
        elif name.endswith("scheme"):
            if text.lower() not in SCHEMES:
                raise OptionError(
                    f"{variable} is {text!r}, which is no scheme",
                    hint=f"known are {', '.join(SCHEMES)}",
                )
            found[name] = text.lower()
        else:
            found[name] = text
    return KVOptions(**found)


def resolve(
    flags: KVOptions,
    environment: Mapping[str, str] | None = None,
    *,
    default_scheme: str = "turboquant",
) -> KVSpec | None:
    """The cache that flags and variables ask for together, or None for the plain 16-bit cache.

    A flag wins over its variable. The three widths count as one: where any of them is given as a
    flag, the variables of all three are left aside. Bits of 0 mean no quantization.

    Args:
        flags: what was given on the command line.
        environment: variables, default those of the process.
        default_scheme: where neither a flag nor a variable names one; fractional bits are
            turboquant whatever it is.

    Raises:
        OptionError: an unsupported value, options that exclude each other, an option that could
            have no effect.
    """
    variables = options_from_environment(environment)
    widths, named = (
        (flags, FLAGS)
        if any(getattr(flags, name) is not None for name in _WIDTHS)
        else (variables, VARIABLES)
    )
    sides = _both_sides(widths, named)
    if sides is None:
        _refuse_without_effect(flags, FLAGS)
        if widths.bits is None:  # 0 bits turn off whatever else the variables say
            _refuse_without_effect(variables, VARIABLES)
        return None
    (key_bits, key_half), (value_bits, value_half) = sides

    def chosen(name: str) -> Any:
        own = getattr(flags, name)
        return getattr(variables, name) if own is None else own

    general = chosen("scheme")
    schemes = []
    for name, half in (("key_scheme", key_half), ("value_scheme", value_half)):
        scheme = chosen(name) or general
        if scheme == "uniform" and half:
            raise OptionError(
                f"{named['bits']} {widths.bits} is no width of the uniform scheme",
                hint="half bits need the scheme turboquant",
            )
        schemes.append(scheme or ("turboquant" if half else default_scheme))
    for name, most in (("start", MAX_START), ("min_tokens", MAX_MIN_TOKENS)):
        value = chosen(name)
        if value is not None:
            spelling = (FLAGS if getattr(flags, name) is not None else VARIABLES)[name]
            _check_whole(spelling, value, most)
    start, group, first = chosen("start"), chosen("group_size"), flags.min_tokens
    if first is None:
        first = DEFAULT_MIN_TOKENS if "turboquant" in schemes else 0
    key_scheme, value_scheme = schemes
    return KVSpec(
        key_bits,
        value_bits,
        key_scheme,
        value_scheme,
        group_size=group or 0,
        min_tokens=first,
        start=start or 0,
    )


def _both_sides(
    said: KVOptions, named: Mapping[str, str]
) -> tuple[tuple[int, bool], tuple[int, bool]] | None:
    """((bits, came from half bits) of keys, the same of values), or None for "not packed"."""
    key, value = said.key_bits, said.value_bits
    if said.bits is None:
        if key is None and value is None:
            return None
        if key is None or value is None:
            given, absent = ("key_bits", "value_bits") if value is None else (
                "value_bits", "key_bits")  # fmt: skip
            raise OptionError(
                f"{named[given]} needs {named[absent]} beside it",
                hint=f"{named['bits']} sets both at once",
            )
        return (_side_bits(key, named["key_bits"]), False), (
            _side_bits(value, named["value_bits"]), False)  # fmt: skip
    if named is FLAGS and (key is not None or value is not None):
        given = FLAGS["key_bits" if key is not None else "value_bits"]
        raise OptionError(f"--kv-bits and {given} exclude each other")
    if _is_zero(said.bits):
        for name in ("key_bits", "value_bits"):
            if getattr(said, name) is not None:
                raise OptionError(f"{named['bits']} of 0 and {named[name]} exclude each other")
        return None
    try:
        key_bits, value_bits = split_bits(said.bits)
    except OptionError as error:
        raise OptionError(f"{named['bits']}: {error.message}", hint=error.hint) from None
    half = key_bits != value_bits and str(said.bits).strip().lower() not in PRESETS
    return (
        (key_bits, half) if key is None else (_side_bits(key, named["key_bits"]), False),
        (value_bits, half) if value is None else (_side_bits(value, named["value_bits"]), False),
    )


def _number(bits: Any) -> float:
    """``bits`` as a number; not a number where it is none. Digits are those of ASCII."""
    if isinstance(bits, str) and not bits.isascii():
        return math.nan
    try:
        return float(bits)
    except (TypeError, ValueError):
        return math.nan


def _is_zero(bits: Any) -> bool:
    return _number(bits) == 0


def _side_bits(bits: Any, name: str) -> int:
    value = _number(bits)
    if not (2 <= value <= 8 and value == int(value)):
        raise OptionError(
            f"{name} must be a whole number from 2 to 8, not {bits}",
            hint="half bits are a matter of both sides together: 3.5 is 3 for keys, 4 for values",
        )
    return int(value)


def _refuse_without_effect(said: KVOptions, named: Mapping[str, str]) -> None:
    """What was said about a packed cache where there will be none."""
    for name, spelling in named.items():
        if name not in _WIDTHS and getattr(said, name) is not None:
            raise OptionError(
                f"{spelling} has no effect: the key-value cache is not packed",
                hint=f"{named['bits']} says how many bits it gets",
            )


def is_quantization_aware(name: str | os.PathLike[str] | None) -> bool:
    """Whether a model's name says that it was trained with quantization awareness ("...-qat-...").

    Such a model's authors tuned it to one particular rounding; mlx-vlm leaves its cache alone.
    """
    if name is None:
        return False
    last = os.fspath(name).rstrip("/\\").replace("\\", "/").rsplit("/", 1)[-1]
    return "qat" in re.split(r"[^a-z0-9]+", last.lower())

"""The ``--kv-*`` options, the same for every command that generates. No MLX here."""

from __future__ import annotations

import argparse
import re
from typing import Any

from ..errors import OptionError
from .spec import DEFAULT_MIN_TOKENS, MEAN_TOKENS, PRESETS, SCHEMES, KVOptions

_PRESETS = ", ".join(f"{name} (K{k}/V{v})" for name, (k, v) in PRESETS.items())


def add_kv_options(parser: argparse.ArgumentParser) -> None:
    """Add the group of options about the key-value cache; none has a default of its own, so that a
    variable's value stands where a flag was not given."""
    group = parser.add_argument_group(
        "key-value cache",
        "Keep keys and values of past tokens in fewer bits, packed. Variables stand in for flags\n"
        "that are not given: KV_BITS, KV_KEY_BITS, KV_VALUE_BITS, KV_QUANT_SCHEME, KV_KEY_SCHEME,\n"
        "KV_VALUE_SCHEME, KV_GROUP_SIZE, QUANTIZED_KV_START.",
    )
    group.add_argument(
        "--kv-bits",
        metavar="BITS",
        help="Bits of keys and values, 1 to 8; half a bit goes to the values: 3.5 is 3 for keys "
        f"and 4 for values. Or a preset: {_PRESETS}. 0 keeps 16 bits (default: 16 bits)",
    )
    group.add_argument(
        "--kv-k-bits",
        "--kv-key-bits",
        metavar="BITS",
        help="Bits of keys, 2 to 8, together with --kv-v-bits in place of --kv-bits. Keys need "
        "more than values",
    )
    group.add_argument(
        "--kv-v-bits", "--kv-value-bits", metavar="BITS", help="Bits of values, 2 to 8"
    )
    group.add_argument(
        "--kv-min-tokens",
        type=_whole,
        metavar="N",
        help="Keep the first N tokens in 16 bits for good. The very first draws much attention in "
        f"nearly every model (default: {DEFAULT_MIN_TOKENS}; 0 with the uniform scheme)",
    )
    group.add_argument(
        "--kv-group-size",
        type=_whole,
        metavar="N",
        help="Values of a head that share a scale, 16 to 256: a smaller group is more exact and "
        "costs 8 bits for each (default: the whole head; 64 with the uniform scheme)",
    )
    group.add_argument(
        "--kv-quant-scheme",
        choices=SCHEMES,
        help="How: turboquant rotates and uses a table of values, uniform is MLX's own affine "
        "quantization (default: turboquant)",
    )
    group.add_argument("--kv-key-scheme", choices=SCHEMES, help="The scheme of keys alone")
    group.add_argument("--kv-value-scheme", choices=SCHEMES, help="The scheme of values alone")
    group.add_argument(
        "--quantized-kv-start",
        type=_whole,
        metavar="N",
        help="Pack a sequence when it has N tokens, and keep it in 16 bits until then (default: 0; "
        f"the first {MEAN_TOKENS} tokens always wait for one another)",
    )


def kv_options(args: argparse.Namespace) -> KVOptions:
    """What was given of these options.

    Raises:
        OptionError: a scheme that could have no effect. (Programs that call ours for a cache, as
            mlx-vlm does, always name a scheme, so it is no error there.)
    """
    if args.kv_quant_scheme and args.kv_key_scheme and args.kv_value_scheme:
        raise OptionError(
            "--kv-quant-scheme has no effect beside --kv-key-scheme and --kv-value-scheme"
        )
    return KVOptions(
        bits=args.kv_bits,
        key_bits=args.kv_k_bits,
        value_bits=args.kv_v_bits,
        scheme=args.kv_quant_scheme,
        key_scheme=args.kv_key_scheme,
        value_scheme=args.kv_value_scheme,
        group_size=args.kv_group_size,
        min_tokens=args.kv_min_tokens,
        start=args.quantized_kv_start,
    )


def _whole(text: str) -> Any:
    if not re.fullmatch(r"[0-9]{1,100}", text):
        raise argparse.ArgumentTypeError(f"not a whole number: {text!r}")
    return int(text)

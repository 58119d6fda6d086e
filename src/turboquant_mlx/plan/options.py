"""The options that turboquant-plan and turboquant-doctor share. No MLX here."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from ..cli import CommandParser
from ..errors import OptionError
from ..kvcache.options import add_kv_options, kv_options
from ..kvcache.spec import resolve
from . import DEFAULT_CONTEXT

if TYPE_CHECKING:
    from .machine import Machine
    from .projection import Request


class PlanParser(CommandParser):
    """A parser whose usage errors are JSON as well, where JSON was asked for."""

    json_wanted = False

    def parse(self, argv: Sequence[str] | None) -> argparse.Namespace:
        """``parse_args``; a wish for JSON holds even if the rest cannot be understood."""
        self.json_wanted = "--json" in (sys.argv[1:] if argv is None else argv)
        return self.parse_args(argv)

    def error(self, message: str) -> NoReturn:
        if self.json_wanted:
            from .report import error_dict

            print(json.dumps(error_dict(OptionError(message)), indent=2))
        super().error(message)


def add_shared_options(parser: CommandParser) -> None:
    """Model, context, cache and machine."""
    parser.add_argument(
        "--model",
        required=True,
        help="folder of a model, or a repository of the Hugging Face hub: owner/name, or "
        "owner/name@revision. Of a repository only headers and small files are read",
    )
    parser.add_argument(
        "--context",
        type=_whole,
        metavar="TOKENS",
        help=f"prompt and answer together (default: {DEFAULT_CONTEXT}, or what the model was made "
        "for where that is less)",
    )
    parser.add_argument(
        "--prefill-step-size",
        type=_whole,
        metavar="TOKENS",
        help="tokens of a prompt that are computed at once (default: the largest safe one of "
        "2048, 1024, 512, 256 and 128)",
    )
    parser.add_argument(
        "--ngram-offload",
        action="store_true",
        help="plan with the n-gram table served from disk (Qwen3.8-Flash-Next); no command of this "
        "version does so yet",
    )
    add_kv_options(parser)
    machine = parser.add_argument_group("another machine", "Without these, the one that this is.")
    machine.add_argument(
        "--wired-gb",
        type=_gigabytes,
        metavar="GB",
        help="plan for a Mac with this Metal working set, in GB of 10^9 bytes",
    )
    machine.add_argument(
        "--ram-gb",
        type=_gigabytes,
        metavar="GB",
        help="plan for a Mac with this much memory, as it is sold: 16 means 16 GiB, which are "
        "17.18 * 10^9 bytes",
    )
    parser.add_argument("--json", action="store_true", help="print JSON on standard output")


def request_of(args: argparse.Namespace) -> Request:
    """What the options ask for.

    Raises:
        OptionError: a bad value, or options that contradict each other.
    """
    from .projection import Request

    return Request(
        context=DEFAULT_CONTEXT if args.context is None else args.context,
        kv=resolve(kv_options(args)),
        prefill_step_size=args.prefill_step_size,
        ngram_offload=args.ngram_offload,
        kv_bits=None if args.kv_bits is None else str(args.kv_bits),
        default_context=args.context is None,
    )


def machine_of(args: argparse.Namespace) -> Machine:
    """The machine to plan for."""
    from .machine import described

    return described(args.ram_gb, args.wired_gb)


def _number(check: Callable[[float], bool], wanted: str) -> Callable[[str], float]:
    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and check(value)):
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
        return value

    return convert


def _whole(text: str) -> int:
    return int(
        _number(
            lambda n: 1 <= n <= 2**31 - 1 and n == int(n), "a whole number from 1 to 2147483647"
        )(text)
    )


_gigabytes = _number(lambda n: 0 < n <= 1e6, "a size in GB, above 0 and at most 10^6")

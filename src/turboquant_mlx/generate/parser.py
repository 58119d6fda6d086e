"""The options of ``turboquant-generate``.

Nothing here imports MLX, so ``--help`` and every usage error answer at once. Values that can be
judged without the model are judged here; an option that this version cannot honour is parsed and
refused by ``refuse_unavailable``, never ignored.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

from ..cli import CommandParser
from ..errors import OptionError
from ..kvcache.options import add_kv_options

DEFAULT_MAX_TOKENS = 200
DEFAULT_TEMP = 0.7
DEFAULT_REP_CTX = 256
MAX_SEED = 2**64 - 1
# 1 / temp must be a number of 32 bits that is neither infinite nor zero.
MIN_TEMP, MAX_TEMP = 1e-6, 1e6
MAX_REP_CTX = 2**31 - 1  # MLX slices with numbers of 32 bits

DESCRIPTION = "Answer a prompt with a TurboQuant model, or with any model that mlx-lm can run."

EPILOG = """\
examples:
  turboquant-generate --model ./SmolLM2-3bit --prompt "What is the capital of France?" --temp 0
  cat question.txt | turboquant-generate --model ./SmolLM2-3bit --max-tokens 500

The answer goes to standard output, everything else to standard error. Sampling defaults that
the model's generation_config.json gives (top-p, top-k, repetition penalty) are used unless an
option overrides them; its temperature is not: --temp has its own default.
"""

# Options whose machinery is still missing, as (attribute, flag, what to do instead).
UNAVAILABLE = (
    ("ngram_offload", "--ngram-offload", "leave it out: the table is then kept in memory"),
)


def build_parser() -> argparse.ArgumentParser:
    """The parser of ``turboquant-generate``.

    ``--top-p``, ``--top-k``, ``--rep-penalty`` and ``--rep-ctx`` are None when not given, so that
    the caller can tell a default from a wish.
    """
    parser = CommandParser(
        prog="turboquant-generate", description=DESCRIPTION, epilog=EPILOG, add_help=True
    )
    parser.add_argument(
        "--model",
        required=True,
        help="Folder of the model, or a Hugging Face repo id: converted by turboquant-convert, "
        "by the predecessor of this package, or a plain MLX or Hugging Face model",
    )
    parser.add_argument(
        "--prompt",
        help="What to ask. Without it the prompt is read from standard input, if that is not "
        'a terminal. One that begins with a dash is written --prompt="-..."',
    )
    parser.add_argument(
        "--max-tokens",
        type=_integer(at_least=1),
        default=DEFAULT_MAX_TOKENS,
        help="Stop after this many generated tokens, at least 1 (default: %(default)s)",
    )
    _add_sampling_options(parser)
    _add_thinking_and_stop_options(parser)
    _add_model_options(parser)
    add_kv_options(parser)
    _add_unavailable_options(parser)
    return parser


def refuse_unavailable(args: argparse.Namespace) -> None:
    """Refuse options whose machinery this version lacks.

    Raises:
        OptionError: naming the first such option that was given.
    """
    for attribute, flag, instead in UNAVAILABLE:
        if getattr(args, attribute) is not None:
            raise OptionError(f"{flag} is not available yet in this version", hint=instead)


def refuse_contradictions(args: argparse.Namespace) -> None:
    """Refuse options that cannot hold together.

    Raises:
        OptionError: when --min-tokens asks for more than --max-tokens permits.
    """
    if args.min_tokens > args.max_tokens:
        raise OptionError(
            f"--min-tokens {args.min_tokens} asks for more than --max-tokens {args.max_tokens} "
            "permits"
        )


def _add_sampling_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--temp",
        type=_temperature,
        default=DEFAULT_TEMP,
        help="Temperature: 0 always takes the likeliest token, higher is more varied (default: "
        "%(default)s, whatever generation_config.json says)",
    )
    group.add_argument(
        "--top-p",
        type=_number(at_most=1.0),
        help="Sample only from the likeliest tokens that together hold this share of the "
        "probability. Default: as generation_config.json says, else off; 0 or 1 turns it off",
    )
    group.add_argument(
        "--top-k",
        type=_integer(),
        help="Sample only from this many likeliest tokens. Default: as generation_config.json "
        "says, else off; 0 turns it off. With neither --top-k nor --top-p any token can come "
        "up, a stray '</think>' where the answer should end included",
    )
    group.add_argument(
        "--rep-penalty",
        type=_number(),
        help="Make tokens less likely that were used already (1.05 is mild). Default: as "
        "generation_config.json says, else off; 0 or 1 turns it off. Helps thinking models at "
        "few bits out of loops; harmful where numbers must be repeated exactly",
    )
    group.add_argument(
        "--rep-ctx",
        type=_integer(at_least=1, at_most=MAX_REP_CTX),
        help="How many of the latest tokens, prompt included, the repetition penalty looks at "
        f"(default: {DEFAULT_REP_CTX})",
    )
    group.add_argument(
        "--seed",
        type=_integer(at_most=MAX_SEED),
        metavar="N",
        help="Seed of the sampler: the same seed gives the same answer on the same machine and "
        "versions (default: a new one each time)",
    )


def _add_thinking_and_stop_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("thinking and stopping")
    group.add_argument(
        "--no-think",
        action="store_true",
        help="Ask the chat template for an answer without thinking (enable_thinking=False). A "
        "template that does not know the switch is reported",
    )
    group.add_argument(
        "--multi-think",
        action="store_true",
        help="Permit more than one '</think>'. Without this a second one is masked once the "
        "model has written one, so that a model at few bits cannot start its answer over",
    )
    group.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TOKEN",
        help="Also stop at this token, given as its text ('</assistant>') or its id (24); it "
        "must be a single token. Repeatable. The end tokens that the model's own files name "
        "always count",
    )
    group.add_argument(
        "--min-tokens",
        type=_integer(),
        default=0,
        help="Mask every end and stop token until this many tokens were generated; the prompt "
        "does not count (default: %(default)s). For models that would end at once",
    )


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "--fast",
        action="store_true",
        help="Leave out the QJL correction: faster, a little less exact. No effect on a model "
        "converted without --use-qjl",
    )
    group.add_argument(
        "--cpu-expand",
        choices=("auto", "always", "never"),
        default="auto",
        help="On a machine without a GPU, expand packed and 16-bit weights once to fp32: much "
        "faster, but needs the memory; auto expands what fits (default: %(default)s). Does not "
        "apply on a GPU",
    )
    group.add_argument(
        "--cpu-awake",
        action="store_true",
        help="On a Linux machine without a GPU, keep the processor cores from falling asleep "
        "between the many small steps of a token: faster where nothing else runs, at the price "
        "of power",
    )
    group.add_argument(
        "--prefill-step-size",
        type=_integer(at_least=1),
        default=2048,
        metavar="TOKENS",
        help="Read the prompt in pieces of so many tokens; smaller ones take less memory and more "
        "time (default: %(default)s)",
    )
    group.add_argument(
        "--verbose",
        action="store_true",
        help="Say on stderr which back-end runs the model and which of its weights kernels read "
        "as they are stored",
    )
    group.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="Run Python code that comes with the model (tokenization_*.py, and the model_file "
        "of a model that is not ours). Kimi K3 needs it for its tokenizer when loaded by repo "
        "id; a local Kimi K3 folder does not",
    )


def _add_unavailable_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("not available yet in this version (refused)")
    group.add_argument(
        "--ngram-offload",
        action="store_const",
        const=True,
        help="Serve an n-gram embedding table from files instead of GPU memory",
    )


def _integer(at_least: int = 0, at_most: int | None = None) -> Callable[[str], int]:
    """An argparse type for whole numbers in a range."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"not a whole number: {text!r}") from None
        if value < at_least:
            raise argparse.ArgumentTypeError(f"must be at least {at_least}, not {text}")
        if at_most is not None and value > at_most:
            raise argparse.ArgumentTypeError(f"must be at most {at_most}, not {text}")
        return value

    return parse


def _temperature(text: str) -> float:
    """An argparse type for 0 and what logits can be divided by."""
    value = _number()(text)
    if value and not MIN_TEMP <= value <= MAX_TEMP:
        raise argparse.ArgumentTypeError(
            f"must be 0 or between {MIN_TEMP:g} and {MAX_TEMP:g}, not {text}"
        )
    return value


def _number(at_most: float | None = None) -> Callable[[str], float]:
    """An argparse type for finite numbers that are not negative."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"not a number: {text!r}") from None
        if not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"must be finite, not {text}")
        if value < 0:
            raise argparse.ArgumentTypeError(f"must not be negative, not {text}")
        if at_most is not None and value > at_most:
            raise argparse.ArgumentTypeError(f"must be at most {at_most:g}, not {text}")
        return value

    return parse

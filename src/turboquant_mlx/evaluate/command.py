"""``python -m turboquant_mlx.evaluate``: parse the options, evaluate, print a table, write JSON.

MLX is imported only when the work begins, so ``--help`` and usage errors answer at once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import cli
from ..errors import OptionError
from .options import (
    AFFINE_GROUP_SIZE,
    BITS,
    DEFAULT_BITS,
    DEFAULT_CACHE_GB,
    DEFAULT_SAMPLES,
    DEFAULT_SEQ_LEN,
    GROUP_SIZES,
    EvaluateOptions,
)
from .report import check_output

if TYPE_CHECKING:
    from .report import EvaluationReport

PROGRAM = "python -m turboquant_mlx.evaluate"

_DESCRIPTION = """\
Measure how much text quantization costs a model: quantize it in several ways and compare each with
the 16-bit model. Scores are perplexity, KL(16-bit || quantized) in nats per token over the whole
vocabulary, and how often both have the same likeliest token.

examples:
  python -m turboquant_mlx.evaluate --hf-path models/SmolLM2 --text book.txt -n 8
  python -m turboquant_mlx.evaluate --hf-path models/SmolLM2 --compare smol-3bit -n 8
"""

_EPILOG = """\
Every row runs with float32 activations, so that only the stored weights differ. The row "noise
floor" is the 16-bit model with 16-bit activations: a divergence below its own means nothing.
Bits per weight count every stored byte of the quantized layers.
"""


def build_parser() -> cli.CommandParser:
    """The command's parser."""
    parser = cli.CommandParser(prog=PROGRAM, description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument(
        "--hf-path",
        "--model",
        dest="hf_path",
        metavar="PATH",
        required=True,
        help="folder of the 16-bit model, or its repository on the Hugging Face hub. A model that "
        "is quantized already is scored alone: perplexity only",
    )
    _add_rows(parser.add_argument_group("what is compared"))
    _add_text(parser.add_argument_group("text"))
    _add_output(parser.add_argument_group("results and everything else"))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    return cli.run(_evaluate, argv)


def _evaluate(argv: Sequence[str] | None) -> None:
    args = build_parser().parse_args(argv)
    _check_included(args)
    options = EvaluateOptions(
        bits=None if args.bits is None else tuple(args.bits),
        group_size=args.group_size,
        affine=args.affine is not False,
        qjl=args.qjl is not False,
        variants=tuple(args.variant),
        compare=tuple(args.compare),
        noise_floor=args.noise_floor,
        num_samples=args.num_samples,
        seq_len=args.seq_len,
        text=args.text,
        raw_text=args.raw_text,
        cache_dir=args.cache_dir,
        cache_gb=args.cache_limit,
        trust_remote_code=args.trust_remote_code,
    )
    if args.output == "":
        raise OptionError("--output is empty", hint="leave it out for a new file in this folder")
    output = Path(args.output or default_output(args.hf_path))
    check_output(output)

    from .pipeline import evaluate

    def on_row(report: EvaluationReport) -> None:
        # what is finished survives an interruption of the rest
        report.write(output)
        print(report.rows[-1].line(), file=sys.stderr, flush=True)

    # Libraries print (model code anything): not into the result.
    with contextlib.redirect_stdout(sys.stderr):
        report = evaluate(args.hf_path, options, progress=True, say=_say, on_row=on_row)
    report.write(output)
    print(json.dumps(report.to_dict(), indent=2) if args.json else report.format_table())
    print(f"written to {output}", file=sys.stderr)


def _check_included(args: argparse.Namespace) -> None:
    """Refuse a wish for rows of widths where there are no widths."""
    for wish, name in ((args.affine, "--include-affine"), (args.qjl, "--include-qjl")):
        if wish and args.compare and args.bits is None:
            raise OptionError(
                f"{name} has no effect without --bits when --compare is given",
                hint="name the widths of these rows, for example --bits 3",
            )


def default_output(hf_path: str) -> str:
    """A new file name in the current folder, from the model's name and the time."""
    name = re.sub(r"[^\w.-]+", "-", Path(hf_path).resolve().name).strip("-") or "model"
    return f"evaluate-{name}-{time.strftime('%Y%m%d-%H%M%S')}.json"


def _say(kind: str, text: str) -> None:
    (cli.warn if kind == "warning" else cli.notice)(text)


def _add_rows(group: Any) -> None:
    group.add_argument(
        "--bits",
        "-b",
        type=int,
        nargs="+",
        choices=BITS,
        metavar="BITS",
        help="widths to quantize to with this package's defaults, one row each (default: "
        f"{' '.join(map(str, DEFAULT_BITS))}; none with --compare)",
    )
    group.add_argument(
        "--group-size",
        "-g",
        type=int,
        choices=GROUP_SIZES,
        help="group size of these rows and of the affine ones (default: that of "
        f"turboquant-convert, and {AFFINE_GROUP_SIZE} for affine)",
    )
    group.add_argument(
        "--variant",
        action="append",
        default=[],
        metavar="OPTIONS",
        help="one more row for each width, converted with these options of turboquant-convert; "
        "write --variant='--attn-bits 4'. May be repeated",
    )
    group.add_argument(
        "--compare",
        nargs="+",
        action="extend",
        default=[],
        metavar="FOLDER",
        help="converted models to score as they are: made by this package, by the older "
        "turboquant-mlx-full, or by mlx-lm",
    )
    group.add_argument(
        "--include-affine",
        dest="affine",
        action="store_true",
        default=None,
        help="compare with MLX's own formats on the same layers: affine at each width, with 4 "
        "bits also mxfp4 and nvfp4 (the default)",
    )
    group.add_argument(
        "--no-affine",
        dest="affine",
        action="store_false",
        default=None,
        help="leave MLX's own formats out",
    )
    group.add_argument(
        "--include-qjl",
        dest="qjl",
        action="store_true",
        default=None,
        help="include a row with the 1-bit sketch of --use-qjl for each width (the default)",
    )
    group.add_argument(
        "--no-qjl",
        dest="qjl",
        action="store_false",
        default=None,
        help="leave the rows with sketches out",
    )
    group.add_argument(
        "--no-noise-floor",
        dest="noise_floor",
        action="store_false",
        help="do not run the 16-bit model a second time with 16-bit activations",
    )


def _add_text(group: Any) -> None:
    group.add_argument(
        "--text",
        metavar="FILE",
        help="text to score on, UTF-8 (default: the test set of WikiText-2, from the hub)",
    )
    group.add_argument(
        "--raw-text",
        action="store_true",
        help="keep words and punctuation apart as WikiText has them. Otherwise a text in that "
        "form is put back together first",
    )
    group.add_argument(
        "--num-samples",
        "-n",
        type=int,
        default=DEFAULT_SAMPLES,
        metavar="N",
        help="chunks of text, spread evenly over it, each scored on its own (default: "
        "%(default)s, or as many as the text has room for). 8 are enough to compare methods",
    )
    group.add_argument(
        "--seq-len",
        type=int,
        default=DEFAULT_SEQ_LEN,
        metavar="N",
        help="tokens in a chunk (default: %(default)s)",
    )


def _add_output(group: Any) -> None:
    group.add_argument(
        "--output",
        "-o",
        metavar="FILE",
        help="JSON file for all results, rewritten after each row (default: a new file in the "
        "current folder, named after the model and the time)",
    )
    group.add_argument(
        "--json", action="store_true", help="print the same JSON instead of the table"
    )
    group.add_argument(
        "--cache-dir",
        metavar="FOLDER",
        help="where the 16-bit model's predictions are kept, so that the next evaluation on the "
        "same text need not run it (default: ~/.cache/turboquant-mlx-kit/evaluate)",
    )
    group.add_argument(
        "--cache-limit",
        type=float,
        default=DEFAULT_CACHE_GB,
        metavar="GB",
        help="size that this folder may grow to (default: %(default)g). Predictions that do not "
        "fit are computed again for every row; 0 keeps none",
    )
    group.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="let Python code that comes with a model run",
    )

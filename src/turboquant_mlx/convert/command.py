"""``turboquant-convert``: parse the options, convert, print what was done.

MLX is imported only when a conversion begins, so ``--help`` and usage errors answer at once.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from .. import cli
from ..errors import OptionError
from .options import (
    BITS,
    CODECS,
    DTYPES,
    EXTRAS_BITS,
    EXTRAS_GROUP_SIZES,
    GROUP_SIZES,
    MLP_GROUP_SIZES,
    ROTATIONS,
    ConvertOptions,
    check_needs,
    load_tiers,
    parse_layer_ranges,
)

T = TypeVar("T")

DEFAULT_MLX_PATH = "mlx_model"

_DESCRIPTION = """\
Convert a Hugging Face model to a small TurboQuant folder that MLX runs.

example:
  turboquant-convert --hf-path HuggingFaceTB/SmolLM2-135M-Instruct --mlx-path smol-3bit --bits 3
"""


def build_parser() -> cli.CommandParser:
    """The command's parser. Options that are not given leave no trace in the namespace."""
    parser = cli.CommandParser(
        prog="turboquant-convert",
        description=_DESCRIPTION,
        argument_default=argparse.SUPPRESS,
    )
    _add_source_and_target(parser.add_argument_group("source and target"))
    _add_precision(parser.add_argument_group("how weights are stored"))
    _add_experts(
        parser.add_argument_group(
            "routed experts",
            "Without effect on a model that has none; the command then says so.",
        )
    )
    _add_extras(parser.add_argument_group("everything else"))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    return cli.run(_convert, argv)


def _convert(argv: Sequence[str] | None) -> None:
    given = vars(build_parser().parse_args(argv))
    source: str = given.pop("hf_path")
    target: str = given.pop("mlx_path", DEFAULT_MLX_PATH)
    overwrite: bool = given.pop("overwrite", False)
    as_json: bool = given.pop("json", False)
    check_needs(given)
    if "bits" in given and "target_bpw" in given:
        raise OptionError("--bits and --target-bpw exclude each other")
    ConvertOptions(**given)  # a bad combination is reported before MLX is loaded

    from .pipeline import convert

    report = convert(source, target, overwrite=overwrite, progress=True, say=_say, **given)
    if as_json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        print(report.format_table())
        print(f"\nRun it:\n  {_run_line(report.output_path)}")


def _say(kind: str, text: str) -> None:
    (cli.warn if kind == "warning" else cli.notice)(text)


def _run_line(path: str) -> str:
    return f'turboquant-generate --model {shlex.quote(path)} --prompt "Hello"'


def _add_source_and_target(group: Any) -> None:
    group.add_argument(
        "--hf-path",
        "--model",
        dest="hf_path",
        metavar="PATH",
        required=True,
        help="folder of the model to convert, or its repository on the Hugging Face hub",
    )
    group.add_argument(
        "--mlx-path",
        metavar="PATH",
        help=f"folder to write; it must not exist (default: {DEFAULT_MLX_PATH})",
    )
    group.add_argument(
        "--overwrite",
        action="store_true",
        help="replace the folder to write if it exists; the old one goes only when the new one "
        "is complete",
    )
    group.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="let Python code that comes with the source run: its tokenizer (tokenization_*.py) "
        "and the model code that its config names (model_file). A local Kimi K3 folder's "
        "tokenizer needs no such trust",
    )
    group.add_argument(
        "--keep-mtp",
        action="store_true",
        help="copy the source's multi-token-prediction head, which mlx-lm would drop, into the "
        "result at its source precision. Nothing uses it yet; no effect on a source without one",
    )
    group.add_argument(
        "--streaming",
        action="store_true",
        help="bound the memory: write each layer when it is quantized and free it, for models "
        "larger than memory. Same bytes as without; not together with --dtype",
    )
    group.add_argument(
        "--json", action="store_true", help="print the summary as JSON on standard output"
    )


def _add_precision(group: Any) -> None:
    group.add_argument(
        "--bits",
        "-b",
        type=int,
        choices=BITS,
        help="bits per weight, before scales (default: 3)",
    )
    group.add_argument(
        "--target-bpw",
        type=float,
        metavar="X",
        help="instead of --bits: share out 2, 3 and 4 bits so that the quantized layers take at "
        "most X bits per weight, every stored byte counted, and parts that matter more get more. "
        "What each part matters is measured, which takes about a minute for a small model; the "
        "whole 16-bit model has to fit into memory. Layers that another option gives a width keep "
        "it",
    )
    group.add_argument(
        "--codec",
        choices=CODECS,
        help="how bits become weights (default: trellis). trellis: the codes of neighbours overlap "
        "(TCQ); scalar: each weight has a code of its own, which loses a sixth (4 bits) to two "
        "fifths (3 bits) more with 0.2 bits per weight more, but converts in half the time",
    )
    group.add_argument(
        "--group-size",
        "-g",
        type=int,
        choices=GROUP_SIZES,
        help="consecutive weights that share one scale of 8 bits (default: those of one rotation "
        "block of a row; with --codec scalar 32). Where it does not divide "
        "a layer's input width, that layer takes the next smaller size that does, down to 16",
    )
    group.add_argument(
        "--attn-bits",
        type=int,
        choices=BITS,
        help="bits of attention layers (q, k, v, o) and of what takes their place: linear "
        "attention, state-space, convolution and recurrent blocks (default: as --bits)",
    )
    group.add_argument(
        "--mlp-bits",
        type=int,
        choices=BITS,
        help="bits of MLP layers and of experts, shared ones too (default: as --bits)",
    )
    group.add_argument(
        "--mlp-group-size",
        type=int,
        choices=MLP_GROUP_SIZES,
        help="group size of MLP layers and experts (default: as --group-size)",
    )
    group.add_argument(
        "--rotation",
        choices=ROTATIONS,
        help="how inputs are mixed before quantization, which spreads outliers (default: "
        "hadamard). hadamard: in the longest blocks that the width permits, at most 1024; "
        "blockwise_hadamard: in blocks that stay inside one scale group; none: not at all",
    )
    group.add_argument(
        "--rotation-seed",
        type=int,
        metavar="N",
        help="seed of the random signs of the rotation (default: 42)",
    )
    group.add_argument(
        "--no-balance",
        dest="balance",
        action="store_false",
        help="skip the run of a short text through the model, which shows how much each input "
        "channel of a layer matters. It takes seconds to minutes and is worth about one bit per "
        "weight",
    )
    group.add_argument(
        "--balance-text",
        type=_usage(_text_file),
        metavar="FILE",
        help="UTF-8 text for that run: 1024 tokens of it, in pieces spread over its first million "
        "characters (default: a mixed text that comes with this package)",
    )
    group.add_argument(
        "--error-feedback",
        action="store_true",
        help="round for the least error of every layer's output instead of its weights' (GPTQ), "
        "on a text that the model writes first. Takes off a fifth (4 bits) to more than half (2 "
        "bits) of what quantization loses; takes minutes for a small model, and says how long "
        "before it starts. To write that text, the whole 16-bit model has to fit into memory",
    )
    group.add_argument(
        "--feedback-text",
        type=_usage(_text_file),
        metavar="FILE",
        help="UTF-8 text for --error-feedback instead of the model's own: 8192 tokens of it, in "
        "pieces spread over its first million characters. Text like that which the model is for "
        "helps much more than any other",
    )
    group.add_argument(
        "--use-qjl",
        action="store_true",
        help="store one more bit per weight, a sketch of what rounding lost; turboquant-generate "
        "--fast skips it",
    )
    group.add_argument(
        "--dtype",
        choices=DTYPES,
        help="cast the model to this type before anything else (default: the source's own)",
    )


def _add_experts(group: Any) -> None:
    group.add_argument(
        "--ternary-experts",
        action="store_true",
        help="store routed experts as three values {-c, 0, +c}: 1.6 bits per weight and its scale",
    )
    group.add_argument(
        "--expert-down-bits",
        type=int,
        choices=BITS,
        help="bits of the experts' down projections, the most sensitive part of an expert "
        "(default: as the rest of the expert)",
    )
    group.add_argument(
        "--protect-expert-layers",
        type=_usage(parse_layer_ranges),
        metavar="LAYERS",
        help="layers whose routed experts get --protect-bits instead of what the other experts "
        "get: numbers and inclusive ranges, for example 0-5,42-47. Changes their bits only, not "
        "their group size; a layer without experts is reported",
    )
    group.add_argument(
        "--protect-bits",
        type=int,
        choices=BITS,
        help="bits of the experts in --protect-expert-layers (default: 3)",
    )
    group.add_argument(
        "--expert-layer-tiers",
        type=_usage(lambda path: load_tiers(_text_file(path))),
        metavar="JSON",
        help='JSON file that gives layers their own expert bits: {"0": "4", "1": "ternary"}, '
        'each one of "ternary", "2", "3", "4"; layers that it leaves out keep what the other '
        "options say. Excludes --protect-expert-layers and --expert-down-bits",
    )


def _add_extras(group: Any) -> None:
    group.add_argument(
        "--quantize-extras",
        action="store_true",
        help="also store what is otherwise left at source precision, embeddings above all, in "
        "MLX's affine format. Worth it where a large vocabulary or lookup table is much of the "
        "model. Routers and block indexers are left alone even so",
    )
    group.add_argument(
        "--extras-bits",
        type=int,
        choices=EXTRAS_BITS,
        help="bits for --quantize-extras (default: 4)",
    )
    group.add_argument(
        "--extras-group-size",
        type=int,
        choices=EXTRAS_GROUP_SIZES,
        help="group size for --quantize-extras (default: 64)",
    )


def _text_file(path: str) -> str:
    """Refuse what is there and not a file: reading a pipe may never end, a device never does."""
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise OptionError(
            f"{path} is a pipe or a device", hint="save what comes out of it as a file first"
        )
    return path


def _usage(convert: Callable[[str], T]) -> Callable[[str], T]:
    """Let argparse report an OptionError of ``convert`` as its own usage error."""

    def converted(text: str) -> T:
        try:
            return convert(text)
        except OptionError as error:
            hint = f" ({error.hint})" if error.hint else ""
            raise argparse.ArgumentTypeError(error.message + hint) from None

    return converted

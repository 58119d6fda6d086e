"""``turboquant-plan``: will a model fit, before a byte of its weights is downloaded.

Exit codes: 0 it runs, 1 it does not (or nobody can tell), or its files are missing or damaged,
2 bad usage. MLX is imported only for --convert and --all-bits.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .. import cli
from ..errors import OptionError, TurboQuantError
from .options import PlanParser, add_shared_options, machine_of, request_of

# What does the work is imported when there is work: --help has to answer at once.
if TYPE_CHECKING:
    from .headers import ModelFiles
    from .projection import Plan

_DESCRIPTION = """\
Say whether a model fits a machine, and how to run it, from headers and small files alone.

examples:
  turboquant-plan --model ./SmolLM2-3bit
  turboquant-plan --model Qwen/Qwen3-30B-A3B --convert bits=3 --ram-gb 32
  turboquant-plan --model ./model --context 65536 --kv-k-bits 8 --kv-v-bits 3 --json

exit codes: 0 it runs, 1 it does not, or files are missing or damaged, 2 bad usage
"""

# What --all-bits tries: the widths of the weights, and of the cache as (keys, values).
_WEIGHT_BITS = (4, 3, 2)
_CACHES: tuple[tuple[int, int] | None, ...] = (None, (8, 8), (8, 3), (4, 4), (3, 4))


def build_parser() -> PlanParser:
    """The command's parser."""
    parser = PlanParser(prog="turboquant-plan", description=_DESCRIPTION)
    add_shared_options(parser)
    group = parser.add_argument_group("what if")
    group.add_argument(
        "--convert",
        metavar="OPTIONS",
        help="plan this 16-bit model as turboquant-convert would leave it, exact to the byte: "
        "options of that command, separated by commas, for example "
        '"bits=3,group-size=64,quantize-extras"; "" stands for its defaults',
    )
    group.add_argument(
        "--all-bits",
        action="store_true",
        help="add a table of weights at 2, 3 and 4 bits (of a 16-bit model) with several caches, "
        "and what of it fits",
    )
    group.add_argument(
        "--speed",
        action="store_true",
        help="add a bound of the speed from the memory bandwidth, where that is known",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    return cli.run(_command, argv)


def _command(argv: Sequence[str] | None) -> int:
    args = build_parser().parse(argv)
    from .report import error_dict, plan_dict, plan_text

    try:
        plan = _plan(args)
    except TurboQuantError as error:
        if args.json:
            print(json.dumps(error_dict(error), indent=2))
        cli.print_error(error)
        return exit_code(error)
    print(json.dumps(plan_dict(plan), indent=2) if args.json else plan_text(plan))
    return cli.EXIT_OK if plan.verdict.runnable else cli.EXIT_FINDING


def exit_code(error: TurboQuantError) -> int:
    """2 for what the user typed, 1 for what was found."""
    return cli.EXIT_ERROR if isinstance(error, OptionError) else cli.EXIT_FINDING


def _plan(args: Any) -> Plan:
    from .headers import open_model
    from .projection import plan_model
    from .weights import check_model

    request = request_of(args)
    machine = machine_of(args)
    model = open_model(args.model)
    check_model(model)
    if args.convert is None:
        plan = plan_model(model, machine, request)
    else:
        from .conversion import plan_converted

        plan = plan_converted(model, args.convert, machine, request)
    extras = dict(plan.extras)
    if args.all_bits:
        extras["table"] = _table(model, plan)
    if args.speed:
        extras["speed"] = _speed(plan)
    return replace(plan, extras=extras)


def _table(source: ModelFiles, plan: Plan) -> list[dict[str, Any]]:
    """Weights by caches: the model as it is, and a 16-bit source at each width."""
    from ..kvcache.spec import KVSpec
    from .projection import plan_model
    from .weights import weigh

    models = [(plan.weights.precision, plan.model)]
    if weigh(source).quantization is None:
        from .conversion import convert_projection, parse_options

        for bits in _WEIGHT_BITS:
            text = f"bits={bits}"
            result = convert_projection(source, parse_options(text), text)
            models.append((f"TurboQuant {bits}-bit", result.as_model(source)))
    rows = []
    for label, model in models:
        for widths in _CACHES:
            kv = None if widths is None else KVSpec(*widths)
            request = replace(plan.projection.request, kv=kv)
            row = plan_model(model, plan.machine, request)
            rows.append(
                {
                    "weights": label,
                    "kv": "16-bit" if kv is None else kv.describe(),
                    "weight_bytes": row.projection.weights.bytes,
                    "kv_bytes": row.projection.kv.bytes,
                    "prefill_step_size": row.projection.step,
                    "peak_bytes": row.projection.peak,
                    "mode": row.verdict.mode,
                    "needs_wired_bump": row.verdict.needs_wired_bump,
                }
            )
    return rows


def _speed(plan: Plan) -> dict[str, Any]:
    """Tokens per second if reading memory were all there is to do."""
    from .machine import GB

    bandwidth, projection = plan.machine.bandwidth_gb_s, plan.projection
    if bandwidth is None:
        return {"tokens_per_second": None, "basis": "the memory bandwidth is not known"}
    if projection.kv.bytes is None:
        return {"tokens_per_second": None, "basis": "the key-value cache is not known"}
    read = plan.weights.read_per_token + projection.kv.bytes
    basis = (
        f"{read / GB:.2f} GB are read per token at {projection.request.context} tokens, "
        f"and {plan.machine.name} reads {bandwidth:g} GB/s"
    )
    return {
        "tokens_per_second": bandwidth * GB / read,
        "read_per_token_bytes": read,
        "bandwidth_gb_s": bandwidth,
        "basis": basis,
    }

"""``turboquant-doctor``: is a model whole, is this installation in order, and do they suit.

Reads, and changes nothing. Exit codes: 0 nothing failed (warnings do not count), 1 a check
failed, 2 bad usage.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import cli
from ...errors import OptionError, TurboQuantError
from ..options import PlanParser, add_shared_options, machine_of, request_of

# What does the work is imported when there is work: --help has to answer at once.
if TYPE_CHECKING:
    from ..machine import Machine
    from ..projection import Plan, Request
    from .check import Check

_DESCRIPTION = """\
Check a model's files, this installation, and whether the model fits. Changes nothing.

examples:
  turboquant-doctor --model ./SmolLM2-3bit
  turboquant-doctor --model ./SmolLM2-3bit --context 32768 --kv-bits 4 --json
  turboquant-doctor --self-test

exit codes: 0 nothing failed, 1 a check failed, 2 bad usage
"""

_MARKS = {"pass": "ok  ", "warn": "warn", "fail": "FAIL"}


def build_parser() -> PlanParser:
    """The command's parser."""
    parser = PlanParser(prog="turboquant-doctor", description=_DESCRIPTION)
    add_shared_options(parser)
    parser.add_argument(
        "--self-test",
        action="store_true",
        help="also compute: rotation, packing, kernels and cache on this device against their "
        "references, with timings, for bug reports. Needs no --model",
    )
    for action in parser._actions:
        if action.dest == "model":
            action.required = False
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    return cli.run(_command, argv)


def _command(argv: Sequence[str] | None) -> int:
    parser = build_parser()
    args = parser.parse(argv)
    if args.model is None and not args.self_test:
        parser.error("--model is needed, or --self-test to check this installation alone")
    if args.model is None:
        idle = _given_for_a_model(parser, args)
        if idle:
            parser.error(f"{idle[0]} has no effect without --model")
    from ..report import error_dict
    from .environment import check_environment

    try:
        request, machine = request_of(args), machine_of(args)
    except OptionError as error:
        if args.json:
            print(json.dumps(error_dict(error), indent=2))
        raise
    checks: list[Check] = []
    plan = None
    if args.model is not None:
        found, plan = examine(args.model, machine, request)
        checks += found
    checks += check_environment(machine)
    if args.self_test:
        from .self_test import self_test

        checks += self_test()
    if args.json:
        print(json.dumps(_as_dict(checks, plan), indent=2))
    else:
        print(_as_text(checks, plan))
    return cli.EXIT_FINDING if any(check.status == "fail" for check in checks) else cli.EXIT_OK


# Options that also concern the machine or the output.
_NOT_OF_A_MODEL = ("model", "self_test", "json", "ram_gb", "wired_gb", "help")


def _given_for_a_model(parser: PlanParser, args: argparse.Namespace) -> list[str]:
    """Options that the user gave and that only say how a model is to run."""
    return [
        action.option_strings[0]
        for action in parser._actions
        if action.dest not in _NOT_OF_A_MODEL and getattr(args, action.dest) != action.default
    ]


def examine(name: str, machine: Machine, request: Request) -> tuple[list[Check], Plan | None]:
    """All checks of one model.

    Returns:
        the checks, and the plan where the files could be read.
    """
    from ..headers import open_model
    from ..projection import plan_model
    from .check import failed, warned
    from .environment import check_disk
    from .files import check_files, unreadable

    try:
        model = open_model(name)
    except TurboQuantError as error:
        return [unreadable(error)], None
    checks = check_files(model)
    if model.path is None:
        from huggingface_hub import constants

        checks.append(
            warned(
                "model.remote",
                f"{model.name} is on the hub: only headers and small files were checked",
                "download it, then run the doctor on the folder",
            )
        )
        checks.append(check_disk(Path(constants.HF_HUB_CACHE), model.weight_bytes))
    try:
        plan = plan_model(model, machine, request)
    except TurboQuantError as error:
        if not any(check.status == "fail" for check in checks):
            checks.append(failed("fit.projection", error.message, error.hint or ""))
        return checks, None
    checks.append(_fit(plan))
    return checks, plan


def _fit(plan: Plan) -> Check:
    from .check import failed, passed, warned

    verdict, peak = plan.verdict, plan.projection.peak
    fix = "; ".join(verdict.commands)
    if verdict.runnable and verdict.flags:
        fix = "; ".join([*verdict.commands, f"then run with {shlex.join(verdict.flags)}"])
    if not verdict.runnable:
        name = "fit.projection"
        if verdict.mode == "unknown":
            return failed(name, verdict.reason, "; ".join(plan.warnings))
        return failed(name, verdict.reason, fix or "turboquant-plan shows the parts of the sum")
    known = "" if peak is None else f", peak {peak / 1e9:.2f} GB"
    message = f"{verdict.mode}: {verdict.reason}{known}"
    if verdict.needs_wired_bump:
        return warned("fit.projection", message, fix)
    return passed("fit.projection", message)


def _as_dict(checks: Sequence[Check], plan: Plan | None) -> dict[str, Any]:
    from ..report import SCHEMA, plan_dict, verdict_dict

    return {
        "schema": SCHEMA,
        "verdict": None if plan is None else verdict_dict(plan),
        "checks": [check.to_dict() for check in checks],
        "flags": [] if plan is None else list(plan.verdict.flags),
        "plan": None if plan is None else plan_dict(plan),
    }


def _as_text(checks: Sequence[Check], plan: Plan | None) -> str:
    from .check import counted

    width = max(len(check.id) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{_MARKS[check.status]}  {check.id.ljust(width)}  {check.message}")
        if check.fix and check.status != "pass":
            lines.append(f"{'':6}{'':{width}}  hint: {check.fix}")
    counts = {status: sum(c.status == status for c in checks) for status in _MARKS}
    lines.append("")
    warned = counted(counts["warn"], "warning")
    lines.append(f"{counts['pass']} passed, {warned}, {counts['fail']} failed")
    if plan is not None:
        lines += [f"warning: {text}" for text in plan.warnings]
        lines += [f"note: {text}" for text in plan.notes]
    return "\n".join(lines)

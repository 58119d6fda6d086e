"""A plan as text for people and as JSON for programs; both from the same records."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..convert.report import format_bytes, format_columns
from .machine import GB, GIB

if TYPE_CHECKING:
    from ..errors import TurboQuantError
    from .projection import Plan, Term

SCHEMA = 2
"""Version of the JSON; 1 was the predecessor's, whose keys all mean the same here."""

_HEADLINES = {
    "resident": "FITS: all in memory",
    "streaming": "DOES NOT FIT as a whole",
    "no-fit": "DOES NOT FIT",
    "unknown": "UNKNOWN",
}


def plan_dict(plan: Plan) -> dict[str, Any]:
    """The plan as JSON values."""
    model, weights, machine = plan.model, plan.weights, plan.machine
    projection, verdict = plan.projection, plan.verdict
    request = projection.request
    kv = request.kv
    return {
        "schema": SCHEMA,
        "model": {
            "path": model.name,
            "name": model.name.rstrip("/").rpartition("/")[2] or model.name,
            "type": model.model_type,
            "source": model.source,
            "revision": model.revision,
            "precision": weights.precision,
            "quantization": weights.quantization,
            "bits": weights.bits,
            "group_size": weights.group_size,
            "n_layers": weights.layers,
            "n_moe_layers": weights.moe_layers,
            "n_experts": weights.n_experts,
            "experts_per_tok": weights.experts_per_token,
            "is_moe": weights.is_moe,
            "total_bytes": weights.total,
            "loaded_bytes": weights.loaded,
            "expert_bytes": weights.experts,
            "resident_bytes": weights.resident,
            "ngram_bytes": weights.ngram,
            "tower_bytes": weights.senses,
            "towers_loaded": weights.senses_loaded,
            "read_from_hub_bytes": model.bytes_read,
        },
        "machine": {
            "assumed": machine.assumed,
            "backend": machine.backend,
            "name": machine.name or None,
            "ram_bytes": machine.ram_bytes,
            "wss_bytes": machine.device_bytes,
            "wss_estimated": machine.device_basis.endswith("(estimated)"),
            "ceiling_basis": machine.ceiling_basis,
        },
        "projection": {
            "context": request.context,
            "kv_bits": None if kv is None or kv.key_bits != kv.value_bits else kv.key_bits,
            "kv_key_bits": None if kv is None else kv.key_bits,
            "kv_value_bits": None if kv is None else kv.value_bits,
            "ngram_offload": request.ngram_offload,
            "ngram_offloaded_bytes": weights.ngram if request.ngram_offload else 0,
            "weight_bytes": projection.weights.bytes,
            "expanded_weight_bytes": projection.expanded.bytes,
            "kv_bytes_per_token": projection.kv_per_token,
            "kv_bytes": projection.kv.bytes,
            "kv_note": projection.kv_note,
            "prefill_step_size": projection.step,
            "prefill_workspace_bytes": projection.workspace.bytes,
            "runtime_reserve_bytes": projection.reserve.bytes,
            "allocated_bytes": projection.allocated,
            "peak_bytes": projection.peak,
            "ceiling_bytes": projection.ceiling.bytes,
            "headroom_bytes": projection.headroom,
            "ram_share": _share(projection.peak, machine.ram_bytes),
            "hot_expert_bytes": projection.experts_hot,
            "token_expert_bytes": weights.token_experts,
            "basis": {name: term.basis for name, term in projection.terms.items()},
        },
        "verdict": verdict_dict(plan),
        "flags": list(verdict.flags),
        "commands": list(verdict.commands),
        "warnings": list(plan.warnings),
        "notes": list(plan.notes),
        **plan.extras,
    }


def verdict_dict(plan: Plan) -> dict[str, Any]:
    """The verdict alone, as the doctor repeats it."""
    verdict = plan.verdict
    return {
        "mode": verdict.mode,
        "runnable": verdict.runnable,
        "needs_wired_bump": verdict.needs_wired_bump,
        "reason": verdict.reason,
    }


def error_dict(error: TurboQuantError) -> dict[str, Any]:
    """An error as JSON values."""
    kind = type(error).__name__
    return {
        "schema": SCHEMA,
        "error": {"kind": kind, "message": error.message, "hint": error.hint},
    }


def plan_text(plan: Plan) -> str:
    """The plan for a terminal; reads the same without colour, and has none."""
    model, weights, verdict = plan.model, plan.weights, plan.verdict
    lines = [
        f"{model.name}  ({model.model_type or 'unknown type'}, {weights.precision})",
        *_origin(plan),
        "",
        *_sum(plan),
        "",
        f"{_HEADLINES[verdict.mode]}: {verdict.reason}"
        if verdict.mode != "resident" or verdict.needs_wired_bump
        else _HEADLINES["resident"],
    ]
    lines += _section("run with", _run_with(plan))
    lines += _section("first", verdict.commands)
    lines += extras_text(plan.extras)
    lines += [f"warning: {text}" for text in plan.warnings]
    lines += [f"note: {text}" for text in plan.notes]
    return "\n".join(lines)


def _run_with(plan: Plan) -> list[str]:
    """The flags as one line that a shell takes as it is, and what they ask for as a comment."""
    flags, kv = plan.verdict.flags, plan.projection.request.kv
    if not flags:
        return []
    packed = any(flag.startswith("--kv-") for flag in flags)
    comment = f"  # key-value cache {kv.describe()}" if kv is not None and packed else ""
    return [shlex.join(flags) + comment]


def _origin(plan: Plan) -> list[str]:
    model, weights = plan.model, plan.weights
    lines = []
    if model.source == "huggingface":
        read = format_bytes(model.bytes_read)
        lines.append(f"  from the hub, revision {model.revision}: {read} read, no weights")
    if weights.is_moe:
        count = f"{weights.n_experts or 'an unknown number of'} experts"
        per_token = weights.experts_per_token or "an unknown number"
        layers = f"in {weights.moe_layers} layers, {per_token} of them per token"
        lines.append(f"  {count} {layers}: {format_bytes(weights.experts)}")
    return lines


def _sum(plan: Plan) -> list[str]:
    projection, machine = plan.projection, plan.machine
    rows = [
        _row(name, term)
        for name, term in projection.terms.items()
        if term.bytes is None or term.bytes > 0 or name != "expanded weights"
    ]
    peak = projection.peak
    known = f"at least {format_bytes(projection.known)}" if peak is None else format_bytes(peak)
    rows.append(("peak", known, ""))
    ceiling = projection.ceiling
    name = f"{machine.backend} ceiling"
    rows.append((name, _bytes(ceiling.bytes), ceiling.basis))
    if projection.headroom is not None:
        rows.append(("headroom", _signed(projection.headroom), ""))
    width = max(len(row[0]) for row in rows)
    size = max(len(row[1]) for row in rows)
    lines = [f"  {a.ljust(width)}  {b.rjust(size)}  {c}".rstrip() for a, b, c in rows]
    if projection.kv_note:
        lines.append(f"  caches: {projection.kv_note}")
    if machine.ram_bytes is not None:
        ram = f"{machine.ram_bytes / GB:.2f} GB ({machine.ram_bytes / GIB:.1f} GiB)"
        lines.append(f"  main memory: {ram}{', assumed' if machine.assumed else ''}")
    return lines


def _row(name: str, term: Term) -> tuple[str, str, str]:
    return name, _bytes(term.bytes), term.basis


def _bytes(size: int | None) -> str:
    return "unknown" if size is None else format_bytes(size)


def _signed(size: int) -> str:
    return format_bytes(size) if size >= 0 else "-" + format_bytes(-size)


def _share(part: int | None, whole: int | None) -> float | None:
    return None if part is None or not whole else part / whole


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return [f"{title}:", *(f"  {line}" for line in lines)] if lines else []


def extras_text(extras: Mapping[str, Any]) -> list[str]:
    """The tables that --convert, --all-bits and --speed add."""
    lines: list[str] = []
    conversion = extras.get("conversion")
    if conversion:
        size = format_bytes(conversion["weight_bytes"])
        kind = "exact" if conversion["exact"] else "a bound: the conversion shares out the bits"
        lines += [
            f"converted with {conversion['options_text']}: {size}, {kind} "
            f"(the source has {format_bytes(conversion['source_bytes'])})"
        ]
        lines += [f"  note: {text}" for text in conversion["notices"]]
    table = extras.get("table")
    if table:
        header = ("weights", "cache", "weights size", "cache size", "peak", "fits")
        rows = [
            (
                row["weights"],
                row["kv"],
                _bytes(row["weight_bytes"]),
                _bytes(row["kv_bytes"]),
                _bytes(row["peak_bytes"]),
                row["mode"],
            )
            for row in table
        ]
        lines += ["", *format_columns(header, rows, left=2)]
    speed = extras.get("speed")
    if speed:
        if speed["tokens_per_second"] is None:
            lines.append(f"speed: unknown, {speed['basis']}")
        else:
            lines.append(
                f"speed: at most {speed['tokens_per_second']:.1f} tokens/s, a bound: "
                f"{speed['basis']}"
            )
    return lines

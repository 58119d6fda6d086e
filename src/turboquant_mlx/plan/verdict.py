"""The answer that follows from a projection: does it run, and how to ask for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..kvcache.spec import DEFAULT_MIN_TOKENS, KVSpec
from .machine import GB, MIB, Machine

if TYPE_CHECKING:
    from .projection import Projection
    from .weights import Weights

# Whether this version has a command that streams experts from disk.
CAN_STREAM = False

Mode = Literal["resident", "streaming", "no-fit", "unknown"]


@dataclass(frozen=True)
class Verdict:
    """The answer.

    Attributes:
        mode: "resident" (all in memory), "streaming" (it would fit if its experts came from disk),
            "no-fit", "unknown".
        needs_wired_bump: whether it is resident only with a raised wired limit.
        reason: one line.
        flags: what to add to a command line, and why.
        commands: shell commands that help, such as the sysctl line of a Mac.
    """

    mode: Mode
    needs_wired_bump: bool = False
    reason: str = ""
    flags: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()

    @property
    def runnable(self) -> bool:
        """Whether this version runs it on the machine, perhaps after the commands."""
        return self.mode == "resident" or (self.mode == "streaming" and CAN_STREAM)


def judge(weights: Weights, machine: Machine, projection: Projection) -> Verdict:
    """Whether and how the model runs."""
    ceiling, peak = machine.ceiling_bytes, projection.peak
    if ceiling is None:
        return Verdict("unknown", reason="the memory of the machine is unknown")
    flags = _flags(projection)
    if peak is None:
        if projection.known > (machine.raised_ceiling_bytes or ceiling) and not weights.is_moe:
            return Verdict("no-fit", reason="the known parts alone are more than the machine has")
        return Verdict("unknown", reason="a part of what it takes is unknown", flags=flags)
    if peak <= ceiling:
        return Verdict("resident", reason="it fits", flags=flags)
    raised = machine.raised_ceiling_bytes
    if raised is not None and peak <= raised:
        limit = _wired_limit_mib(peak, raised)
        return Verdict(
            "resident",
            needs_wired_bump=True,
            reason="it fits only if the wired limit is raised",
            flags=flags,
            commands=(f"sudo sysctl iogpu.wired_limit_mb={limit}",),
        )
    return _judge_streaming(weights, projection, flags)


def _judge_streaming(weights: Weights, projection: Projection, flags: tuple[str, ...]) -> Verdict:
    hot, cliff = projection.experts_hot, weights.token_experts
    if hot is None or cliff is None:
        return Verdict("no-fit", reason="it needs more memory than the machine has")
    if hot < cliff:
        return Verdict(
            "no-fit",
            reason=f"even with experts streamed from disk, {hot / GB:.2f} GB are left for them and "
            f"one token uses {cliff / GB:.2f} GB",
        )
    if weights.quantization != "turboquant":
        return Verdict(
            "no-fit",
            reason="it needs more memory than the machine has; --convert shows what would be left "
            "of it after a conversion",
        )
    missing = "" if CAN_STREAM else ", which this version cannot do"
    return Verdict(
        "streaming",
        reason=f"its experts would have to be streamed from disk{missing}: "
        f"{hot / GB:.1f} GB are left for them, {hot / weights.experts:.0%} of them all; below "
        f"{cliff / GB:.2f} GB every token would wait for the disk",
        flags=flags,
    )


def _flags(projection: Projection) -> tuple[str, ...]:
    """Options of turboquant-generate; each has to exist there."""
    flags = []
    request = projection.request
    kv = request.kv
    if kv is not None:
        flags.append(f"{_kv_flags(kv)}  (key-value cache {kv.describe()})")
    return tuple(flags)


def _kv_flags(kv: KVSpec) -> str:
    """The options that ask for a packing."""
    flags = [f"--kv-k-bits {kv.key_bits} --kv-v-bits {kv.value_bits}"]
    for name, scheme in (("key", kv.key_scheme), ("value", kv.value_scheme)):
        if scheme != "turboquant":
            flags.append(f"--kv-{name}-scheme {scheme}")
    if kv.group_size:
        flags.append(f"--kv-group-size {kv.group_size}")
    if kv.min_tokens != DEFAULT_MIN_TOKENS:
        flags.append(f"--kv-min-tokens {kv.min_tokens}")
    if kv.start:
        flags.append(f"--quantized-kv-start {kv.start}")
    return " ".join(flags)


def _wired_limit_mib(peak: int, most: int) -> int:
    """The limit to set: the peak with a tenth to spare, in MiB as sysctl counts."""
    return min(-(-int(peak * 1.1) // MIB), most // MIB)

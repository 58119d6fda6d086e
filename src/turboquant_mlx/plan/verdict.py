"""The answer that follows from a projection: does it run, and how to ask for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..kvcache.spec import DEFAULT_MIN_TOKENS, KVSpec, split_bits
from .machine import GB, MIB, Machine

if TYPE_CHECKING:
    from .projection import Projection, Request
    from .weights import Weights

# Whether this version has a command that streams experts from disk.
CAN_STREAM = False
DEFAULT_CHUNK = 2048
"""Tokens of a prefill chunk of turboquant-generate and mlx-lm where nothing is said."""

Mode = Literal["resident", "streaming", "no-fit", "unknown"]


@dataclass(frozen=True)
class Verdict:
    """The answer.

    Attributes:
        mode: "resident" (all in memory), "streaming" (it would fit if its experts came from disk),
            "no-fit", "unknown".
        needs_wired_bump: whether it is resident only with a raised wired limit.
        reason: one line.
        flags: what to add to a turboquant-generate command, one word of it each.
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
    flags = _flags(projection, chunk=False)
    if peak is None:
        if projection.known > (machine.raised_ceiling_bytes or ceiling) and not weights.is_moe:
            return Verdict("no-fit", reason="the known parts alone are more than the machine has")
        return Verdict("unknown", reason="a part of what it takes is unknown", flags=flags)
    if peak <= ceiling:
        return Verdict("resident", reason="it fits", flags=_flags(projection, chunk=True))
    raised = machine.raised_ceiling_bytes
    if raised is not None and peak <= raised:
        limit = _wired_limit_mib(peak, raised)
        return Verdict(
            "resident",
            needs_wired_bump=True,
            reason="it fits only if the wired limit is raised",
            flags=_flags(projection, chunk=True),
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


def _flags(projection: Projection, *, chunk: bool) -> tuple[str, ...]:
    """Options of turboquant-generate; each has to exist there.

    Args:
        chunk: whether a chunk that was chosen here is worth asking for, which it is not where
            none of them makes the model fit. One that the user chose always is.
    """
    request = projection.request
    flags = list(kv_flags(request) or ()) if request.kv is not None else []
    if projection.step != DEFAULT_CHUNK and (chunk or request.prefill_step_size is not None):
        flags += ["--prefill-step-size", str(projection.step)]
    return tuple(flags)


def kv_flags(request: Request) -> tuple[str, ...] | None:
    """The options that ask for the packing of a request, as the words of a command line.

    Returns:
        the words, none for 16 bits, or None where no options of the commands ask for this packing:
        one side of a single bit beside a wider one, and layers kept in 16 bits, are for Python.
    """
    kv = request.kv
    if kv is None:
        return ()
    if kv.protect_first or kv.protect_last:
        return None
    words = _widths(kv, request.kv_bits)
    if words is None:
        return None
    for name, scheme in (("key", kv.key_scheme), ("value", kv.value_scheme)):
        if scheme != "turboquant":
            words += [f"--kv-{name}-scheme", scheme]
    turboquant = "turboquant" in (kv.key_scheme, kv.value_scheme)
    for flag, value, usual in (
        ("--kv-group-size", kv.group_size, 0),
        ("--kv-min-tokens", kv.min_tokens, DEFAULT_MIN_TOKENS if turboquant else 0),
        ("--quantized-kv-start", kv.start, 0),
    ):
        if value != usual:
            words += [flag, str(value)]
    return tuple(words)


def _widths(kv: KVSpec, said: str | None) -> list[str] | None:
    """The words for the widths: the user's own where they mean this, else the shortest."""
    pair = (kv.key_bits, kv.value_bits)
    if said is not None and split_bits(said) == pair:
        return ["--kv-bits", said.strip()]
    whole = kv.key_bits == kv.value_bits
    # Half bits are turboquant's alone.
    half = kv.value_bits == kv.key_bits + 1 and kv.key_scheme == kv.value_scheme == "turboquant"
    if whole or half:
        return ["--kv-bits", f"{sum(pair) / 2:g}"]
    if min(pair) < 2:
        return None
    return ["--kv-k-bits", str(kv.key_bits), "--kv-v-bits", str(kv.value_bits)]


def _wired_limit_mib(peak: int, most: int) -> int:
    """The limit to set: the peak with a tenth to spare, in MiB as sysctl counts."""
    return min(-(-int(peak * 1.1) // MIB), most // MIB)

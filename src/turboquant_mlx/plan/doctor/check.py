"""One finding of the doctor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ...errors import TurboQuantError

Status = Literal["pass", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """What was looked at, and what was found.

    Attributes:
        id: stable name, for scripts.
        status: "pass", "warn" (runs, but the user should know) or "fail".
        message: one line; names the file or tensor at fault.
        fix: what to do, "" where nothing is to be done.
    """

    id: str
    status: Status
    message: str
    fix: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def passed(name: str, message: str) -> Check:
    """A check that found nothing."""
    return Check(name, "pass", message)


def warned(name: str, message: str, fix: str = "") -> Check:
    """Something to know about."""
    return Check(name, "warn", message, fix)


def failed(name: str, message: str, fix: str = "") -> Check:
    """Something that keeps the model from running."""
    return Check(name, "fail", message, fix)


def counted(number: int, noun: str) -> str:
    """A number and a noun that agrees with it."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def attempt(name: str, work: Callable[[], str], status: Status = "fail") -> Check:
    """Run ``work``; its text is the message of a pass, an error of ours the one of a failure."""
    try:
        return passed(name, work())
    except TurboQuantError as error:
        return Check(name, status, error.message, error.hint or "")

"""Checks of the installation and of the machine; none of them needs a model."""

from __future__ import annotations

import importlib.metadata
import shutil
from pathlib import Path

from ...convert.report import format_bytes
from ..machine import Machine
from .check import Check, failed, passed, warned

DISTRIBUTION = "turboquant-mlx-kit"
IMPORT_NAME = "turboquant_mlx"

# As in pyproject.toml, where a test compares them: the metadata of a source tree may be absent.
RANGES = {
    "mlx": ">=0.32.4,<0.33",
    "mlx-lm": ">=0.32.2,<0.33",
    "transformers": ">=5.7,<6",
}
OPTIONAL_RANGES = {"mlx-vlm": ">=0.7.10,<0.8"}


def check_environment(machine: Machine) -> list[Check]:
    """Distributions, versions, back-end."""
    return [check_duplicates(), *check_versions(), *check_backend(), check_memory(machine)]


def check_duplicates() -> Check:
    """Another package that installs into the same import name overwrites files of ours."""
    found = sorted(set(importlib.metadata.packages_distributions().get(IMPORT_NAME, [])))
    others = [name for name in found if name != DISTRIBUTION]
    if not others:
        return passed("env.duplicates", f"only one package provides {IMPORT_NAME}")
    names = " and ".join(found)
    return failed(
        "env.duplicates",
        f"{names} provide{'s' if len(found) == 1 else ''} {IMPORT_NAME}, the import name of "
        f"{DISTRIBUTION}",
        f"pip uninstall {' '.join(found)}, then install {DISTRIBUTION} again",
    )


def check_versions() -> list[Check]:
    """Libraries that this package is made for, in the versions that it was tested with."""
    checks = [_check_version(name, wanted, False) for name, wanted in RANGES.items()]
    return checks + [_check_version(name, wanted, True) for name, wanted in OPTIONAL_RANGES.items()]


def _check_version(name: str, wanted: str, optional: bool) -> Check:
    identifier = "env." + name.replace("-", "_")
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        if optional:
            return passed(identifier, f"{name} is not installed (only models that see need it)")
        return failed(identifier, f"{name} is not installed", f'pip install "{name}{wanted}"')
    if in_range(version, wanted):
        return passed(identifier, f"{name} {version}")
    return warned(
        identifier,
        f"{name} {version} is outside of {wanted}, for which this package is made",
        f'pip install "{name}{wanted}"',
    )


def in_range(version: str, wanted: str) -> bool:
    """Whether a version is at least the first and below the second bound of ``>=a,<b``."""
    low, _, high = wanted.partition(",<")
    number = _numbers(version)
    return _numbers(low.removeprefix(">=")) <= number < _numbers(high)


def _numbers(version: str) -> tuple[int, ...]:
    numbers = []
    for part in version.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def check_backend() -> list[Check]:
    """Which back-end MLX has here, and whether it computes; imports MLX."""
    try:
        import mlx.core as mx

        from ...kernels.dispatch import why_backend

        reason = why_backend()
        value = mx.sum(mx.arange(8, dtype=mx.float32) @ mx.ones((8, 8))).item()
    except Exception as error:  # a broken installation raises whatever the loader raises
        text = " ".join(str(error).split()) or type(error).__name__
        return [
            failed(
                "env.backend",
                f"MLX does not work here: {text}",
                'on Linux, install one of the extras: pip install "turboquant-mlx-kit[cpu]" or '
                "[cuda]",
            )
        ]
    if value != 224.0:
        return [failed("env.backend", f"MLX computes {value} where it should compute 224")]
    if reason.startswith("cpu"):
        return [warned("env.backend", f"no GPU: {reason}", "it runs, but slowly")]
    return [passed("env.backend", reason)]


def check_memory(machine: Machine) -> Check:
    """Whether memory is free now, whatever the machine has in all."""
    from ...layers.memory import available_memory_bytes

    free = available_memory_bytes()
    if machine.assumed or machine.ram_bytes is None:
        return passed("machine.memory", f"{format_bytes(free)} free on this machine")
    share = free / machine.ram_bytes
    message = f"{format_bytes(free)} of {format_bytes(machine.ram_bytes)} free"
    if share < 0.15:
        return warned("machine.memory", message, "close other programs before loading a model")
    return passed("machine.memory", message)


def check_disk(folder: Path, needed: int) -> Check:
    """Whether a download fits the disk."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    message = f"{format_bytes(free)} free, the download takes {format_bytes(needed)}"
    if free < needed:
        return failed("machine.disk", message, f"make room on the disk that holds {folder}")
    return passed("machine.disk", message)

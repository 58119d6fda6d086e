"""The outcome of an evaluation: one record, shown as a table or written as JSON.

No MLX and no NumPy here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..checkpoint.target import os_errors
from ..convert.report import format_bytes, format_columns
from ..errors import OutputError

REPORT_SCHEMA = 1

SOURCE_ROW = "16-bit model"
NOISE_ROW = "noise floor"


@dataclass(frozen=True)
class Row:
    """The scores of one candidate.

    Attributes:
        name: what the table calls it.
        method: "source", "noise floor", "affine", "mxfp4", "nvfp4", "turboquant" or "folder".
        bits, group_size: as asked for, None where a default decided.
        options: of the conversion, for TurboQuant folders.
        quantized_weights, quantized_bytes, bits_per_weight: of the quantized layers, in stored
            bytes; 0, 0 and None where nothing is quantized.
        model_bytes: all tensors of the model.
        tokens: predictions that were scored.
        perplexity: on them.
        kl_mean, kl_error, kl_median, kl_p99: KL(16-bit model || candidate) in nats per token; the
            error is the standard error of the mean over chunks. None without a 16-bit model.
        top1: share of predictions whose likeliest token is that of the 16-bit model.
        chunk_nll, chunk_kl: mean of each chunk, in nats per token.
        prepare_seconds, score_seconds: wall-clock time.
    """

    name: str
    method: str
    bits: int | None
    group_size: int | None
    options: dict[str, Any]
    quantized_weights: int
    quantized_bytes: int
    bits_per_weight: float | None
    model_bytes: int
    tokens: int
    perplexity: float
    kl_mean: float | None
    kl_error: float | None
    kl_median: float | None
    kl_p99: float | None
    top1: float | None
    chunk_nll: list[float] = field(default_factory=list)
    chunk_kl: list[float] = field(default_factory=list)
    prepare_seconds: float = 0.0
    score_seconds: float = 0.0

    def line(self) -> str:
        """The row in one sentence, as it is told while the rest is still running."""
        parts = [f"perplexity {self.perplexity:.3f}"]
        if self.kl_mean is not None and self.method != "source":
            parts.insert(0, f"KL {self.kl_mean:.4f}")
        if self.bits_per_weight is not None:
            parts.append(f"{self.bits_per_weight:.2f} bits per weight")
        return f"{self.name}: {', '.join(parts)}"


@dataclass
class EvaluationReport:
    """All rows, and what they were measured with.

    Attributes:
        model: the model as the user named it.
        text: {"name", "sha256", "joined"} of the text.
        chunks: {"count", "length", "scored_tokens"}.
        environment: machine, device and versions.
        rows: in the order of the table.
        complete: whether all rows are there.
        seconds: wall-clock time so far.
    """

    model: str
    text: dict[str, Any]
    chunks: dict[str, Any]
    environment: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    complete: bool = False
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values, with the version of this layout under "schema"."""
        return {"schema": REPORT_SCHEMA, **asdict(self)}

    def write(self, path: Path) -> None:
        """Write the JSON file, whole or not at all.

        Raises:
            OutputError: it cannot be written.
        """
        partial = _partial(path)
        with os_errors(f"{path} cannot be written"):
            try:
                partial.write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")
                os.replace(partial, path)
            finally:
                partial.unlink(missing_ok=True)

    def format_table(self) -> str:
        """The table for people, with a line about what was measured above it."""
        chunks, name = self.chunks, self.text["name"]
        head = (
            f"{self.model} on {name}: {_plural(chunks['count'], 'chunk')} of {chunks['length']} "
            f"tokens, {chunks['scored_tokens']:,} predictions"
        )
        with_kl = any(row.kl_mean is not None for row in self.rows)
        header: Sequence[str] = ("", "bits/weight", "size", "perplexity")
        if with_kl:
            header = (*header, "KL (nats)", "+-", "median", "99 %", "same top token")
        cells = [self._cells(row, with_kl) for row in self.rows]
        return "\n".join([head, "", *format_columns(header, cells, left=1)])

    @staticmethod
    def _cells(row: Row, with_kl: bool) -> tuple[str, ...]:
        bits = "-" if row.bits_per_weight is None else f"{row.bits_per_weight:.2f}"
        cells = (row.name, bits, format_bytes(row.model_bytes), _number(row.perplexity, 3))
        if not with_kl:
            return cells
        if row.method == "source":
            return (*cells, "0", "", "", "", "")
        return (
            *cells,
            _number(row.kl_mean, 4),
            _number(row.kl_error, 4),
            _number(row.kl_median, 4),
            _number(row.kl_p99, 3),
            "" if row.top1 is None else f"{100 * row.top1:.1f} %",
        )


def check_output(path: Path) -> None:
    """Make sure that a file can be written before the long work begins.

    Raises:
        OutputError: it is a folder or a device, its folder is missing or not writable, or its name
            is too long.
    """
    with os_errors(f"{path} cannot be written"):
        _check_output(path)


def _check_output(path: Path) -> None:
    if path.is_dir():
        raise OutputError(f"{path} is a folder, not a file to write to")
    if path.exists() and not path.is_file():
        # the file that is written takes the place of what was there
        raise OutputError(f"{path} is a device or a pipe, not a file to write to")
    if not path.parent.is_dir():
        raise OutputError(f"{path} cannot be written, there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise OutputError(f"{path} cannot be written, {path.parent} is not writable")
    _partial(path).touch()
    _partial(path).unlink()


def _partial(path: Path) -> Path:
    """Where a file is written before it takes its name."""
    return path.with_name(f".{path.name}.partial-{os.getpid()}")


def _number(value: float | None, digits: int) -> str:
    if value is None:
        return ""
    return f"{value:,.{digits}f}" if value < 1e6 else f"{value:.3g}"


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")

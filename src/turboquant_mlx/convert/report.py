"""What a conversion did, in true numbers: one record, shown as a table or as JSON.

Sizes are stored bytes, never nominal widths. No MLX here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

REPORT_SCHEMA = 1

_UNITS = ("B", "kB", "MB", "GB", "TB")


Row = dict[str, Any]


@dataclass(frozen=True)
class ConvertReport:
    """The outcome of one conversion.

    Attributes:
        output_path: folder that was written.
        source: the source as the user named it.
        parameters: logical parameters of the model (a quantized weight counts its O * I).
        source_bytes, stored_bytes: bytes of all tensors before and after.
        quantized_weights, quantized_bytes, bits_per_weight: totals over ``by_kind``. Bits per
            weight is all stored bytes of the quantized weights (codes, scales, tables,
            multipliers, sketches; not biases) times 8, over their number.
        by_kind: quantized modules of one role that are stored in one way, as
            {"role", "method", "modules", "weights", "bytes", "bits_per_weight"}.
        kept: modules in the source's precision, as {"reason", "modules", "parameters", "bytes"}.
        dropped: tensors of the source that the result does not hold, as
            {"reason", "tensors", "bytes"}; None where a number is not known.
        notices, warnings: what the user should know of the plan, or may have to act on.
        seconds: wall-clock time.
    """

    output_path: str
    source: str
    parameters: int
    source_bytes: int
    stored_bytes: int
    quantized_weights: int
    quantized_bytes: int
    bits_per_weight: float
    by_kind: list[Row] = field(default_factory=list)
    kept: list[Row] = field(default_factory=list)
    dropped: list[Row] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values, with the version of this layout under "schema"."""
        return {"schema": REPORT_SCHEMA, **asdict(self)}

    def format_table(self) -> str:
        """The summary for people: totals, what was quantized how, what was left and why."""
        sections = [self._totals(), self._quantized_table(), self._kept_table(), self._dropped()]
        return "\n\n".join("\n".join(section) for section in sections if section)

    def _totals(self) -> list[str]:
        ratio = self.source_bytes / self.stored_bytes if self.stored_bytes else 0.0
        return [
            f"Converted {self.source} to {self.output_path}",
            "",
            f"  parameters       {self.parameters:,}",
            f"  size             {format_bytes(self.source_bytes)} before, "
            f"{format_bytes(self.stored_bytes)} after ({ratio:.2f} times smaller)",
            f"  bits per weight  {self.bits_per_weight:.2f} (all stored bytes of the quantized "
            "layers)",
            f"  time             {format_seconds(self.seconds)}",
        ]

    def _quantized_table(self) -> list[str]:
        rows = [
            (
                row["role"],
                row["method"],
                f"{row['modules']:,}",
                f"{row['weights']:,}",
                format_bytes(row["bytes"]),
                f"{row['bits_per_weight']:.2f}",
            )
            for row in self.by_kind
        ]
        header = ("quantized", "as", "modules", "weights", "size", "bits/weight")
        return format_columns(header, rows, left=2)

    def _kept_table(self) -> list[str]:
        rows = [
            (
                row["reason"],
                f"{row['modules']:,}",
                f"{row['parameters']:,}",
                format_bytes(row["bytes"]),
            )
            for row in self.kept
        ]
        return format_columns(("left as it was", "modules", "parameters", "size"), rows, left=1)

    def _dropped(self) -> list[str]:
        rows = [
            (
                row["reason"],
                "-" if row["tensors"] is None else f"{row['tensors']:,}",
                "-" if row["bytes"] is None else format_bytes(row["bytes"]),
            )
            for row in self.dropped
        ]
        return format_columns(("not taken over", "tensors", "size"), rows, left=1)


def format_columns(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int) -> list[str]:
    """Lines of a table, the first ``left`` columns flush left, the others flush right.

    A table without rows has no lines.
    """
    if not rows:
        return []
    widths = [max(len(line[i]) for line in (header, *rows)) for i in range(len(header))]
    lines = []
    for line in (header, *rows):
        cells = [
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        lines.append(("  " + "  ".join(cells)).rstrip())
    return lines


def format_bytes(count: int) -> str:
    """A size in decimal units, as disks are sold: 1 MB is 10**6 bytes."""
    size, unit = float(count), 0
    while size >= 999.95 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{count} B" if unit == 0 else f"{size:.1f} {_UNITS[unit]}"


def format_seconds(seconds: float) -> str:
    """A duration: seconds below two minutes, else minutes and seconds."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"

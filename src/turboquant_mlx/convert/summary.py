"""True numbers about a conversion: what was stored how, counted from the manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoint.headers import tensor_bytes
from ..checkpoint.schema import Manifest
from .recipe import ModuleInfo, Plan
from .report import ConvertReport
from .source_model import SourceModel


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of the result; ``dtype`` is a safetensors type name."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return tensor_bytes(self.dtype, self.shape)


def build_report(
    *,
    target: Path,
    hf_path: str | Path,
    source: SourceModel,
    manifest: Manifest,
    layout: Mapping[str, Sequence[StoredTensor]],
    infos: list[ModuleInfo],
    plan: Plan,
    dropped: list[dict[str, Any]],
    seconds: float,
) -> ConvertReport:
    """Add up a conversion.

    ``bits_per_weight`` counts all stored bytes of the quantized weights (codes, scales, tables,
    multipliers, sketches); biases count with what was kept.
    """
    by_kind: dict[tuple[str, str], dict[str, Any]] = {}
    kept: dict[str, dict[str, Any]] = {}
    quantized_weights = quantized_bytes = 0
    for info, decision in zip(infos, plan.decisions, strict=True):
        entry = manifest.modules.get(info.path)
        if entry is None:
            group = kept.setdefault(
                decision.reason,
                {"reason": decision.reason, "modules": 0, "parameters": 0, "bytes": 0},
            )
            group["modules"] += 1
            group["parameters"] += info.num_parameters
            group["bytes"] += sum(tensor.num_bytes for tensor in layout[info.path])
            continue
        n_bytes = sum(
            tensor.num_bytes for tensor in layout[info.path] if not tensor.name.endswith(".bias")
        )
        row = by_kind.setdefault(
            (decision.role, decision.method),
            {
                "role": decision.role,
                "method": decision.method,
                "modules": 0,
                "weights": 0,
                "bytes": 0,
            },
        )
        row["modules"] += 1
        row["weights"] += entry.num_weights
        row["bytes"] += n_bytes
        quantized_weights += entry.num_weights
        quantized_bytes += n_bytes
    for row in by_kind.values():
        row["bits_per_weight"] = row["bytes"] * 8 / row["weights"]
    return ConvertReport(
        output_path=str(target),
        source=str(hf_path),
        parameters=sum(info.num_parameters for info in infos),
        source_bytes=source.folder.weight_bytes,
        stored_bytes=sum(tensor.num_bytes for tensors in layout.values() for tensor in tensors),
        quantized_weights=quantized_weights,
        quantized_bytes=quantized_bytes,
        bits_per_weight=quantized_bytes * 8 / quantized_weights,
        by_kind=list(by_kind.values()),
        kept=list(kept.values()),
        dropped=dropped,
        notices=[*source.notes, *plan.notices],
        warnings=list(plan.warnings),
        seconds=seconds,
    )

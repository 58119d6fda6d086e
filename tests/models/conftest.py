"""Source folders, converted folders and outside references for the architecture tests."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import tiny

RECORDINGS = Path(__file__).resolve().parent.parent / "fixtures" / "transformers"


@dataclass(frozen=True)
class Recording:
    """What transformers answered for one tiny model (scripts/record_transformers.py).

    ``ids`` is [1, L]; ``logits`` float32 [L, vocab]; ``recipe`` the keywords of
    ``tiny.build_source`` that give the same weights.
    """

    ids: mx.array
    logits: np.ndarray
    recipe: dict[str, Any]


class Folders:
    """Builds each folder at most once in a test session."""

    def __init__(self, root: Path):
        self.root = root

    def recording(self, model_type: str) -> Recording:
        """The recording of a type; "gemma3" holds the same text model as "gemma3_text"."""
        name = "gemma3_text" if model_type == "gemma3" else model_type
        with np.load(RECORDINGS / f"{name}.npz") as file:
            recipe = json.loads(str(file["recipe"]))
            return Recording(mx.array(file["input_ids"])[None], file["logits"], recipe)

    def source(self, model_type: str, **changes: Any) -> Path:
        """The recorded model as a source folder; ``changes`` are those of build_source."""
        recipe = {**self.recording(model_type).recipe, "model_type": model_type, **changes}
        label = "-".join(f"{key}={value}" for key, value in sorted(changes.items()))
        folder = self.root / f"{model_type}-{label or 'plain'}"
        if not folder.exists():
            tiny.build_source(folder, **recipe)
        return folder

    def converted(self, model_type: str, *, bits: int = 4, **changes: Any) -> Path:
        """The recorded model, its source stored as bfloat16 unless told otherwise, converted."""
        from turboquant_mlx.convert.pipeline import convert

        source = self.source(model_type, **{"dtype": "bfloat16", **changes})
        target = source.with_name(f"{source.name}-{bits}bit")
        if not target.exists():
            convert(str(source), str(target), bits=bits, progress=False)
        return target


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("models"))

"""The class that a converted model is built from: mlx-lm's, or one that its source brought along.

A source may name a Python file of its own as ``model_file`` in its config. In a converted folder
that key belongs to the hook for stock loaders, so the source's file is recorded as
``source_model_file``; it lies in the folder and runs only where the user trusts it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_lm import utils as mlx_lm_utils

from ..errors import CheckpointError, UnsupportedModelError

SOURCE_MODEL_FILE = "source_model_file"


def model_classes(
    folder: Path, config: Mapping[str, Any], *, trust_remote_code: bool
) -> tuple[Any, Any]:
    """(model class, class of its arguments) for a folder in our format.

    Raises:
        UnsupportedModelError: the class is in a file of the source's, which may not run.
        CheckpointError: that file is absent, outside of the folder, or not a model file.
    """
    name = config.get(SOURCE_MODEL_FILE)
    if name is None:
        return mlx_lm_utils._get_classes(dict(config))
    if not is_model_file(name):
        raise CheckpointError(f"{folder}: {SOURCE_MODEL_FILE} {name!r} is not a Python file in it")
    if not trust_remote_code:
        raise UnsupportedModelError(
            f"{folder} needs code of its own ({name}) to be built",
            hint="--trust-remote-code runs it; do so only if you trust where it came from",
        )
    spec = importlib.util.spec_from_file_location("source_model", folder / name)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        return module.Model, module.ModelArgs
    except Exception as error:  # whatever that code does
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{folder}: {name} cannot be used: {reason}") from error


def is_model_file(name: Any) -> bool:
    """Whether a config's value names a Python file that lies directly in the model's folder."""
    return (
        isinstance(name, str)
        and name == Path(name).name
        and "\\" not in name
        and name[-3:] == ".py"
    )

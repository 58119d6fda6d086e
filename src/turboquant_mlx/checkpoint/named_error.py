"""What users are told when mlx-lm cannot make a model of a folder.

mlx-lm and its model classes raise whatever their code runs into. The text of each exception is
turned into one line that names the folder and, where it can be known, the key or tensor at fault.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import Any

from ..errors import CheckpointError, TurboQuantError, UnsupportedModelError
from .config_check import impossible_size
from .headers import TensorInfo
from .source import Folder

_MAX_NAMES = 300  # characters
_MODEL_FAULTS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
# What MLX says of a number that is too large for it; its other RuntimeErrors are no fault of a
# config (memory, files).
_TOO_LARGE = "std::bad_cast"
_SHAPES_CLASH = re.compile(r"\[(stack|concatenate|reshape|split)\]|Array split")


@contextmanager
def named_read_errors(folder: Path) -> Iterator[None]:
    """Turn a failure to read weights, which are lazy, into an error that names the folder.

    Raises:
        CheckpointError: a weight file is not what its header says any more.
    """
    try:
        yield
    except RuntimeError as error:
        if not str(error).startswith("[read]"):
            raise
        raise CheckpointError(
            f"{folder}: a weight file cannot be read to its end",
            hint="it has changed since it was opened, or its disk is failing",
        ) from error


@contextmanager
def named_build_errors(folder: Folder) -> Iterator[None]:
    """Turn whatever mlx-lm and its model classes raise into an error that names the folder.

    Raises:
        UnsupportedModelError: the model type, or the precision of its weights.
        CheckpointError: anything else that is wrong with the folder.
    """
    try:
        yield
    except CheckpointError as error:
        if str(folder.path) in error.message:
            raise
        raise CheckpointError(f"{folder.path}: {error.message}", error.hint) from None
    except TurboQuantError:
        raise
    except Exception as error:  # mlx-lm's model classes raise whatever their code does
        raise named_error(folder, error) from error


@contextmanager
def named_run_errors(path: Path, model: Any) -> Iterator[None]:
    """Turn what a model's own code raises while it runs into an error that names the folder.

    Exceptions from elsewhere (samplers, packed caches) pass: they are faults of ours.

    Raises:
        CheckpointError: the model cannot be run.
    """
    try:
        yield
    except _MODEL_FAULTS as error:
        frames = [frame for frame, _ in walk_tb(error.__traceback__)]
        in_model = any(frame.f_locals.get("self") is model for frame in frames)
        if not in_model or any(_is_of_cache(frame) for frame in frames):
            raise
        text = _first_line(error)
        if isinstance(error, RuntimeError):
            if text != _TOO_LARGE:
                raise
            text = "a number is too large"
        raise cannot_be_run(f"{path}: the model", text) from error


def cannot_be_run(model: str, reason: str) -> CheckpointError:
    """The error of a model whose own code fails; ``model`` is what to call it."""
    return CheckpointError(
        f"{model} cannot be run: {reason}",
        hint="a value of its config.json may be wrong or missing",
    )


def _is_of_cache(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).startswith("turboquant_mlx.kvcache.")


def named_error(folder: Folder, error: Exception) -> TurboQuantError:
    """The error of ours for an exception that mlx-lm raised while it built or filled a model."""
    text = _first_line(error)
    path, model_type = folder.path, folder.model_type
    is_no_model = isinstance(error, AttributeError) and text.endswith("no attribute 'Model'")
    if is_no_model or (isinstance(error, ValueError) and re.match("Model type .* not supp", text)):
        return UnsupportedModelError(
            f"model type {model_type!r} is not supported by the installed mlx-lm",
            hint="a newer release of mlx-lm may have it",
        )
    if isinstance(error, ValueError) and "custom module" in text:
        return UnsupportedModelError(
            f"{path} needs code of its own ({folder.config.get('model_file')}) to be built",
            hint="--trust-remote-code runs it; do so only if you trust where it came from",
        )
    if isinstance(error, TypeError) and "missing" in text:
        missing = re.findall(r"'(\w+)'", text)
        return CheckpointError(f"{path}: config.json lacks {', '.join(missing)}")
    if (size := impossible_size(folder.config)) is not None:
        return CheckpointError(f"{path}: {size}")
    if (method := _promised_packing(folder)) is not None:
        return CheckpointError(
            f"{path}: config.json: quantization_config says {method}, but no tensor of the weight "
            "files is packed that way",
            hint="take quantization_config out of config.json if the weights are plain",
        )
    if isinstance(error, KeyError):
        return CheckpointError(f"{path}: {text} is missing (config key or tensor)")
    lines = [line.strip(" .,") for line in str(error).splitlines() if line.strip()]
    if isinstance(error, ValueError) and lines and re.match(r"(Missing|Received) \d+", lines[0]):
        names = ", ".join(lines[1:])
        shown = names if len(names) <= _MAX_NAMES else names[:_MAX_NAMES] + " ..."
        kind = "are missing" if lines[0].startswith("Missing") else "fit nothing in the model"
        return CheckpointError(f"{path}: tensors {kind}: {shown}")
    if isinstance(error, ValueError) and "quant" in text.lower():
        return UnsupportedModelError(f"{path}: {text}")
    if _SHAPES_CLASH.match(text):
        odd = odd_shapes(folder.tensors)
        culprit = f"{odd[0]} is shaped unlike its kin" if len(odd) == 1 else text
        return CheckpointError(f"{path}: shapes of tensors do not fit together: {culprit}")
    if isinstance(error, (TypeError, ArithmeticError, AssertionError)):
        return CheckpointError(
            f"{path}: config.json does not describe a model of type {model_type!r} ({text})"
        )
    return CheckpointError(f"{path}: {text}")


def _promised_packing(folder: Folder) -> str | None:
    """The packing that config.json names where the files have none of it (mlx-lm needs some)."""
    block = folder.config.get("quantization_config")
    method = block.get("quant_method") if isinstance(block, Mapping) else None
    packed = any(name.endswith(".qweight") for name in folder.tensors)
    return str(method) if method in ("awq", "gptq") and not packed else None


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).rstrip(".")


def odd_shapes(tensors: Mapping[str, TensorInfo]) -> list[str]:
    """Tensors whose shape is not that of most others of their name, layer and expert aside."""
    kin: dict[str, list[str]] = {}
    for name in tensors:
        kin.setdefault(re.sub(r"\.\d+\.", ".0.", name), []).append(name)
    odd = []
    for names in kin.values():
        shapes = Counter(tuple(tensors[name].shape) for name in names)
        usual, count = shapes.most_common(1)[0]
        if 2 * count > len(names):
            odd += [name for name in names if tuple(tensors[name].shape) != usual]
    return odd

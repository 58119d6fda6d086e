"""Load a model: a folder of ours, one of the predecessor's, or any that mlx-lm takes.

mlx-lm's own loader does the work. What happens around it: the files are checked first
(``source.inspect_folder``), the config is normalised (``config.normalize_config``), the manifest
decides the layers (``build.adopt``), and whatever goes wrong becomes one named error. Code that a
folder carries is never run for our own format; the model file in it serves stock loaders only.
"""

from __future__ import annotations

import glob
import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm import utils as mlx_lm_utils

from ..errors import CheckpointError, TurboQuantError, UnsupportedModelError
from ..kernels.dispatch import backend
from ..layers import cpu
from ..layers.cpu import CpuExpand
from . import predecessor
from .build import Transform, adopt
from .config import normalize_config, read_json_object
from .config_check import check_config
from .model_class import model_classes
from .named_error import named_build_errors, named_read_errors
from .repack import repack
from .schema import FLOAT_DTYPES, MODEL_FILE, Manifest, has_manifest
from .source import (
    GENERATION_FILE,
    Folder,
    has_tokenizer,
    inspect_folder,
    refuse_names_not_text,
    resolve,
)

logger = logging.getLogger("turboquant_mlx")

# Keys that would make mlx-lm act on a folder by itself; set to None, as they cannot be taken out.
_TURBOQUANT_KEYS = ("model_file", "quantization", "quantization_config")

KIMI_TYPES = ("kimi_k3",)
"""Model types whose tokenizer code is trusted when the folder is local (the contract says so)."""


def load(
    path_or_repo: str | Path,
    *,
    tokenizer_config: dict[str, Any] | None = None,
    lazy: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    cpu_expand: CpuExpand = "auto",
    return_config: bool = False,
):
    """Load a model and its tokenizer, as ``mlx_lm.load`` does.

    Args:
        path_or_repo: a local folder or a hub repository.
        tokenizer_config: extra arguments for the tokenizer.
        lazy: leave the weights on disk until they are used.
        revision: branch, tag or commit of a hub repository.
        trust_remote_code: let code of the model run (tokenizer code, a ``model_file``; in our
            format the model file that the source brought along, if any).
        cpu_expand: on the CPU, whether decoded weights are kept ("auto", "always", "never").
        return_config: also return the config.

    Returns:
        (model, tokenizer), or (model, tokenizer, config).

    Raises:
        ModelNotFoundError, UnsupportedModelError, CheckpointError: each names what is wrong.
    """
    path = resolve(path_or_repo, revision=revision)
    if not has_tokenizer(path):
        inspect_folder(path)  # a folder that is no model at all is worth saying first
        raise CheckpointError(
            f"{path} has no tokenizer",
            hint="copy tokenizer.json and tokenizer_config.json of the source model into it",
        )
    model, config = load_model(
        path, lazy=lazy, trust_remote_code=trust_remote_code, cpu_expand=cpu_expand
    )
    is_local_kimi = config["model_type"] in KIMI_TYPES and Path(path_or_repo).is_dir()
    tokenizer = load_tokenizer(
        path,
        config,
        tokenizer_config=tokenizer_config,
        trust_remote_code=trust_remote_code or is_local_kimi,
    )
    return (model, tokenizer, config) if return_config else (model, tokenizer)


def load_tokenizer(
    path: Path,
    config: dict[str, Any],
    *,
    tokenizer_config: dict[str, Any] | None = None,
    trust_remote_code: bool = False,
):
    """The tokenizer of a model folder, in mlx-lm's wrapper.

    Raises:
        CheckpointError: its files cannot be read, or it needs code of its own and may not run it.
    """
    extra = {"trust_remote_code": trust_remote_code, **(tokenizer_config or {})}
    try:
        return mlx_lm_utils.load_tokenizer(path, extra, eos_token_ids=config.get("eos_token_id"))
    except TurboQuantError:
        raise
    except Exception as error:  # the library raises whatever its parsers do
        if "trust_remote_code" in str(error):
            raise CheckpointError(
                f"the tokenizer of {path} needs code of its own to run",
                hint="--trust-remote-code allows that; do so only if you trust where it came from",
            ) from error
        reason = " ".join(str(error).split()) or type(error).__name__
        shown = reason if len(reason) <= 200 else reason[:200] + " ..."
        raise CheckpointError(
            f"the tokenizer of {path} cannot be read: {shown.rstrip('.')}"
        ) from error


def load_model(
    path: str | Path,
    *,
    lazy: bool = False,
    trust_remote_code: bool = False,
    cpu_expand: CpuExpand = "auto",
) -> tuple[nn.Module, dict[str, Any]]:
    """Load a model from a local folder.

    Args:
        path: the folder.
        lazy: leave the weights on disk until they are used.
        trust_remote_code: let the source model's own ``model_file`` run.
        cpu_expand: see ``load``.

    Returns:
        (model, normalised config). The model is in evaluation mode.

    Raises:
        ModelNotFoundError, UnsupportedModelError, CheckpointError: each names what is wrong.
    """
    folder = inspect_folder(path)
    refuse_names_not_text(folder)
    config, _ = normalized_config(folder)
    manifest, transform = read_manifest(folder)
    # mlx-lm takes the end tokens of generation_config.json where there are any
    config.pop("eos_token_id", None)
    if manifest is None:
        get_classes: Callable = mlx_lm_utils._get_classes
    else:
        config = {**config, **dict.fromkeys(_TURBOQUANT_KEYS)}
        find_classes = partial(model_classes, folder.path, trust_remote_code=trust_remote_code)
        get_classes = partial(_classes, find_classes, manifest, transform, cpu_expand)
    model, loaded = call_mlx_lm(
        folder,
        model_config=config,
        get_model_classes=get_classes,
        trust_remote_code=trust_remote_code,
    )
    if manifest is not None and transform is None:
        _check_plain_tensors(manifest, folder)
    _check_floating(model, folder)
    if manifest is None and backend() == "cpu":
        # stock layers are slow there, and 16-bit experts raise
        cpu.prepare(model, cpu_expand)
    if not lazy:
        with named_read_errors(folder.path):
            mx.eval(model.parameters())
    return model, loaded


def normalized_config(folder: Folder) -> tuple[dict[str, Any], list[str]]:
    """``config.normalize_config`` of a folder, checked, its errors naming the folder.

    Raises:
        CheckpointError: the config contradicts itself, or is not what it should be.
    """
    try:
        check_config(folder.config, len(folder.tensors))
        return normalize_config(folder.config)
    except CheckpointError as error:
        raise CheckpointError(f"{folder.path}: {error.message}", error.hint) from None


def read_manifest(folder: Folder) -> tuple[Manifest | None, Transform | None]:
    """The manifest of a folder, ours or derived, and what to do to its tensors; (None, None)
    for a folder that is not TurboQuant's.

    Raises:
        CheckpointError: the manifest and the files disagree.
    """
    if is_ours(folder.config):
        try:
            manifest = Manifest.from_config(folder.config, folder.tensors)
            manifest.check_tensors(folder.tensors)
        except CheckpointError as error:
            raise CheckpointError(f"{folder.path}: {error.message}", error.hint) from None
        if manifest.mtp is not None and not (folder.path / manifest.mtp.file).is_file():
            raise CheckpointError(
                f"{folder.path}: {manifest.mtp.file} is missing, the manifest names it",
                hint="copy the folder again, with all of its files",
            )
        return manifest, None
    if predecessor.is_predecessor(folder.config):
        manifest = predecessor.manifest_from_headers(
            folder.config,
            folder.tensors,
            read_tensor=partial(_read_tensor, folder),
            width_of=partial(_width_in_model, folder),
        )
        if manifest.mtp is not None:
            logger.info(
                "note: %d tensors of a multi-token-prediction head are not loaded",
                manifest.mtp.tensors,
            )
        return manifest, partial(_repack, manifest)
    return None, None


def _check_plain_tensors(manifest: Manifest, folder: Folder) -> None:
    """Whatever is not quantized is floating point in every model that we convert."""
    packed = manifest.tensors()
    for name, info in folder.tensors.items():
        if name not in packed and info.dtype not in FLOAT_DTYPES:
            raise CheckpointError(
                f"{folder.path}: tensor {name} is {info.dtype}, not floating point"
            )


def _check_floating(model: nn.Module, folder: Folder) -> None:
    """A weight without scales beside it is floating point in every layer that multiplies by it."""
    for path, module in model.named_modules():
        weight = module.get("weight")
        if not isinstance(weight, mx.array) or mx.issubdtype(weight.dtype, mx.floating):
            continue
        if not any("scale" in name for name in module):
            kind = str(weight.dtype).rpartition(".")[-1]
            raise UnsupportedModelError(
                f"{folder.path}: {path}.weight is {kind}, not floating point",
                hint="a model quantized in a way that mlx-lm does not know cannot be run",
            )


def _repack(manifest: Manifest, weights: dict[str, mx.array]) -> dict[str, mx.array]:
    return repack(weights, manifest)


def _read_tensor(folder: Folder, name: str) -> np.ndarray:
    arrays: Any = mx.load(str(folder.file_of[name]))
    return np.array(arrays[name].astype(mx.float32))


def _width_in_model(folder: Folder, path: str) -> int | None:
    """Input width of a module by config.json; the model is built without its weights."""
    with named_build_errors(folder):
        config, _ = normalize_config(predecessor.plain_config(folder.config))
        model_class, args_class = mlx_lm_utils._get_classes(config)
        module = dict(model_class(args_class.from_dict(config)).named_modules()).get(path)
    weight = None if module is None else module.get("weight")
    return None if weight is None else weight.shape[-1]


def _classes(
    find_classes: Callable,
    manifest: Manifest,
    transform: Transform | None,
    cpu_expand: CpuExpand,
    config: dict,
):
    model_class, args_class = find_classes(config)

    def build(args: Any) -> nn.Module:
        return adopt(model_class(args), manifest, transform=transform, cpu_expand=cpu_expand)

    return build, args_class


def call_mlx_lm(folder: Folder, **options: Any) -> tuple[nn.Module, dict[str, Any]]:
    """``mlx_lm.utils.load_model`` with lazy weights, its exceptions turned into named errors.

    Raises:
        UnsupportedModelError: the model type, or the precision of its weights.
        CheckpointError: anything else that is wrong with the folder.
    """
    if (folder.path / GENERATION_FILE).is_file():
        read_json_object(folder.path / GENERATION_FILE)  # mlx-lm looks into it without a check
    refuse_names_not_text(folder)
    with named_build_errors(folder), _plain_name(folder.path) as path:
        return mlx_lm_utils.load_model(path, lazy=True, strict=True, **options)


@contextmanager
def _plain_name(path: Path) -> Iterator[Path]:
    """The folder under a name without the characters that mlx-lm would take for a pattern.

    Weights that are still lazy stay readable afterwards: their files are open.
    """
    if not glob.has_magic(str(path)):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="turboquant-") as place:
        link = Path(place) / "model"
        link.symlink_to(path.resolve())
        yield link


def is_turboquant(config: dict[str, Any]) -> bool:
    """Whether a config.json belongs to a converted model, ours or the predecessor's."""
    return is_ours(config) or predecessor.is_predecessor(config)


def is_ours(config: dict[str, Any]) -> bool:
    """Whether a config.json is in our format; it may have lost its manifest."""
    return has_manifest(config) or config.get("model_file") == MODEL_FILE

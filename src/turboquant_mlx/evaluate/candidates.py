"""What is compared, and how each of it comes into being.

Our own code is measured through the front door: the model is converted into a temporary folder
and loaded from there, so a row of the table is what ``turboquant-convert`` with these options
gives, now and after every change of its defaults. MLX's formats quantize the same layers in
memory, so that methods differ in nothing else.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ..checkpoint.loader import load_model, read_manifest
from ..checkpoint.source import inspect_folder, resolve
from ..convert.options import ConvertOptions
from ..convert.pipeline import convert
from ..convert.recipe import plan_modules
from ..convert.source_model import list_modules, open_source
from ..kernels.dispatch import backend
from ..layers import cpu
from .options import AFFINE_GROUP_SIZE, EvaluateOptions, parse_variant
from .sizes import Size, model_bytes, size_of_folder, size_of_model

Method = Literal["source", "noise floor", "affine", "mxfp4", "nvfp4", "turboquant", "folder"]
Say = Callable[[str, str], None]

# MLX's floating-point formats have one width and one group size each.
FLOAT_FORMATS: dict[str, tuple[int, int]] = {"mxfp4": (4, 32), "nvfp4": (4, 16)}


@dataclass(frozen=True)
class Candidate:
    """One row of the comparison.

    Attributes:
        name: what the table calls it.
        method: how it comes into being.
        bits, group_size: as asked for; None where the method or its default decides.
        options: for "turboquant", what ``convert`` gets.
        path: for "folder", the folder or hub repository.
    """

    name: str
    method: Method
    bits: int | None = None
    group_size: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    path: str | None = None


@dataclass(frozen=True)
class Prepared:
    """A candidate that can run.

    Attributes:
        model: loaded, its layers final.
        size: true sizes.
        options: for a TurboQuant folder, the options in its manifest.
    """

    model: nn.Module
    size: Size
    options: dict[str, Any] = field(default_factory=dict)


def list_candidates(options: EvaluateOptions) -> list[Candidate]:
    """The rows that the options ask for, width by width, then the folders."""
    rows: list[Candidate] = []
    group_size = options.group_size
    for bits in options.widths:
        if options.affine:
            size = group_size or AFFINE_GROUP_SIZE
            rows.append(Candidate(f"affine {bits}-bit g{size}", "affine", bits, size))
            rows += [
                Candidate(name, name, width, size)  # type: ignore[arg-type]
                for name, (width, size) in FLOAT_FORMATS.items()
                if width == bits
            ]
        name = f"TurboQuant {bits}-bit" + ("" if group_size is None else f" g{group_size}")
        ours: dict[str, Any] = {"bits": bits}
        if group_size is not None:
            ours["group_size"] = group_size
        rows.append(Candidate(name, "turboquant", bits, group_size, ours))
        if options.qjl:
            with_qjl = ours | {"use_qjl": True}
            rows.append(Candidate(f"{name} + QJL", "turboquant", bits, group_size, with_qjl))
        for variant in options.variants:
            given = ours | parse_variant(variant)
            rows.append(
                Candidate(f"{name} {variant}", "turboquant", bits, given.get("group_size"), given)
            )
    short = [Path(path).name for path in options.compare]
    for path, name in zip(options.compare, short, strict=True):
        name = name if name and short.count(name) == 1 else path
        rows.append(Candidate(name, "folder", path=path))
    return rows


def prepare(
    candidate: Candidate,
    source: Path,
    *,
    trust_remote_code: bool = False,
    progress: bool = False,
    say: Say | None = None,
) -> Prepared:
    """Make a candidate.

    Args:
        candidate: what to make.
        source: folder of the 16-bit model.
        trust_remote_code: let code that comes with a model run.
        progress: show the progress of a conversion on stderr.
        say: called with each note and warning.

    Raises:
        TurboQuantError: it cannot be made; the message says why.
    """
    if candidate.method == "folder":
        assert candidate.path is not None
        return load_folder(resolve(candidate.path), trust_remote_code=trust_remote_code)
    if candidate.method == "turboquant":
        with tempfile.TemporaryDirectory(prefix="turboquant-evaluate-") as scratch:
            target = Path(scratch) / "model"
            convert(
                source,
                target,
                progress=progress,
                say=say,
                trust_remote_code=trust_remote_code,
                **candidate.options,
            )
            return load_folder(target)
    return _quantize_with_mlx(candidate, source, trust_remote_code, say)


def load_folder(path: Path, *, trust_remote_code: bool = False) -> Prepared:
    """Load a model folder of any kind, its weights in memory, and count its bytes."""
    folder = inspect_folder(path)
    model, _ = load_model(path, trust_remote_code=trust_remote_code)
    manifest, _ = read_manifest(folder)
    options = {} if manifest is None else dict(manifest.options)
    return Prepared(model, size_of_folder(folder, manifest, model), options)


def load_source(source: Path, *, trust_remote_code: bool = False) -> Prepared:
    """Load the 16-bit model; one that is stored quantized is expanded first."""
    model = open_source(source, trust_remote_code=trust_remote_code).model
    return make_ready(model, Size(0, 0, model_bytes(model)))


def _quantize_with_mlx(
    candidate: Candidate, source: Path, trust_remote_code: bool, say: Say | None
) -> Prepared:
    assert candidate.bits is not None and candidate.group_size is not None
    model = open_source(source, trust_remote_code=trust_remote_code).model
    plan = plan_modules(list_modules(model), ConvertOptions())
    modules: dict[str, Any] = dict(model.named_modules())
    paths = [d.path for d in plan.decisions if d.action == "quantize"]
    weights, unfit = 0, 0
    for path in paths:
        module = modules[path]
        weights += module.weight.size
        if module.weight.shape[-1] % candidate.group_size:
            unfit += 1
            continue
        quantized = module.to_quantized(
            group_size=candidate.group_size,
            bits=candidate.bits,
            mode=candidate.method,
        )
        mx.eval(quantized.parameters())
        model.update_modules(tree_unflatten([(path, quantized)]))
    if unfit and say is not None:
        say(
            "note",
            f"{candidate.name}: {unfit} of {len(paths)} layers stay in 16 bits, their width is no "
            f"multiple of {candidate.group_size} (their bytes count)",
        )
    return make_ready(model, size_of_model(model, paths, weights))


def make_ready(model: nn.Module, size: Size) -> Prepared:
    """A model that was built without our loader, as our loader would hand it over."""
    if backend() == "cpu":
        cpu.prepare(model)
    model.eval()
    mx.eval(model.parameters())
    return Prepared(model, size)

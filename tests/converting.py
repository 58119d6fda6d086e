"""Running the converter in tests, and looking into what it wrote."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes

import tiny
from tiny_files import write_tokenizer
from turboquant_mlx.checkpoint.schema import Manifest
from turboquant_mlx.checkpoint.source import inspect_folder
from turboquant_mlx.convert.command import main
from turboquant_mlx.quant.rotation import rotate
from turboquant_mlx.quant.weight import PackedWeight, dequantize_weight


@dataclass(frozen=True)
class Conversion:
    """One run of ``turboquant-convert`` in this process."""

    folder: Path
    code: int
    out: str
    err: str

    @property
    def messages(self) -> list[str]:
        """Lines on standard error, without what the progress bars drew."""
        return [
            line
            for line in self.err.splitlines()
            if line.strip() and not line.startswith(("balancing:", "converting:"))
        ]

    @property
    def notes(self) -> list[str]:
        return [line for line in self.messages if line.startswith("note: ")]

    @property
    def warnings(self) -> list[str]:
        return [line for line in self.messages if line.startswith("warning: ")]


def convert(source: Path | str, target: Path, *flags: str) -> Conversion:
    """Run the command; usage errors end as codes too."""
    arguments = ["--hf-path", str(source), "--mlx-path", str(target), *flags]
    return run(target, arguments)


def run(target: Path, arguments: list[str]) -> Conversion:
    """Run the command with exactly these arguments; ``target`` is where the result should be."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(arguments)
        except SystemExit as stop:
            code = int(stop.code or 0)
    return Conversion(target, code, out.getvalue(), err.getvalue())


class Workshop:
    """Source folders and conversions, each made at most once.

    Attributes:
        codec: given to conversions that name none; None leaves them the converter's default.
    """

    def __init__(self, root: Path, codec: str | None = None):
        self.root, self.codec = root, codec
        self._conversions: dict[tuple[object, ...], Conversion] = {}

    def source(self, model_type: str, **recipe: Any) -> Path:
        """A folder of ``tiny.build_source``."""
        label = "-".join(f"{key}={value}" for key, value in sorted(recipe.items()))
        folder = self.root / f"{model_type}-{label or 'plain'}".replace("/", "_")
        if not folder.exists():
            tiny.build_source(folder, model_type, **recipe)
        return folder

    def converted(self, source: Path, *flags: str, balanced: bool = False) -> Conversion:
        """The source converted with these flags, which must succeed.

        Balancing is left out unless asked for: with models this small it takes most of the time.
        """
        key = (source, flags, balanced)
        if key not in self._conversions:
            target = self.root / f"converted-{len(self._conversions)}"
            usual = [] if balanced else ["--no-balance"]
            if self.codec and "--codec" not in flags:
                usual += ["--codec", self.codec]
            done = convert(source, target, *usual, *flags)
            assert done.code == 0, done.err
            self._conversions[key] = done
        return self._conversions[key]


def contents(folder: Path) -> dict[str, bytes]:
    """File name -> bytes."""
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def manifest_of(folder: Path) -> Manifest:
    return Manifest.from_config(config_of(folder))


def stored(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Tensor name -> type, shape and bytes, over all weight files."""
    found = inspect_folder(folder)
    tensors = {}
    for name, info in found.tensors.items():
        file = found.file_of[name]
        with file.open("rb") as handle:
            handle.seek(found.headers[file].data_offset + info.start)
            tensors[name] = (info.dtype, tuple(info.shape), handle.read(info.nbytes))
    return tensors


def modules_that_differ(a: Path, b: Path) -> set[str]:
    """Paths of the modules whose stored tensors are not the same, names, types and bytes."""
    left, right = stored(a), stored(b)
    names = left.keys() | right.keys()
    return {n.rpartition(".")[0] for n in names if left.get(n) != right.get(n)}


def arrays(folder: Path) -> dict[str, mx.array]:
    """All tensors of a folder."""
    loaded: dict[str, mx.array] = {}
    for file in inspect_folder(folder).weight_files:
        loaded |= mx.load(str(file))
    return loaded


def packed_weight(folder: Path, path: str) -> PackedWeight:
    """One stored weight with the multipliers of its rotation group."""
    entry = manifest_of(folder).modules[path]
    tensors, leader = arrays(folder), entry.rotation_group
    own = {
        name: tensors.get(f"{path}.{name}")
        for name in ("codes", "scales", "table", "qjl_codes", "qjl_norms")
    }
    shared = {
        name: tensors.get(f"{leader}.{name}") if entry.qjl or name == "multiplier" else None
        for name in ("multiplier", "qjl_multiplier")
    }
    return PackedWeight(spec=entry.spec, shape=entry.shape, **own, **shared)


def stored_error(packed: PackedWeight, weight: mx.array) -> float:
    """Relative error where the rounding happens: after channel scaling and rotation."""
    wanted = rotate(
        weight.astype(mx.float32) / packed.multiplier.astype(mx.float32),
        packed.spec.rotation_block,
    )
    got = dequantize_weight(packed, rotated=True, use_qjl=False)
    return (mx.linalg.norm(got - wanted) / mx.linalg.norm(wanted)).item()


def write_model(
    folder: Path,
    config: dict[str, Any],
    *,
    extra: dict[str, mx.array] | None = None,
    change: Any = None,
    dtype: mx.Dtype = mx.bfloat16,
) -> nn.Module:
    """A source of any type that mlx-lm knows, random, in mlx-lm's own tensor names.

    Args:
        folder: to make.
        config: a complete config of that type.
        extra: further tensors to store.
        change: takes all tensors and returns those to store instead.
        dtype: of the parameters.

    Returns:
        the model that was stored.
    """
    folder.mkdir(parents=True)
    model_class, args_class = _get_classes(config)
    mx.random.seed(0)
    model = model_class(args_class.from_dict(config))
    model.set_dtype(dtype)
    tensors = dict(tree_flatten(model.parameters())) | (extra or {})
    tensors = tensors if change is None else change(tensors)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    return model


def as_numpy(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32))

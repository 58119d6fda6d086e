"""How large a source becomes when it is converted, to the byte, without reading its weights.

Which modules a conversion changes depends on what mlx-lm's model class makes of the source's
tensors (renamed, stacked, split, tied). So the class itself is asked: it is given files that have
the true headers and, behind them, no data but holes, and its own loading step runs lazily over
them. From there on this is the converter's own plan and layout.

The only part of the planner that imports MLX, late; a second or two instead of a tenth of one.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoint.headers import LENGTH_BYTES, TensorInfo
from ..convert.options import (
    BITS,
    ConvertOptions,
    check_needs,
    load_tiers,
    parse_layer_ranges,
)
from ..errors import OptionError, TurboQuantError, UnsupportedModelError
from .headers import ModelFiles
from .machine import Machine
from .projection import Plan, Request, plan_model
from .weights import UNASSIGNED, read_manifest

# Short names that --convert takes beside the options' own.
_SHORT = {
    "group": "group_size",
    "g": "group_size",
    "b": "bits",
    "extras": "quantize_extras",
    "ternary": "ternary_experts",
    "protect": "protect_expert_layers",
    "tiers": "expert_layer_tiers",
    "qjl": "use_qjl",
}
_TRUE, _FALSE = ("1", "yes", "true", "on"), ("0", "no", "false", "off")


@dataclass(frozen=True)
class Conversion:
    """The result of a conversion before it is made.

    Attributes:
        options: what the conversion would be told.
        text: the same as the user wrote it.
        tensors: name -> type and shape, places as in one file.
        config: what the result's config.json would hold.
        exact: False with a target of bits per weight: which part gets how many is measured by
            the conversion, and the bytes here are those that the target permits.
        mtp_bytes: bytes of a kept multi-token-prediction head, a file of its own beside these.
        notices: what the converter would say.
    """

    options: ConvertOptions
    text: str
    tensors: dict[str, TensorInfo]
    config: dict[str, Any]
    exact: bool
    mtp_bytes: int
    notices: tuple[str, ...]

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors of the result."""
        return sum(info.nbytes for info in self.tensors.values())

    def as_model(self, source: ModelFiles) -> ModelFiles:
        """The result as a model that can be planned."""
        return dataclasses.replace(
            source,
            config=self.config,
            tensors=self.tensors,
            file_of=dict.fromkeys(self.tensors, "model.safetensors"),
            file_bytes={},
        )


def parse_options(text: str) -> ConvertOptions:
    """Options from text like ``bits=3,group-size=64,quantize-extras``.

    Names are those of turboquant-convert's options, with ``_`` or ``-``; some have short forms. A
    name without a value switches an option on. A list of layers is written with ``+``
    (``protect=0-5+42-47``), since the comma separates options.

    Raises:
        OptionError: an unknown name, one that is given twice, a value that the option does not
            take, a bad combination, or a text that cannot be read.
    """
    known = {field.name: field for field in dataclasses.fields(ConvertOptions)}
    values: dict[str, Any] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        key, given, value = (piece.strip() for piece in part.partition("="))
        name = key.removeprefix("--").replace("-", "_")
        if name.startswith("no_") and not given:
            name, value, given = name.removeprefix("no_"), "no", "="
        name = _SHORT.get(name, name)
        if name not in known:
            raise OptionError(
                f"--convert: turboquant-convert has no option {key!r}",
                hint='write for example --convert "bits=3,group-size=64,quantize-extras"',
            )
        if name in values:
            raise OptionError(f"--convert: {name.replace('_', '-')} is given twice")
        values[name] = _value(name, known[name].default, value if given else None)
    check_needs(values)
    if "bits" in values and "target_bpw" in values:
        raise OptionError("--convert: bits and target-bpw exclude each other")
    options = ConvertOptions(**values)
    texts = [text for text in (options.balance_text, options.feedback_text) if text is not None]
    if texts:
        from ..convert.balance import load_text

        for text in texts:
            load_text(text)  # as the converter would, to say what keeps it from that
    return options


def _value(name: str, default: Any, text: str | None) -> Any:
    if name == "protect_expert_layers":
        return parse_layer_ranges((text or "").replace("+", ","))
    if name == "expert_layer_tiers":
        return load_tiers(text or "")
    shown = name.replace("_", "-")
    if isinstance(default, bool):
        if text is None or text.lower() in _TRUE:
            return True
        if text.lower() in _FALSE:
            return False
        raise OptionError(f"--convert: {shown}={text} is neither yes nor no")
    if text is None:
        raise OptionError(f"--convert: {shown} needs a value, as in {shown}=3")
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def plan_converted(model: ModelFiles, text: str, machine: Machine, request: Request) -> Plan:
    """The plan of a source as ``turboquant-convert`` would leave it.

    Args:
        text: the converter's options, as ``parse_options`` takes them.

    Raises:
        OptionError, UnsupportedModelError: as ``parse_options`` and ``convert_projection``.
    """
    options = parse_options(text)
    conversion = convert_projection(model, options, text)
    plan = plan_model(conversion.as_model(model), machine, request)
    found = {
        "options_text": text or "the defaults",
        "options": options.to_dict(),
        "source_bytes": model.weight_bytes,
        "weight_bytes": conversion.weight_bytes,
        "mtp_bytes": conversion.mtp_bytes,
        "exact": conversion.exact,
        "notices": list(conversion.notices),
    }
    return dataclasses.replace(plan, extras={**plan.extras, "conversion": found})


def convert_projection(model: ModelFiles, options: ConvertOptions, text: str) -> Conversion:
    """What ``turboquant-convert`` would write for a source.

    Raises:
        UnsupportedModelError, CheckpointError: the source cannot be converted; the message says
            why.
        OptionError: the options do not suit the model.
    """
    if read_manifest(model.config, model.tensors) is not None:
        raise UnsupportedModelError(
            f"{model.name} is already a TurboQuant model",
            hint="--convert is for the 16-bit model that it was made from",
        )
    with _hollow_copy(model) as path:
        try:
            return _project(path, options, text)
        except TurboQuantError as error:  # the user knows the model, not the copy
            message, hint = (
                part and part.replace(str(path), model.name) for part in (error.message, error.hint)
            )
            raise type(error)(message or "", hint) from error


def _project(path: Path, options: ConvertOptions, text: str) -> Conversion:
    from ..checkpoint.loader import normalized_config
    from ..checkpoint.source import inspect_folder
    from ..convert import pipeline, source_model
    from ..convert.job import Job
    from ..convert.recipe import plan_modules

    folder = inspect_folder(path)
    source = source_model.build_source(
        folder,
        *normalized_config(folder),
        lambda: None,  # no text is read
        trust_remote_code=options.trust_remote_code,
    )
    infos = source_model.list_modules(source.model)
    plan = plan_modules(infos, options)
    if plan.quantizes_nothing:
        raise pipeline.nothing_to_do(source, plan)
    job = Job(source, options, infos, plan)
    rest = 0 if options.target_bpw is None else _lay_out_target(job)
    tensors, end = {}, 0
    for stored in (tensor for group in job.layout.values() for tensor in group):
        tensors[stored.name] = TensorInfo(
            stored.dtype, tuple(stored.shape), end, end + stored.num_bytes
        )
        end += stored.num_bytes
    if rest:
        tensors[UNASSIGNED] = TensorInfo("U8", (rest,), end, end + rest)
    return Conversion(
        options=options,
        text=text,
        tensors=tensors,
        config={**source.config, **_entries(job)},
        exact=options.target_bpw is None,
        mtp_bytes=sum(folder.tensors[name].nbytes for name in job.mtp),
        notices=(*job.plan.notices, *job.plan.warnings),
    )


def _lay_out_target(job: Any) -> int:
    """Lay a job out with the most whole bits that its target permits for all parts alike.

    Returns:
        bytes that the target leaves beyond these: the conversion gives them to some of the parts.

    Raises:
        OptionError: the target is out of reach, or there is nothing to share out.
    """
    from ..convert import widths

    sizes = widths.sizes_of(job)
    job.plan.notices.extend(widths.check_target(job, sizes))
    budget = widths.budget_bytes(job, sizes)
    taken = {bits: sum(module[bits] for module in sizes.values()) for bits in BITS}
    width = max((bits for bits in BITS if taken[bits] <= budget), default=BITS[0])
    job.set_widths(dict.fromkeys(sizes, width))
    return 0 if width == BITS[-1] else max(budget - taken[width], 0)


def _entries(job: Any) -> dict[str, Any]:
    from ..checkpoint.schema import config_entries

    return config_entries(job.manifest, job.label_bits(), job.label_group_size())


@contextmanager
def _hollow_copy(model: ModelFiles) -> Iterator[Path]:
    """A folder with the model's config and shards of the right headers and lengths, without data.

    The shards are sparse: they take a few kilobytes of disk whatever their length.
    """
    with tempfile.TemporaryDirectory(prefix="turboquant-plan-") as place:
        path = Path(place)
        config = {k: v for k, v in model.config.items() if k != "model_file"}
        (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        files = sorted(set(model.file_of.values()))
        for file in files:
            _write_hollow(path / file, model, file)
        if len(files) > 1:
            index = {"metadata": {}, "weight_map": model.file_of}
            (path / "model.safetensors.index.json").write_text(json.dumps(index))
        yield path


def _write_hollow(path: Path, model: ModelFiles, file: str) -> None:
    tensors = {name: model.tensors[name] for name, home in model.file_of.items() if home == file}
    header = {
        name: {"dtype": info.dtype, "shape": info.shape, "data_offsets": [info.start, info.end]}
        for name, info in tensors.items()
    }
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as out:
        out.write(len(raw).to_bytes(LENGTH_BYTES, "little") + raw)
        out.truncate(LENGTH_BYTES + len(raw) + max(info.end for info in tensors.values()))

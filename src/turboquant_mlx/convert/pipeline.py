"""The conversion itself: read a tensor, quantize it, write it, forget it.

Everything about the result is known before the first weight is read (``recipe.plan_modules`` and
shapes decide it), so the writer can lay out the shards, check the disk and then take tensors one
by one. What is in memory at a time is one source tensor (an expert stack counts as one) and its
quantized form; that holds with and without ``streaming``, which also switches off MLX's cache of
freed buffers. Before that, the channels of the layers' inputs are measured (``calibrate``) on an
instance of the model that is used up by it, one decoder layer in memory at a time.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from tqdm import tqdm

from ..checkpoint.config import set_model_dtype
from ..checkpoint.model_class import SOURCE_MODEL_FILE
from ..checkpoint.named_error import named_read_errors
from ..checkpoint.schema import Manifest, ModuleEntry, MtpInfo, config_entries, expected_tensors
from ..checkpoint.stock import add_stock_keys
from ..checkpoint.writer import FolderWriter, check_target
from ..errors import OptionError, OutputError, QuantizationError, TurboQuantError
from ..quant.rotation import random_signs
from ..quant.weight import quantize_weight
from . import files
from .balance import channel_scales, input_multiplier, load_text
from .calibrate import measure_channels
from .codec_time import codec_notices
from .feedback import Store, forecast, make_tokens, quantize_with_feedback
from .options import DEFAULT_GROUP_SIZE, ConvertOptions
from .recipe import Decision, ModuleInfo, Plan, plan_modules
from .report import ConvertReport, format_bytes
from .source_model import (
    SAFETENSORS_DTYPES,
    SourceModel,
    dropped_tensors,
    embeddings_read_directly,
    list_modules,
    modality_of,
    mtp_tensors,
    open_source,
)
from .summary import StoredTensor, build_report

DEFAULT_SHARD_BYTES = 5 * 2**30

Say = Callable[[str, str], None]
"""Takes ("note" or "warning", text)."""


def convert(
    hf_path: str | Path,
    mlx_path: str | Path = "mlx_model",
    *,
    overwrite: bool = False,
    options: ConvertOptions | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    progress: bool = False,
    say: Say | None = None,
    **option_values: Any,
) -> ConvertReport:
    """Convert a checkpoint into a small one in our format.

    Args:
        hf_path: the source, a local folder or a hub repository.
        mlx_path: the folder to write.
        overwrite: replace ``mlx_path`` if it exists (only once the new folder is complete).
        options: all choices in one record; or give them by name (``bits=4``).
        max_shard_bytes: largest size of a weight file.
        progress: show a progress bar on stderr.
        say: called with each note and warning before the long work begins; the report holds them
            as well.

    Returns:
        what was done, with true sizes.

    Raises:
        TurboQuantError: of the kind that fits; nothing is left behind at ``mlx_path``.
    """
    if options is not None and option_values:
        raise OptionError("give either options or single values, not both")
    options = options or ConvertOptions(**option_values)
    started = time.perf_counter()
    target = Path(mlx_path)
    check_target(target, overwrite=overwrite)
    balance_text = load_text(options.balance_text) if options.balance else None
    own_text = options.feedback_text
    feedback_text = load_text(own_text) if own_text is not None else None
    source = open_source(hf_path, trust_remote_code=options.trust_remote_code)
    if target.resolve() == source.folder.path.resolve():
        raise OutputError(f"{target} is the source itself", hint="choose another --mlx-path")
    for file in source.folder.weight_files:
        if target.resolve() in file.resolve().parents:
            raise OutputError(
                f"{target} holds {file.resolve().name}, which the source links to",
                hint="choose another --mlx-path",
            )
    infos = list_modules(source.model)
    plan = plan_modules(infos, options)
    if plan.quantizes_nothing:
        raise _nothing_to_do(source, plan)
    job = _Job(source, options, infos, plan)
    dropped = dropped_tensors(source, kept=job.mtp)
    job.explain_dropped(dropped)
    say = say or _say_nothing
    _tell(say, [*source.notes, *plan.notices, *codec_notices(plan, infos)], plan.warnings)
    with (
        named_read_errors(source.folder.path),
        FolderWriter(target, overwrite=overwrite, max_shard_bytes=max_shard_bytes) as writer,
        _memory_mode(options.streaming),
    ):
        job.declare(writer)
        if balance_text is not None:
            _tell(say, *job.balance(balance_text, progress))
        if options.error_feedback:
            _tell(say, *job.feed_back(feedback_text, writer.path, progress, say))
        job.write(writer, progress)
        report = build_report(
            target=target,
            hf_path=hf_path,
            source=source,
            manifest=job.manifest,
            layout=job.layout,
            infos=infos,
            plan=plan,
            dropped=dropped,
            seconds=time.perf_counter() - started,
        )
        job.finish(writer, report)
    return report


def _say_nothing(kind: str, text: str) -> None:
    pass


def _tell(say: Say, notices: Iterable[str], warnings: Iterable[str]) -> None:
    for text in notices:
        say("note", text)
    for text in warnings:
        say("warning", text)


def _nothing_to_do(source: SourceModel, plan: Plan) -> TurboQuantError:
    reasons = "; ".join(f"{count} x {reason}" for reason, count in plan.why_kept().items())
    return OptionError(
        f"nothing in {source.folder.path} can be quantized with these options ({reasons})",
        hint="a smaller --group-size may divide the widths of this model",
    )


@contextmanager
def _memory_mode(streaming: bool) -> Iterator[None]:
    """Without a cache of freed buffers, memory follows what is alive."""
    if not streaming:
        yield
        return
    previous = mx.set_cache_limit(0)
    try:
        yield
    finally:
        mx.set_cache_limit(previous)


class _Job:
    """One conversion: the layout of the result, and how each part of it is made."""

    def __init__(
        self,
        source: SourceModel,
        options: ConvertOptions,
        infos: list[ModuleInfo],
        plan: Plan,
    ):
        self.source = source
        self.options = options
        self.plan = plan
        self.infos = {info.path: info for info in infos}
        self.decisions = plan.by_path()
        self.modules = dict(source.model.named_modules())
        self.dtype: mx.Dtype | None = None if options.dtype is None else getattr(mx, options.dtype)
        self.mtp = mtp_tensors(source.folder) if options.keep_mtp else []
        if options.keep_mtp and not self.mtp:
            plan.notices.append("--keep-mtp has no effect: the source has no such head")
        plain = embeddings_read_directly(source.model)
        if options.quantize_extras and plain:
            plan.notices.append(
                f"--quantize-extras leaves {', '.join(plain)} as it is: mlx-lm's code for this "
                "model type needs its plain values"
            )
        self.scales: dict[str, np.ndarray] = {}
        self.store: Store | None = None
        self.manifest = self._build_manifest()
        self.layout = self._build_layout()

    def explain_dropped(self, dropped: list[dict[str, Any]]) -> None:
        """Say what of the source is not taken over."""
        for group in dropped:
            if group["tensors"] is None:
                text = f"{group['parameters']:,} parameters of the source are {group['reason']}"
            elif group["reason"] == "buffer":
                continue  # recomputed by every implementation
            elif group["reason"] == "mtp":
                text = (
                    f"the multi-token-prediction head is dropped, {_size(group)} "
                    "(--keep-mtp keeps it)"
                )
            else:
                text = f"the {group['reason']} part is dropped, {_size(group)}: only text remains"
            self.plan.notices.append(text)

    # --- layout ---------------------------------------------------------------------------

    def _build_manifest(self) -> Manifest:
        entries: dict[str, ModuleEntry] = {}
        for decision in self.plan.decisions:
            if decision.action != "keep":
                entries[decision.path] = self._entry(decision)
        mtp = MtpInfo(files.MTP_FILE, len(self.mtp)) if self.mtp else None
        return Manifest(
            modules=entries,
            options=self.options.to_dict(),
            created_by=files.created_by(),
            mtp=mtp,
        )

    def _entry(self, decision: Decision) -> ModuleEntry:
        info = self.infos[decision.path]
        if decision.spec is not None:
            return ModuleEntry.from_spec(
                info.path,
                "switch" if info.kind == "switch" else "linear",
                info.shape,
                decision.spec,
                bias=info.has_bias,
                rotation_group=decision.rotation_group or "",
            )
        assert decision.affine is not None
        bits, group_size = decision.affine
        return ModuleEntry(
            path=info.path,
            kind=f"affine_{info.kind}",  # type: ignore[arg-type]  # checked by the entry
            shape=info.shape,
            bits=bits,
            group_size=group_size,
            bias=info.has_bias,
        )

    def _final_dtype(self, name: str, dtype: mx.Dtype) -> mx.Dtype:
        """The dtype a parameter is stored in: --dtype where the model lets it be cast."""
        if self.dtype is None or not mx.issubdtype(dtype, mx.floating):
            return dtype
        castable = getattr(self.source.model, "cast_predicate", lambda _: True)
        return self.dtype if castable(name) else dtype

    def _build_layout(self) -> dict[str, list[StoredTensor]]:
        """Module path -> its tensors. Parameters that sit directly on a block count as its own."""
        layout: dict[str, list[StoredTensor]] = {}
        for name, value in tree_flatten(self.source.model.parameters()):
            path = name.rpartition(".")[0]
            entry = self.manifest.modules.get(path)
            if entry is None:
                dtype = SAFETENSORS_DTYPES[self._final_dtype(name, value.dtype)]
                layout.setdefault(path, []).append(StoredTensor(name, dtype, tuple(value.shape)))
            elif path not in layout:
                float_dtype = SAFETENSORS_DTYPES[self._final_dtype(name, value.dtype)]
                layout[path] = [
                    StoredTensor(f"{path}.{suffix}", spec.dtype or float_dtype, spec.shape)
                    for suffix, spec in expected_tensors(entry).items()
                ]
        return layout

    # --- work -----------------------------------------------------------------------------

    def declare(self, writer: FolderWriter) -> None:
        """Tell the writer what will come, and make sure that it fits on the disk."""
        for tensors in self.layout.values():
            for tensor in tensors:
                writer.declare(tensor.name, tensor.dtype, tensor.shape)
        files.declare_mtp(writer, self.source.folder, self.mtp)
        beside = files.side_files(self.source.folder.path)
        writer.check_space(writer.tensor_bytes + sum(path.stat().st_size for path in beside))

    def balance(self, text: str, progress: bool) -> tuple[list[str], list[str]]:
        """Find the channel scales of every rotation group that the text reaches.

        Returns:
            notices and warnings; they are in the plan too.
        """
        found = measure_channels(
            self._build_again,
            self.manifest.groups(),
            self.source.tokenizer,
            text,
            vocabulary=self._vocabulary(),
            progress=progress,
        )
        self.plan.notices.extend(found.notices)
        self.plan.warnings.extend(found.warnings)
        for leader, channels in found.channels.items():
            self.scales[leader] = channel_scales(channels.input_energy, channels.weight_energy)
        return found.notices, found.warnings

    def feed_back(
        self, text: str | None, folder: Path, progress: bool, say: Say
    ) -> tuple[list[str], list[str]]:
        """Quantize with error feedback whatever a text, or what the model writes, reaches.

        Args:
            text: None to let the model write.
            folder: where the layers are kept until they are written.
            progress: show progress bars.
            say: is told first how long it will take.

        Returns:
            notices and warnings; they are in the plan too.
        """
        groups, entries = self.manifest.groups(), self.manifest.modules
        say("note", forecast(groups, entries, self.source.config, writes=text is None))
        self.store = Store(folder / ".feedback", entries)
        found = quantize_with_feedback(
            self._build_again,
            groups,
            self._multiplier,
            partial(
                make_tokens,
                self._build_again,
                self.source.tokenizer,
                text,
                self._vocabulary(),
                progress,
            ),
            self.store,
            progress=progress,
        )
        self.plan.notices.extend(found.notices)
        self.plan.warnings.extend(found.warnings)
        return found.notices, found.warnings

    def _vocabulary(self) -> int | None:
        """Number of token ids that the model knows."""
        config = self.source.config
        return config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")

    def _multiplier(self, leader: str) -> np.ndarray:
        """The input multiplier of a rotation group.

        Signs and scales belong to the group, so that its layers can share one rotation.
        """
        signs = random_signs(
            self.manifest.modules[leader].width, self.options.rotation_seed, leader
        )
        if self.options.rotation == "none":
            signs = np.ones_like(signs)
        return input_multiplier(signs, self.scales.get(leader))

    def _build_again(self) -> nn.Module:
        """Another lazy instance of the model that is converted, after --dtype."""
        model = self.source.build_again()
        if self.dtype is not None:
            cast = [
                (name, value.astype(self._final_dtype(name, value.dtype)))
                for name, value in tree_flatten(model.parameters())
            ]
            model.update(tree_unflatten(cast))
        return model

    def write(self, writer: FolderWriter, progress: bool) -> None:
        """Quantize and write every tensor."""
        sizes = {path: self.infos[path].num_parameters for path in self.infos}
        with tqdm(
            total=sum(sizes.values()),
            unit="weight",
            unit_scale=True,
            disable=not progress,
            dynamic_ncols=True,
            desc="converting",
        ) as bar:
            for path, tensors in self.layout.items():
                bar.set_postfix_str(path, refresh=False)
                arrays = self._make(path)
                for tensor in tensors:
                    writer.add(tensor.name, _as_buffer(arrays.pop(tensor.name)))
                self._forget(path)
                bar.update(sizes.get(path, 0))
        files.copy_mtp(writer, self.source.folder, self.mtp)
        if self.store is not None:
            self.store.close()

    def _make(self, path: str) -> dict[str, Any]:
        """The arrays of one module, by full tensor name."""
        own = {
            name: value.astype(self._final_dtype(name, value.dtype))
            for name, value in self._own_arrays(path).items()
        }
        entry = self.manifest.modules.get(path)
        self._check_numbers(own, entry)
        if entry is None:
            return own
        weight = own.pop(f"{path}.weight")
        made = self._affine(weight, entry) if entry.is_affine else self._packed(weight, entry)
        return own | {f"{path}.{suffix}": value for suffix, value in made.items()}

    def _check_numbers(self, own: dict[str, mx.array], entry: ModuleEntry | None) -> None:
        """Refuse values that are not numbers in what is stored as it is, or by MLX's own code."""
        for name, value in own.items():
            by_ours = entry is not None and not entry.is_affine and name.endswith(".weight")
            if not by_ours and mx.isnan(value).any().item():
                raise QuantizationError(
                    f"{self.source.folder.path}: {name} has values that are not numbers"
                )

    def _packed(self, weight: mx.array, entry: ModuleEntry) -> dict[str, Any]:
        group = entry.rotation_group
        if self.store is not None and entry.path in self.store:
            packed = self.store.take(entry.path)
        else:
            seed = self.options.rotation_seed
            packed = quantize_weight(
                weight,
                entry.spec,
                multiplier=self._multiplier(group),
                qjl_multiplier=random_signs(entry.width, seed, f"{group}.qjl"),
                label=entry.path,
            )
        arrays = dict(packed.arrays())
        if not entry.is_leader:
            arrays.pop("multiplier")
            arrays.pop("qjl_multiplier", None)
        return arrays

    @staticmethod
    def _affine(weight: mx.array, entry: ModuleEntry) -> dict[str, Any]:
        codes, scales, biases = mx.quantize(
            weight, group_size=entry.group_size, bits=entry.bits, mode="affine"
        )
        return {"weight": codes, "scales": scales, "biases": biases}

    def _own_arrays(self, path: str) -> dict[str, mx.array]:
        """Parameters directly at ``path``: a module, or a plain list or dict inside one."""
        node: Any = self.modules.get(path)
        if node is None:
            node = self.source.model
            for part in path.split("."):
                node = node[int(part)] if isinstance(node, (list, tuple)) else node[part]
        items = enumerate(node) if isinstance(node, (list, tuple)) else node.items()
        prefix = f"{path}." if path else ""
        return {f"{prefix}{name}": v for name, v in items if isinstance(v, mx.array)}

    def _forget(self, path: str) -> None:
        """Let go of a module's weights; nothing reads them again."""
        module: nn.Module | None = self.modules.get(path)
        if module is None:
            return
        for name in [name for name, value in module.items() if isinstance(value, mx.array)]:
            module.pop(name)

    def label_group_size(self) -> int:
        """What other tools are told: the requested group size, or the most common one."""
        if self.options.group_size is not None:
            return self.options.group_size
        if self.options.codec == "scalar":
            return DEFAULT_GROUP_SIZE
        sizes = Counter(d.spec.group_size for d in self.plan.decisions if d.spec is not None)
        return sizes.most_common(1)[0][0]

    def finish(self, writer: FolderWriter, report: ConvertReport) -> None:
        """Write everything beside the weights and make the folder real."""
        config = {**self.source.config}
        if self.options.dtype is not None:
            set_model_dtype(config, self.options.dtype)
        for modality in {"vision", "audio"} - {modality_of(path) for path in self.layout}:
            config.pop(f"{modality}_config", None)
        add_stock_keys(config)
        if config.get("model_file") is not None:
            config[SOURCE_MODEL_FILE] = config["model_file"]
        config.update(config_entries(self.manifest, self.options.bits, self.label_group_size()))
        files.write_side_files(writer, self.source.folder, report, self.options)
        writer.commit(config, total_parameters=report.parameters)


def _size(group: dict[str, Any]) -> str:
    plural = "" if group["tensors"] == 1 else "s"
    return f"{group['tensors']} tensor{plural} of {format_bytes(group['bytes'])}"


def _as_buffer(array: Any) -> np.ndarray:
    """An array's bytes as numpy holds them (bfloat16 as uint16)."""
    if isinstance(array, np.ndarray):
        return array
    if array.dtype == mx.bfloat16:
        array = array.view(mx.uint16)
    return np.array(array, copy=False)

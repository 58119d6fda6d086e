"""One conversion: what the result consists of, and how each part of it is made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from tqdm import tqdm

from ..checkpoint.config import set_model_dtype
from ..checkpoint.model_class import SOURCE_MODEL_FILE
from ..checkpoint.schema import Manifest, ModuleEntry, MtpInfo, config_entries, expected_tensors
from ..checkpoint.stock import add_stock_keys
from ..checkpoint.writer import FolderWriter
from ..cli import bars_are_off, raise_if_interrupted
from ..errors import QuantizationError
from ..kernels.dispatch import backend
from ..quant.rotation import random_signs
from ..quant.weight import quantize_weight
from . import files
from .balance import channel_scales, input_multiplier
from .calibrate import measure_channels
from .feedback import forecast, make_tokens, quantize_with_feedback
from .feedback_store import FeedbackStore, fingerprint
from .options import DEFAULT_GROUP_SIZE, ConvertOptions
from .recipe import Decision, ModuleInfo, Plan, plan_modules
from .report import ConvertReport, format_bytes
from .source_model import (
    SAFETENSORS_DTYPES,
    SourceModel,
    embeddings_read_directly,
    modality_of,
    mtp_tensors,
)
from .summary import StoredTensor

Say = Callable[[str, str], None]
"""Takes ("note" or "warning", text)."""


class Job:
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
        self.store: FeedbackStore | None = None
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

    def set_widths(self, widths: Mapping[str, int]) -> None:
        """Give modules that no option fixes these widths, and lay the result out anew."""
        plan = plan_modules(list(self.infos.values()), self.options, widths)
        self.plan = replace(plan, notices=self.plan.notices, warnings=self.plan.warnings)
        self.decisions = self.plan.by_path()
        self.manifest = self._build_manifest()
        self.layout = self._build_layout()

    def bytes_of(self, path: str) -> int:
        """Stored bytes of a module's weight."""
        return sum(t.num_bytes for t in self.layout[path] if not t.name.endswith(".bias"))

    def label_bits(self) -> int:
        """What other tools are told: the requested bits, or those of most weights."""
        if self.options.target_bpw is None:
            return self.options.bits
        weights: Counter[int] = Counter()
        for entry in self.manifest.modules.values():
            weights[entry.bits] += entry.num_weights
        return weights.most_common(1)[0][0]

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
            self.build_again,
            self.manifest.groups(),
            self.source.tokenizer,
            text,
            vocabulary=self.vocabulary(),
            progress=progress,
        )
        self.plan.notices.extend(found.notices)
        self.plan.warnings.extend(found.warnings)
        for leader, channels in found.channels.items():
            self.scales[leader] = channel_scales(channels.input_energy, channels.weight_energy)
        return found.notices, found.warnings

    def feed_back(
        self, text: str | None, balance_text: str | None, target: Path, progress: bool, say: Say
    ) -> tuple[list[str], list[str]]:
        """Quantize with error feedback whatever a text, or what the model writes, reaches.

        Args:
            text: None to let the model write.
            balance_text: what the channels were balanced on, None if they were not.
            target: the folder to write; beside it the layers are kept until they are written.
            progress: show progress bars.
            say: is told first how long it will take.

        Returns:
            notices and warnings; they are in the plan too.
        """
        groups, entries = self.manifest.groups(), self.manifest.modules
        say("note", forecast(groups, entries, self.source.config, writes=text is None))
        key = fingerprint(
            files.created_by(),
            version("mlx"),
            backend(),
            self.options.to_dict(),
            {path: entry.to_dict() for path, entry in entries.items()},
            text,
            balance_text,
            self.source.folder.path / "config.json",
            *sorted(self.source.folder.weight_files),
        )
        self.store = FeedbackStore(target, key, entries)
        if self.store.found:
            say("note", f"an earlier run of this command has left {self.store.found:,} layers")
        found = quantize_with_feedback(
            self.build_again,
            groups,
            self.multiplier,
            partial(
                make_tokens,
                self.build_again,
                self.source.tokenizer,
                text,
                self.vocabulary(),
                progress,
            ),
            self.store,
            progress=progress,
        )
        self.plan.notices.extend(found.notices)
        self.plan.warnings.extend(found.warnings)
        return found.notices, found.warnings

    def vocabulary(self) -> int | None:
        """Number of token ids that the model knows."""
        config = self.source.config
        return config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")

    def multiplier(self, leader: str) -> np.ndarray:
        """The input multiplier of a rotation group.

        Signs and scales belong to the group, so that its layers can share one rotation.
        """
        signs = random_signs(
            self.manifest.modules[leader].width, self.options.rotation_seed, leader
        )
        if self.options.rotation == "none":
            signs = np.ones_like(signs)
        return input_multiplier(signs, self.scales.get(leader))

    def build_again(self) -> nn.Module:
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
            disable=bars_are_off(progress),
            dynamic_ncols=True,
            desc="converting",
        ) as bar:
            for path, tensors in self.layout.items():
                raise_if_interrupted()
                bar.set_postfix_str(path, refresh=False)
                arrays = self._make(path)
                for tensor in tensors:
                    writer.add(tensor.name, _as_buffer(arrays.pop(tensor.name)))
                self._forget(path)
                bar.update(sizes.get(path, 0))
        files.copy_mtp(writer, self.source.folder, self.mtp)

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
            packed = self.store.get(entry.path)
        else:
            seed = self.options.rotation_seed
            packed = quantize_weight(
                weight,
                entry.spec,
                multiplier=self.multiplier(group),
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
        config.update(config_entries(self.manifest, self.label_bits(), self.label_group_size()))
        files.write_side_files(writer, self.source.folder, report, self.options)
        writer.commit(config, total_parameters=report.parameters)
        if self.store is not None:
            self.store.remove()


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

"""``--target-bpw``: which part of a model gets how many bits.

Joins the plan (what each width would take), the measurement (what each part loses,
``sensitivity``) and the choice under the budget (``allocate``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import mlx.core as mx

from ..errors import OptionError
from ..quant.spec import QuantSpec
from ..quant.weight import dequantize_weight, quantize_weight
from .allocate import Part, allocate
from .job import Job
from .options import BITS, DEFAULT_GROUP_SIZE
from .recipe import fit_group_size, is_free
from .roles import layer_of
from .sensitivity import PROBE_BITS, losses_by_width, measure_losses

Sizes = Mapping[str, Mapping[int, int]]
"""Module whose width is to be found -> bits -> stored bytes."""


def check_target(job: Job, sizes: Sizes) -> list[str]:
    """Refuse a target that no choice of widths reaches, before any work.

    Returns:
        notices.

    Raises:
        OptionError: it is out of reach.
    """
    target = _target(job)
    weights, fixed = _fixed(job, sizes)
    least, most = (
        (fixed + sum(module[bits] for module in sizes.values())) * 8 / weights
        for bits in (BITS[0], BITS[-1])
    )
    if target < least:
        raise OptionError(
            f"--target-bpw {target:g} is out of reach: with {BITS[0]} bits wherever other options "
            f"permit, this model takes {math.ceil(least * 100) / 100:.2f} bits per weight"
        )
    if target < most:
        return []
    return [f"--target-bpw {target:g} is more than {BITS[-1]} bits everywhere take, {most:.2f}"]


def share_bits(job: Job, sizes: Sizes, text: str, progress: bool) -> None:
    """Choose widths for the job's target by what each part of the model loses with few bits.

    Args:
        job: its channel scales are known; its plan is changed.
        sizes: see ``sizes_of``.
        text: to run through the 16-bit model.
        progress: show a progress bar on stderr.
    """
    budget = budget_bytes(job, sizes)
    if budget >= sum(module[BITS[-1]] for module in sizes.values()):
        job.set_widths(dict.fromkeys(sizes, BITS[-1]))  # nothing to choose
        return
    parts: dict[str, list[str]] = {}
    for path in sizes:
        layer = layer_of(path)
        name = path if layer is None else f"layer {layer} {job.decisions[path].role}"
        parts.setdefault(name, []).append(path)
    losses = measure_losses(
        job.build_again,
        parts,
        lambda path, weight: _probe(job, path, weight),
        job.source.tokenizer,
        text,
        vocabulary=job.vocabulary(),
        progress=progress,
    )
    widths = allocate(
        [
            Part(
                name,
                {bits: sum(sizes[path][bits] for path in paths) for bits in BITS},
                losses_by_width(losses[name], job.options.codec),
            )
            for name, paths in parts.items()
        ],
        budget,
    )
    job.set_widths({path: widths[name] for name, paths in parts.items() for path in paths})


def budget_bytes(job: Job, sizes: Sizes) -> int:
    """What the target leaves for the modules whose width is to be found."""
    weights, fixed = _fixed(job, sizes)
    return int(_target(job) * weights / 8) - fixed


def _target(job: Job) -> float:
    assert job.options.target_bpw is not None
    return job.options.target_bpw


def sizes_of(job: Job) -> Sizes:
    """What each module would take; the job's plan is left at the largest width.

    Raises:
        OptionError: other options fix all widths.
    """
    paths = [
        info.path
        for info in job.infos.values()
        if job.decisions[info.path].action == "quantize" and is_free(info, job.options)
    ]
    if not paths:
        raise OptionError("--target-bpw has nothing to share out: other options fix all widths")
    found: dict[str, dict[int, int]] = {path: {} for path in paths}
    for bits in BITS:
        job.set_widths(dict.fromkeys(paths, bits))
        for path in paths:
            found[path][bits] = job.bytes_of(path)
    return found


def _fixed(job: Job, sizes: Sizes) -> tuple[int, int]:
    """Number of all quantized weights, and bytes of those whose width is fixed."""
    entries = {p: entry for p, entry in job.manifest.modules.items() if not entry.is_affine}
    weights = sum(entry.num_weights for entry in entries.values())
    return weights, sum(job.bytes_of(path) for path in entries if path not in sizes)


def _probe(job: Job, path: str, weight: mx.array) -> mx.array:
    """A weight as PROBE_BITS leave it, with scalar codes: the quickest."""
    entry = job.manifest.modules[path]
    group_size = fit_group_size(entry.width, DEFAULT_GROUP_SIZE)
    assert group_size is not None  # or it would not be quantized
    spec = QuantSpec(
        bits=PROBE_BITS,
        group_size=group_size,
        scale_layout="log8",
        rotation_block=entry.rotation_block,
    )
    multiplier = job.multiplier(entry.rotation_group)
    packed = quantize_weight(weight, spec, multiplier=multiplier, label=path)
    return dequantize_weight(packed, dtype=weight.dtype)

"""``turboquant_mlx.plan``: what turboquant-plan works out, for Python programs.

MLX is imported only where a conversion is planned.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ..errors import OptionError
from . import DEFAULT_CONTEXT

if TYPE_CHECKING:
    from ..kvcache.spec import KVSpec
    from .machine import Machine
    from .projection import Plan


def plan(
    model: str,
    *,
    context: int | None = None,
    kv: KVSpec | None = None,
    prefill_step_size: int | None = None,
    ngram_offload: bool = False,
    convert: str | None = None,
    ram_gb: float | None = None,
    wired_gb: float | None = None,
    machine: Machine | None = None,
) -> Plan:
    """Say whether a model fits, from headers and small files alone.

    Args:
        model: folder, ``owner/name`` or ``owner/name@revision`` of the hub.
        context: tokens of prompt and answer together, None for 16384 or what the model was made
            for, where that is less.
        kv: packing of the key-value cache, None for 16 bits.
        prefill_step_size: tokens per prefill chunk, None for the largest safe one.
        ngram_offload: plan with n-gram tables served from disk.
        convert: options of turboquant-convert as ``--convert`` takes them ("" for its defaults):
            plan the model as that would leave it.
        ram_gb, wired_gb: plan for a Mac with this much memory (16 means 16 * 2**30 bytes), or this
            Metal working set (in 10**9 bytes).
        machine: plan for this one; with none of the three, the machine that this runs on.

    Returns:
        the plan. ``to_dict()`` is what ``turboquant-plan --json`` prints, ``verdict.runnable``
        whether it runs, ``projection`` the parts of the sum, in bytes.

    Raises:
        OptionError: a value of another type or out of range, or options that do not suit the model.
        ModelNotFoundError: no such model, or no way to reach it.
        UnsupportedModelError, CheckpointError: its files are of another format, or damaged.
    """
    from .headers import open_model
    from .machine import Machine, described
    from .projection import Request, plan_model
    from .weights import check_model

    if not isinstance(model, (str, os.PathLike)):
        raise OptionError(f"model must be a folder or the name of a repository, not {model!r}")
    if convert is not None and not isinstance(convert, str):
        raise OptionError(f"convert must be text such as 'bits=3', not {convert!r}")
    if machine is not None and not isinstance(machine, Machine):
        raise OptionError(f"machine must be a Machine, not {machine!r}")
    request = Request(
        DEFAULT_CONTEXT if context is None else context,
        kv,
        prefill_step_size,
        ngram_offload,
        default_context=context is None,
    )
    target = machine or described(ram_gb, wired_gb)
    files = open_model(str(model))
    check_model(files)
    if convert is None:
        return plan_model(files, target, request)
    from .conversion import plan_converted

    return plan_converted(files, convert, target, request)

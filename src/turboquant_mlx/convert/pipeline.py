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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..checkpoint.named_error import named_read_errors
from ..checkpoint.writer import FolderWriter, check_target
from ..errors import OptionError, OutputError, TurboQuantError
from . import widths
from .balance import load_text
from .codec_time import codec_notices
from .job import Job, Say
from .options import ConvertOptions
from .recipe import Plan, plan_modules
from .report import ConvertReport
from .source_model import SourceModel, dropped_tensors, list_modules, open_source
from .summary import build_report

DEFAULT_SHARD_BYTES = 5 * 2**30


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
        raise nothing_to_do(source, plan)
    job = Job(source, options, infos, plan)
    sizes = None
    if options.target_bpw is not None:
        sizes = widths.sizes_of(job)
        job.plan.notices.extend(widths.check_target(job, sizes))
    dropped = dropped_tensors(source, kept=job.mtp)
    job.explain_dropped(dropped)
    say = say or _say_nothing
    _tell(say, [*source.notes, *job.plan.notices, *codec_notices(plan, infos)], plan.warnings)
    with (
        named_read_errors(source.folder.path),
        FolderWriter(target, overwrite=overwrite, max_shard_bytes=max_shard_bytes) as writer,
        _memory_mode(options.streaming),
        _kept_for_later(job, say),
    ):
        if sizes is None:
            job.declare(writer)
        if balance_text is not None:
            _tell(say, *job.balance(balance_text, progress))
        if sizes is not None:
            widths.share_bits(job, sizes, balance_text or load_text(), progress)
            job.declare(writer)
        if options.error_feedback:
            _tell(say, *job.feed_back(feedback_text, balance_text, target, progress, say))
        job.write(writer, progress)
        report = build_report(
            target=target,
            hf_path=hf_path,
            source=source,
            manifest=job.manifest,
            layout=job.layout,
            infos=infos,
            plan=job.plan,
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


def nothing_to_do(source: SourceModel, plan: Plan) -> TurboQuantError:
    """The error of a conversion that would quantize no module."""
    reasons = "; ".join(f"{count} x {reason}" for reason, count in plan.why_kept().items())
    return OptionError(
        f"nothing in {source.folder.path} can be quantized with these options ({reasons})",
        hint="a smaller --group-size may divide the widths of this model",
    )


@contextmanager
def _kept_for_later(job: Job, say: Say) -> Iterator[None]:
    """Say what an interrupted run has left for the next one."""
    try:
        yield
    except BaseException:
        if job.store is not None:
            job.store.remove_if_empty()
            if len(job.store):
                say(
                    "note",
                    f"{len(job.store):,} quantized layers are kept in {job.store.folder}; the same "
                    "command goes on from there, or remove the folder",
                )
        raise
    finally:
        if job.store is not None:
            job.store.close()


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

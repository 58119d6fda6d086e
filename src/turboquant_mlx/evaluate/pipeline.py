"""The evaluation itself: score the 16-bit model, then one candidate after the other.

One candidate is in memory at a time. Beside it are the log-probabilities of one chunk, read from
the cache, or the 16-bit model where they are too many to be kept (``reference``).
"""

from __future__ import annotations

import gc
import hashlib
import platform
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from .. import __version__
from ..checkpoint.loader import is_turboquant
from ..checkpoint.source import Folder, inspect_folder, resolve
from ..convert.balance import load_text
from ..errors import OptionError, TurboQuantError
from .candidates import Candidate, Prepared, list_candidates, load_folder, load_source, prepare
from .options import EvaluateOptions
from .reference import ReferenceCache, default_cache_folder
from .report import NOISE_ROW, SOURCE_ROW, EvaluationReport, Row
from .running import device_name, use_16bit_activations
from .score import Summary
from .scorer import Say, Scorer
from .sizes import Size
from .text import SourceText, read_text

LONG_SECONDS = 600.0


def evaluate(
    hf_path: str | Path,
    options: EvaluateOptions | None = None,
    *,
    progress: bool = False,
    say: Say | None = None,
    on_row: Callable[[EvaluationReport], None] | None = None,
) -> EvaluationReport:
    """Score a model and what quantization makes of it.

    Args:
        hf_path: the 16-bit model, a local folder or a hub repository. A quantized folder is scored
            alone, without divergences.
        options: everything else.
        progress: show progress bars on stderr.
        say: called once with each note and warning.
        on_row: called with the report after each new row.

    Returns:
        the complete report.

    Raises:
        TurboQuantError: of the kind that fits. Rows that were finished before have been handed to
            ``on_row``.
    """
    options = options or EvaluateOptions()
    folder = inspect_folder(resolve(hf_path))
    run = _Run(str(hf_path), folder, options, progress, say, on_row)
    if run.alone:
        run.score_alone()
    else:
        run.score_reference()
        if options.noise_floor:
            run.score_noise_floor()
        run.score_candidates()
    run.report.complete = True
    return run.report


class _Run:
    """One evaluation: how to score, and the rows so far."""

    def __init__(
        self,
        name: str,
        folder: Folder,
        options: EvaluateOptions,
        progress: bool,
        say: Say | None,
        on_row: Callable[[EvaluationReport], None] | None,
    ):
        self.started = time.perf_counter()
        self.folder = folder
        self.options = options
        self.progress = progress
        self.on_row = on_row
        self._say = say
        self._said: set[str] = set()
        self._warned_of_time = False
        self.alone = is_turboquant(folder.config) or "quantization" in folder.config
        if self.alone and (options.bits or options.compare or options.variants):
            raise OptionError(
                f"{name} is quantized already and cannot be what others are compared with",
                hint="give its 16-bit source as --hf-path, and this folder with --compare",
            )
        if self.alone:
            self._explain_alone(name)
        self.candidates = [] if self.alone else list_candidates(options)
        for candidate in self.candidates:  # a wrong name is worth knowing at once
            if candidate.path is not None:
                inspect_folder(resolve(candidate.path))
            for option in ("balance_text", "feedback_text"):
                if candidate.options.get(option) is not None:
                    _check_text(candidate.name, candidate.options[option])
        text = read_text(options.text, raw=options.raw_text)
        self.scorer = Scorer(
            folder,
            text.content,
            count=options.num_samples,
            length=options.seq_len,
            cache=ReferenceCache(
                options.cache_dir or default_cache_folder(), int(options.cache_gb * 1e9)
            ),
            trust_remote_code=options.trust_remote_code,
            progress=progress,
            say=self.say,
        )
        chunks = self.scorer.chunks
        if len(chunks) < options.num_samples:
            self.say("note", f"the text has room for no more than {len(chunks)} chunks")
        self.report = EvaluationReport(
            model=name,
            text=_describe(text),
            chunks={
                "count": len(chunks),
                "length": chunks.length,
                "scored_tokens": len(chunks) * chunks.scored,
            },
            environment=environment(),
        )

    def say(self, kind: str, text: str) -> None:
        """Pass a note on, once."""
        if self._say is not None and text not in self._said:
            self._said.add(text)
            self._say(kind, text)

    def _explain_alone(self, name: str) -> None:
        """Say which options a model that is scored alone leaves without effect."""
        options = self.options
        idle = [
            option
            for option, given in (
                ("--group-size", options.group_size is not None),
                ("--no-affine", not options.affine),
                ("--no-qjl", not options.qjl),
                ("--no-noise-floor", not options.noise_floor),
            )
            if given
        ]
        if idle:
            self.say(
                "note",
                f"{name} is quantized already and scored alone: {', '.join(idle)} "
                f"{'has' if len(idle) == 1 else 'have'} no effect",
            )

    # --- rows -----------------------------------------------------------------------------

    def score_alone(self) -> None:
        """The only row of a model that is quantized already."""
        started = time.perf_counter()
        trust = self.options.trust_remote_code
        prepared = load_folder(self.folder.path, trust_remote_code=trust)
        self._score(Candidate(self.folder.path.resolve().name, "folder"), prepared, started)

    def score_reference(self) -> None:
        """The row of the 16-bit model, which all others are compared with."""
        started = time.perf_counter()
        summary = self.scorer.run_reference()
        candidate = Candidate(SOURCE_ROW, "source")
        size = Size(0, 0, self.folder.weight_bytes)
        self._add(candidate, size, {}, summary, 0.0, time.perf_counter() - started)

    def score_noise_floor(self) -> None:
        """The 16-bit model with 16-bit activations."""
        _free_memory()
        started = time.perf_counter()
        trust = self.options.trust_remote_code
        model = load_source(self.folder.path, trust_remote_code=trust).model
        use_16bit_activations(model)
        prepared = Prepared(model, Size(0, 0, self.folder.weight_bytes))
        self._score(Candidate(NOISE_ROW, "noise floor"), prepared, started)

    def score_candidates(self) -> None:
        """All other rows."""
        for position, candidate in enumerate(self.candidates):
            _free_memory()
            started = time.perf_counter()
            try:
                prepared = prepare(
                    candidate,
                    self.folder.path,
                    trust_remote_code=self.options.trust_remote_code,
                    progress=self.progress,
                    say=self.say,
                )
                self._score(candidate, prepared, started)
            except TurboQuantError as error:
                raise type(error)(f"{candidate.name}: {error.message}", error.hint) from error
            del prepared
            rest = len(self.candidates) - position - 1
            self._warn_of_time(rest * (time.perf_counter() - started))

    def _warn_of_time(self, seconds: float) -> None:
        if seconds > LONG_SECONDS and not self._warned_of_time:
            self._warned_of_time = True
            self.say(
                "note",
                f"the remaining rows take about {seconds / 60:.0f} minutes; a smaller "
                "--num-samples is faster",
            )

    def _score(self, candidate: Candidate, prepared: Prepared, started: float) -> None:
        prepared_at = time.perf_counter()
        float32 = candidate.method != "noise floor"
        summary = self.scorer.score(prepared.model, candidate.name, float32=float32)
        self._add(
            candidate,
            prepared.size,
            prepared.options,
            summary,
            prepared_at - started,
            time.perf_counter() - prepared_at,
        )

    def _add(
        self,
        candidate: Candidate,
        size: Size,
        options: dict[str, Any],
        summary: Summary,
        prepare_seconds: float,
        score_seconds: float,
    ) -> None:
        self.report.rows.append(
            Row(
                name=candidate.name,
                method=candidate.method,
                bits=candidate.bits,
                group_size=candidate.group_size,
                options=options,
                quantized_weights=size.weights,
                quantized_bytes=size.weight_bytes,
                bits_per_weight=size.bits_per_weight,
                model_bytes=size.model_bytes,
                tokens=summary.tokens,
                perplexity=summary.perplexity,
                kl_mean=summary.divergence,
                kl_error=summary.divergence_error,
                kl_median=summary.divergence_median,
                kl_p99=summary.divergence_p99,
                top1=summary.agreement,
                chunk_nll=summary.chunk_surprise,
                chunk_kl=summary.chunk_divergence,
                prepare_seconds=round(prepare_seconds, 3),
                score_seconds=round(score_seconds, 3),
            )
        )
        self.report.seconds = round(time.perf_counter() - self.started, 3)
        if self.on_row is not None:
            self.on_row(self.report)


def _check_text(row: str, path: str) -> None:
    """Make sure that the converter will be able to read a text."""
    try:
        load_text(path)
    except OptionError as error:
        raise OptionError(f"{row}: {error.message}", error.hint) from None


def _free_memory() -> None:
    """Let go of the model before: models hold themselves through their layers."""
    gc.collect()
    mx.clear_cache()


def environment() -> dict[str, Any]:
    """What a measurement depends on besides its input."""
    return {
        "machine": platform.platform(),
        "processor": platform.machine(),
        "device": device_name(),
        "python": platform.python_version(),
        "turboquant-mlx-kit": __version__,
        **{name: version(name) for name in ("mlx", "mlx-lm", "numpy", "transformers")},
    }


def _describe(text: SourceText) -> dict[str, Any]:
    digest = hashlib.sha256(text.content.encode()).hexdigest()
    return {"name": text.name, "sha256": digest, "joined": text.joined}

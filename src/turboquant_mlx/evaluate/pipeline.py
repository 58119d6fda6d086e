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
from tqdm import tqdm

from .. import __version__
from ..checkpoint.loader import is_turboquant, load_tokenizer
from ..checkpoint.source import Folder, has_tokenizer, inspect_folder, resolve
from ..errors import CheckpointError, OptionError, TurboQuantError
from .candidates import (
    Candidate,
    Prepared,
    list_candidates,
    load_folder,
    load_source,
    prepare,
)
from .options import EvaluateOptions
from .reference import (
    Forward,
    LiveReference,
    Reference,
    ReferenceCache,
    cache_key,
    default_cache_folder,
    log_probs_of,
)
from .report import NOISE_ROW, SOURCE_ROW, EvaluationReport, Row
from .running import forward_of, use_16bit_activations, use_float32_activations
from .score import ChunkScores, Summary, score_chunk, score_reference, summarize
from .sizes import Size
from .text import SourceText, make_chunks, read_text

Say = Callable[[str, str], None]
"""Takes ("note" or "warning", text)."""

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
    path = resolve(hf_path)
    folder = inspect_folder(path)
    alone = is_turboquant(folder.config) or "quantization" in folder.config
    if alone:
        _refuse_comparisons(options, hf_path)
    run = _Run(str(hf_path), folder, options, progress, say, on_row)
    if alone:
        run.score_alone()
    else:
        run.score_reference()
        if options.noise_floor:
            run.score_noise_floor()
        run.score_candidates()
    return run.finish()


def _refuse_comparisons(options: EvaluateOptions, hf_path: str | Path) -> None:
    if options.bits or options.compare or options.variants:
        raise OptionError(
            f"{hf_path} is quantized already; there is nothing to compare with",
            hint="give its 16-bit source as --hf-path, and this folder as --compare",
        )


class _Run:
    """One evaluation: the chunks, the reference, and the rows so far."""

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
        self.candidates = list_candidates(options)
        for candidate in self.candidates:
            if candidate.method == "folder":  # a wrong name is worth knowing at once
                assert candidate.path is not None
                inspect_folder(resolve(candidate.path))
        text = read_text(options.text, raw=options.raw_text)
        self.chunks = make_chunks(
            self._tokenizer(), text.content, options.num_samples, options.seq_len
        )
        if len(self.chunks) < options.num_samples and options.text is not None:
            self.say(
                "note",
                f"the text has room for {self.chunks.available} chunks of {options.seq_len} tokens",
            )
        self.reference: Reference | None = None
        self.report = EvaluationReport(
            model=name,
            text=_describe(text),
            chunks={
                "count": len(self.chunks),
                "length": self.chunks.length,
                "scored_tokens": len(self.chunks) * self.chunks.scored,
            },
            environment=environment(),
        )

    def say(self, kind: str, text: str) -> None:
        if self._say is not None and text not in self._said:
            self._said.add(text)
            self._say(kind, text)

    def _tokenizer(self) -> Any:
        path = self.folder.path
        if not has_tokenizer(path):
            raise CheckpointError(
                f"{path} has no tokenizer", hint="copy the tokenizer's files into it first"
            )
        trust = self.options.trust_remote_code
        return load_tokenizer(path, self.folder.config, trust_remote_code=trust)

    # --- rows -----------------------------------------------------------------------------

    def score_alone(self) -> None:
        """The only row of a model that is quantized already."""
        started = time.perf_counter()
        prepared = load_folder(self.folder.path, trust_remote_code=self.options.trust_remote_code)
        name = self.folder.path.resolve().name
        self._add_model(Candidate(name, "folder"), prepared, started)

    def score_reference(self) -> None:
        """The row of the 16-bit model, whose log-probabilities all others are compared with."""
        limit = int(self.options.cache_gb * 1e9)
        cache = ReferenceCache(self.options.cache_dir or default_cache_folder(), limit)
        key = cache_key(self.folder, self.chunks, _device())
        started = time.perf_counter()
        self.reference = cache.find(key, self.chunks)
        prepare_seconds = 0.0
        if self.reference is None:
            forward = self._source_forward()
            prepare_seconds = time.perf_counter() - started
            self.reference = self._compute_reference(cache, key, forward)
        reference = self.reference
        scores = [
            score_reference(reference.log_probs(i), self.chunks.targets(i))
            for i in self._bar(SOURCE_ROW, shown=isinstance(reference, LiveReference))
        ]
        size = Size(0, 0, self.folder.weight_bytes)
        self._add(
            Candidate(SOURCE_ROW, "folder"),
            size,
            summarize(scores),
            method="source",
            prepare_seconds=prepare_seconds,
            score_seconds=time.perf_counter() - started - prepare_seconds,
        )

    def _source_forward(self) -> Forward:
        trust = self.options.trust_remote_code
        model = load_source(self.folder.path, trust_remote_code=trust).model
        use_float32_activations(model)
        return forward_of(model)

    def _compute_reference(self, cache: ReferenceCache, key: str, forward: Forward) -> Reference:
        """Run the 16-bit model once over all chunks if the result can be kept."""
        first = log_probs_of(forward, self.chunks, 0)
        vocabulary = first.shape[1]
        if not cache.has_room(self.chunks, vocabulary):
            size = first.nbytes * len(self.chunks) / 1e9
            self.say(
                "note",
                f"the 16-bit model's log-probabilities would take {size:.2f} GB of cache, more "
                f"than --cache-limit {self.options.cache_gb:g}; the model runs again for each row",
            )
            return LiveReference(forward, self.chunks)
        with cache.store(key, self.chunks, vocabulary) as write:
            for i in self._bar(SOURCE_ROW):
                write(first if i == 0 else log_probs_of(forward, self.chunks, i))
        stored = cache.find(key, self.chunks)
        if stored is None:
            raise CheckpointError(f"{cache.folder}: what was just stored cannot be read back")
        return stored

    def score_noise_floor(self) -> None:
        """The 16-bit model with 16-bit activations."""
        started = time.perf_counter()
        trust = self.options.trust_remote_code
        prepared = load_source(self.folder.path, trust_remote_code=trust)
        use_16bit_activations(prepared.model)
        size = Size(0, 0, self.folder.weight_bytes)
        self._add_model(
            Candidate(NOISE_ROW, "folder"),
            Prepared(prepared.model, size),
            started,
            float32=False,
            method="noise floor",
        )

    def score_candidates(self) -> None:
        """All other rows."""
        for position, candidate in enumerate(self.candidates):
            started = time.perf_counter()
            try:
                prepared = prepare(
                    candidate,
                    self.folder.path,
                    trust_remote_code=self.options.trust_remote_code,
                    progress=self.progress,
                    say=self.say,
                )
                self._add_model(candidate, prepared, started)
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

    def _add_model(
        self,
        candidate: Candidate,
        prepared: Prepared,
        started: float,
        *,
        float32: bool = True,
        method: str | None = None,
    ) -> None:
        if float32:
            use_float32_activations(prepared.model)
        prepare_seconds = time.perf_counter() - started
        forward = forward_of(prepared.model)
        scores = [self._score(forward, i) for i in self._bar(candidate.name)]
        self._add(
            candidate,
            prepared.size,
            summarize(scores),
            method=method or candidate.method,
            options=prepared.options,
            prepare_seconds=prepare_seconds,
            score_seconds=time.perf_counter() - started - prepare_seconds,
        )
        gc.collect()
        mx.clear_cache()

    def _score(self, forward: Forward, index: int) -> ChunkScores:
        reference = None if self.reference is None else self.reference.log_probs(index)
        logits = forward(self.chunks.ids[index])
        return score_chunk(logits[self.chunks.skip : -1], self.chunks.targets(index), reference)

    def _add(
        self,
        candidate: Candidate,
        size: Size,
        summary: Summary,
        *,
        method: str,
        options: dict[str, Any] | None = None,
        prepare_seconds: float,
        score_seconds: float,
    ) -> None:
        self.report.rows.append(
            Row(
                name=candidate.name,
                method=method,
                bits=candidate.bits,
                group_size=candidate.group_size,
                options=options or {},
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
        self._tell()

    def finish(self) -> EvaluationReport:
        """Mark the report as complete."""
        self.report.complete = True
        self._tell(new_row=False)
        return self.report

    def _tell(self, new_row: bool = True) -> None:
        self.report.seconds = round(time.perf_counter() - self.started, 3)
        if new_row and self.on_row is not None:
            self.on_row(self.report)

    def _bar(self, name: str, *, shown: bool = True) -> Any:
        return tqdm(
            range(len(self.chunks)),
            desc=f"scoring {name}",
            unit="chunk",
            leave=False,
            dynamic_ncols=True,
            disable=not (shown and self.progress),
        )


def environment() -> dict[str, Any]:
    """What a measurement depends on besides its input."""
    return {
        "machine": platform.platform(),
        "processor": platform.machine(),
        "device": _device(),
        "python": platform.python_version(),
        "turboquant-mlx-kit": __version__,
        **{name: version(name) for name in ("mlx", "mlx-lm", "numpy", "transformers")},
    }


def _device() -> str:
    return str(mx.default_device().type).rpartition(".")[2]


def _describe(text: SourceText) -> dict[str, Any]:
    digest = hashlib.sha256(text.content.encode()).hexdigest()
    return {"name": text.name, "sha256": digest, "joined": text.joined}

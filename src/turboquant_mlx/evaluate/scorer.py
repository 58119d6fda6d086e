"""Score models on one text: the 16-bit model once, then any number of others against it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.nn as nn
from tqdm import tqdm

from ..checkpoint.loader import load_tokenizer
from ..checkpoint.source import Folder, has_tokenizer
from ..cli import bars_are_off, raise_if_interrupted
from ..errors import CheckpointError
from ..kvcache.geometry import text_config
from .candidates import load_source
from .options import DEFAULT_CACHE_GB
from .reference import (
    Forward,
    LiveReference,
    Reference,
    ReferenceCache,
    cache_key,
    default_cache_folder,
    log_probs_of,
)
from .report import SOURCE_ROW
from .running import device_name, forward_of, use_float32_activations
from .score import ChunkScores, Summary, score_chunk, score_reference, summarize
from .text import Chunks, make_chunks

Say = Callable[[str, str], None]
"""Takes ("note" or "warning", text)."""


class Scorer:
    """A model's tokenizer, a text cut into chunks, and the model's predictions on them.

    Args:
        folder: the 16-bit model; or a quantized one, if ``run_reference`` is never called.
        text: what to score on.
        count, length: chunks, and tokens in each.
        cache: where the 16-bit model's predictions are kept; None is the default cache.
        trust_remote_code: let code that comes with the model run.
        progress: show progress bars on stderr.
        say: called with each note.

    Raises:
        CheckpointError: the folder has no tokenizer, one that cannot be read, or one that gives
            tokens which the model does not know.
        OptionError: the text is too short.
    """

    def __init__(
        self,
        folder: Folder,
        text: str,
        *,
        count: int,
        length: int,
        cache: ReferenceCache | None = None,
        trust_remote_code: bool = False,
        progress: bool = False,
        say: Say | None = None,
    ):
        self.folder = folder
        self.cache = cache or ReferenceCache(default_cache_folder(), int(DEFAULT_CACHE_GB * 1e9))
        self.trust_remote_code = trust_remote_code
        self.progress = progress
        self.say = say or (lambda kind, text: None)
        self.chunks = make_chunks(self._tokenizer(), text, count, length)
        check_vocabulary(self.chunks, folder)
        self.reference: Reference | None = None

    def _tokenizer(self) -> Any:
        path = self.folder.path
        if not has_tokenizer(path):
            raise CheckpointError(
                f"{path} has no tokenizer", hint="copy the tokenizer's files into it first"
            )
        return load_tokenizer(path, self.folder.config, trust_remote_code=self.trust_remote_code)

    def run_reference(self) -> Summary:
        """Get the 16-bit model's predictions, from the cache or by running it, and score them."""
        key = cache_key(self.folder, self.chunks, device_name())
        reference: Reference | None = self.cache.find(key, self.chunks)
        if reference is None:
            reference = self._compute_reference(key)
        self.reference = reference
        with self._bar(SOURCE_ROW, shown=isinstance(reference, LiveReference)) as bar:
            return summarize(
                score_reference(reference.log_probs(i), self.chunks.targets(i)) for i in bar
            )

    def _compute_reference(self, key: str) -> Reference:
        """Run the model over all chunks now if the result can be kept, else when it is needed."""
        model = load_source(self.folder.path, trust_remote_code=self.trust_remote_code).model
        use_float32_activations(model)
        forward = forward_of(model)
        first = log_probs_of(forward, self.chunks, 0)
        vocabulary = first.shape[1]
        if not self.cache.has_room(self.chunks, vocabulary):
            size = first.nbytes * len(self.chunks) / 1e9
            self.say(
                "note",
                f"the 16-bit model's predictions would take {size:.3g} GB of cache, more than its "
                "limit; the model runs again for each row",
            )
            return LiveReference(forward, self.chunks)
        with (
            self.cache.store(key, self.chunks, vocabulary) as write,
            self._bar(SOURCE_ROW) as bar,
        ):
            for i in bar:
                write(first if i == 0 else log_probs_of(forward, self.chunks, i))
        stored = self.cache.find(key, self.chunks)
        if stored is None:
            raise CheckpointError(f"{self.cache.folder}: what was just stored cannot be read back")
        return stored

    def score(self, model: nn.Module, name: str, *, float32: bool = True) -> Summary:
        """Score a model, against the 16-bit one where ``run_reference`` was called before.

        Args:
            model: final; with ``float32`` its embeddings are changed.
            name: for the progress bar.
            float32: compute with float32 activations.

        Raises:
            CheckpointError: its predictions are not finite, or of another vocabulary.
        """
        if float32:
            use_float32_activations(model)
        forward = forward_of(model)
        with self._bar(name) as bar:
            return summarize(self._score_chunk(forward, i) for i in bar)

    def _score_chunk(self, forward: Forward, index: int) -> ChunkScores:
        raise_if_interrupted()
        chunks = self.chunks
        reference = None if self.reference is None else self.reference.log_probs(index)
        logits = forward(chunks.ids[index])
        return score_chunk(logits[chunks.skip : -1], chunks.targets(index), reference)

    def _bar(self, name: str, *, shown: bool = True) -> Any:
        return tqdm(
            range(len(self.chunks)),
            desc=f"scoring {name}",
            unit="chunk",
            leave=False,
            dynamic_ncols=True,
            disable=bars_are_off(shown and self.progress),
        )


def check_vocabulary(chunks: Chunks, folder: Folder) -> None:
    """Refuse tokens that the model has no row for: their prediction cannot be scored.

    Raises:
        CheckpointError: there are such tokens.
    """
    config = folder.config
    size = text_config(config).get("vocab_size") or config.get("vocab_size")
    if isinstance(size, int) and not isinstance(size, bool) and chunks.ids.max() >= size > 0:
        raise CheckpointError(
            f"{folder.path}: its tokenizer gives the id {chunks.ids.max()}, its vocabulary ends at "
            f"{size - 1}",
            hint="this tokenizer belongs to another model, or the text names tokens that this "
            "model was never trained on",
        )

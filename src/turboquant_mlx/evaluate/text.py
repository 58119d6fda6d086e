"""The text that models are scored on, and how it is cut into chunks.

WikiText-2 is published with its words and punctuation set apart (``1 @,@ 500 people ( about half )
came .``). Models never see text like that, so it is put back together before it is scored.
"""

from __future__ import annotations

import io
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import OptionError

# The test set in its raw form, as a text file inside a zip file: no reader of columnar files is
# needed. This is the copy that llama.cpp's perplexity tool uses.
HUB_REPO = "ggml-org/ci"
HUB_FILE = "wikitext-2-raw-v1.zip"
HUB_MEMBER = "wikitext-2-raw/wiki.test.raw"
HUB_NAME = "WikiText-2 test"

_MARKS = re.compile(r" @[-,.]@ ")

# (pattern, replacement), applied in this order.
_JOINTS = [
    (re.compile(r" @([-,.])@ "), r"\1"),  # inside numbers and compounds
    (re.compile(r" (?=[,.;:!?%)\]])"), ""),  # punctuation that follows a word
    (re.compile(r"(?<=[(\[$]) "), ""),  # and that precedes one
    (re.compile(r'" ([^"\n]*) "'), r'"\1"'),  # a pair of quotation marks on one line
    (re.compile(r" (?='s|n't|'re)"), ""),  # contractions
    (re.compile(r"s ' "), "s' "),  # plural possessives
    (re.compile(r"^ +| +$", re.MULTILINE), ""),
]


@dataclass(frozen=True)
class SourceText:
    """A text and where it is from.

    Attributes:
        name: file name, or what the hub's text is called.
        content: what is tokenized.
        joined: whether WikiText's separated words were put back together.
    """

    name: str
    content: str
    joined: bool


@dataclass(frozen=True)
class Chunks:
    """Token sequences of equal length, each scored on its own.

    Attributes:
        ids: int32 [n, length].
        skip: leading positions whose prediction is not scored: 1 where the tokenizer begins every
            text with a token of its own, else 0.
        available: how many chunks would fit the text without overlap.
    """

    ids: np.ndarray
    skip: int
    available: int

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def length(self) -> int:
        """Tokens of one chunk."""
        return self.ids.shape[1]

    @property
    def scored(self) -> int:
        """Predictions of one chunk that are scored."""
        return self.length - 1 - self.skip

    def targets(self, index: int) -> np.ndarray:
        """The tokens that the scored positions of a chunk should predict: int32 [scored]."""
        return self.ids[index, 1 + self.skip :]


def join_words(text: str) -> str:
    """WikiText's separated words and punctuation as ordinary prose."""
    for pattern, replacement in _JOINTS:
        text = pattern.sub(replacement, text)
    return text


def read_text(path: str | Path | None, *, raw: bool = False) -> SourceText:
    """The text to score on.

    Args:
        path: a UTF-8 file; None takes WikiText-2's test set from the hub, or from its cache.
        raw: leave the words of WikiText's form apart.

    Raises:
        OptionError: the file cannot be read, is a pipe or a device, is empty or is not UTF-8; the
            hub cannot be reached.
    """
    if path is None:
        return _as_source(HUB_NAME, _hub_bytes(), raw)
    path = Path(path)
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            # reading a pipe may never end, a device never does
            raise OptionError(
                f"{path} is a pipe or a device", hint="save what comes out of it as a file first"
            )
        content = path.read_bytes()
    except OSError as error:
        raise OptionError(f"cannot read the text {path}: {error.strerror or error}") from None
    return _as_source(path.name, content, raw, path)


def _as_source(name: str, content: bytes, raw: bool, path: Path | None = None) -> SourceText:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise OptionError(f"the text {path or name} is not UTF-8") from None
    if not text.strip():
        raise OptionError(f"the text {path or name} is empty")
    joined = not raw and _MARKS.search(text) is not None
    return SourceText(name, join_words(text) if joined else text, joined)


def _hub_bytes() -> bytes:
    from huggingface_hub import hf_hub_download

    try:
        archive = hf_hub_download(HUB_REPO, HUB_FILE, repo_type="dataset")
        with zipfile.ZipFile(io.BytesIO(Path(archive).read_bytes())) as content:
            return content.read(HUB_MEMBER)
    except Exception as error:  # the client's errors and those below it share no base class
        lines = str(error).strip().splitlines()
        reason = f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else repr(error)
        raise OptionError(
            f"the text of {HUB_NAME} cannot be had from the hub ({reason})",
            hint="--text FILE scores on any text of your own",
        ) from error


def make_chunks(tokenizer: Any, text: str, count: int, length: int) -> Chunks:
    """Cut a text into chunks that are spread evenly over it.

    Args:
        tokenizer: of the model, as mlx-lm loads it.
        text: what to cut.
        count: chunks wanted; fewer are made where they would overlap.
        length: tokens of a chunk, with the token that begins every text where there is one.

    Raises:
        OptionError: the text has too few tokens for one chunk.
    """
    # verbose: no word about texts longer than the model's context, as chunks are not
    ids = list(tokenizer.encode(text, add_special_tokens=False, verbose=False))
    lead = _leading_token(tokenizer)
    body = length - len(lead)
    available = len(ids) // body
    if not available:
        raise OptionError(
            f"the text has {len(ids)} tokens, fewer than one chunk of {length}",
            hint=f"take a longer text, or --seq-len {max(len(ids) + len(lead), 2)}"
            if len(ids) + len(lead) >= 3
            else "take a longer text",
        )
    count = min(count, available)
    last = len(ids) - body
    starts = [i * last // max(count - 1, 1) for i in range(count)]
    rows = [lead + ids[start : start + body] for start in starts]
    return Chunks(np.array(rows, np.int32), len(lead), available)


def _leading_token(tokenizer: Any) -> list[int]:
    """The token that this tokenizer puts before every text, if it does."""
    begin = getattr(tokenizer, "bos_token_id", None)
    return [begin] if begin is not None and list(tokenizer.encode("a"))[:1] == [begin] else []

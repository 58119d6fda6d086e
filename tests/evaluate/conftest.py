"""What the evaluate tests share: tiny models, a text, a way to run the command."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tiny import build_source
from turboquant_mlx import convert
from turboquant_mlx.evaluate import command

# The tiny tokenizer makes about one token of each letter.
PROSE = (
    "The ferry left at noon. Nobody had counted the boxes, so the harbour master did it himself "
    "and found eleven: two of nails, one of books, eight of onions.\n"
    "def area(width, height):\n    return width * height\n"
    "Why does a kettle sing before it boils? Small bubbles collapse in the cooler water above.\n"
) * 12


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def source(models) -> Path:
    """A tiny random llama in bfloat16, with a tokenizer."""
    folder = models / "llama"
    build_source(folder, "llama")
    return folder


@pytest.fixture(scope="session")
def converted(source, models) -> Path:
    """The same model in 3 bits."""
    folder = models / "llama-3bit"
    convert(source, folder, bits=3)
    return folder


@pytest.fixture(scope="session")
def text(models) -> Path:
    path = models / "prose.txt"
    path.write_text(PROSE, encoding="utf-8")
    return path


@dataclass(frozen=True)
class Result:
    """What one run of the command did."""

    code: int
    out: str
    err: str
    output: Path

    @property
    def report(self) -> dict[str, Any]:
        return json.loads(self.output.read_text(encoding="utf-8"))

    @property
    def rows(self) -> dict[str, dict[str, Any]]:
        return {row["name"]: row for row in self.report["rows"]}

    @property
    def messages(self) -> list[str]:
        """Lines on standard error that begin with a word and a colon, without progress bars."""
        lines = [line.rpartition("\r")[2] for line in self.err.splitlines()]
        return [line for line in lines if line.startswith(("note:", "warning:", "error:", "hint:"))]


@pytest.fixture
def evaluate(capsys, tmp_path, source, text, models):
    """Run the command in this process, on ``source`` and ``text`` unless others are named.

    Every result goes to a file of its own; the cache is shared by all tests.
    """
    count = 0

    def evaluate(*argv: str | Path, model: Path | None = source) -> Result:
        nonlocal count
        count += 1
        output = tmp_path / f"result-{count}.json"
        arguments = [] if model is None else ["--hf-path", str(model)]
        for option, value in (
            ("--text", text),
            ("--output", output),
            ("--cache-dir", models / "cache"),
            ("--num-samples", 3),
            ("--seq-len", 48),
        ):
            arguments += [] if option in argv else [option, str(value)]
        capsys.readouterr()
        try:
            code = command.main([*arguments, *map(str, argv)])
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err, output)

    return evaluate

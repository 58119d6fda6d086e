"""What the generate tests share: a tokenizer, a model that follows a script, a way to run."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.tokenizer_utils import load as load_tokenizer

from tiny import VOCAB_SIZE, build_source
from turboquant_mlx.generate import command


@pytest.fixture(scope="session")
def source(tmp_path_factory) -> Path:
    """A tiny random llama with tokenizer, chat template and generation_config.json."""
    folder = tmp_path_factory.mktemp("source") / "llama"
    build_source(folder, "llama", dtype="float32")
    return folder


@pytest.fixture
def tokenizer(source):
    """The tokenizer of ``source`` in mlx-lm's wrapper."""
    return load_tokenizer(source)


class _Position:
    """The least that mlx-lm asks of a prompt cache."""

    state: tuple = ()


class ScriptedModel(nn.Module):
    """A model whose n-th answer token is decided beforehand.

    ``script[n]`` lists token ids from the likeliest down; everything else is far less likely.
    Past its end the script stays at its last entry. Prompts need three tokens or more: mlx-lm
    feeds all but the last one ahead, and one token at a time from there on.
    """

    def __init__(self, script: list[list[int]]):
        super().__init__()
        self.script = script
        self.prompt: list[int] = []
        self.step = -1

    def make_cache(self):
        return [_Position()]

    def __call__(self, tokens, cache=None):
        if tokens.shape[1] > 1:
            self.prompt += tokens[0].tolist()
            return mx.zeros((1, 1, VOCAB_SIZE))
        if self.step < 0:
            self.prompt += tokens[0].tolist()
        self.step += 1
        logits = [-20.0] * VOCAB_SIZE
        for rank, token in enumerate(self.script[min(self.step, len(self.script) - 1)]):
            logits[token] = 20.0 - rank
        return mx.array(logits)[None, None]


@dataclass
class Result:
    """What one run of the command did."""

    code: int
    out: str
    err: str
    loads: list[dict[str, Any]] = field(default_factory=list)
    model: ScriptedModel | None = None

    @property
    def notes(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("note: ")]


@pytest.fixture
def run(capsys):
    """Run the command in this process."""

    def run(*argv: str) -> Result:
        capsys.readouterr()
        try:
            code = command.main(list(argv))
        except SystemExit as stop:
            code = stop.code
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return run


@pytest.fixture
def answer(run, tokenizer, monkeypatch, tmp_path):
    """Run the command on a scripted model in place of one from disk.

    ``answer(script, *options)``: an entry of the script is a piece of text that is one token, or
    a token id, or a list of such from the likeliest down. ``--prompt`` is added unless
    ``prompt=None``.
    """

    def answer(
        script,
        *options: str,
        prompt: str | None = "why does ice float?",
        config: dict[str, Any] | None = None,
        generation_config: dict[str, Any] | None = None,
        model: Any = None,
    ) -> Result:
        ids = [[token_id(tokenizer, text) for text in as_list(entry)] for entry in script]
        scripted = ScriptedModel(ids) if model is None else model
        loads = []
        (tmp_path / "generation_config.json").write_text(json.dumps(generation_config or {}))

        def load_model(path_or_repo, **options):
            loads.append({"path_or_repo": path_or_repo, **options})
            full = {"model_type": "llama", "vocab_size": VOCAB_SIZE, **(config or {})}
            return command.LoadedModel(tmp_path, scripted, tokenizer, full)

        monkeypatch.setattr(command, "load_model", load_model)
        given = [] if prompt is None else ["--prompt", prompt]
        result = run("--model", "any", *given, *options)
        result.loads, result.model = loads, scripted
        return result

    return answer


def as_list(entry):
    return entry if isinstance(entry, list) else [entry]


def token_id(tokenizer, text: str | int) -> int:
    """Id of a piece of text that is one token; an id stays as it is."""
    if isinstance(text, int):
        return text
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert len(tokens) == 1, f"{text!r} is {len(tokens)} tokens"
    return tokens[0]


@pytest.fixture
def terminal(monkeypatch):
    """Standard input is a terminal."""
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))

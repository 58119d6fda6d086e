"""The Python code of the documents runs as it stands, on a tiny model under the name used there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tiny

ROOT = Path(__file__).resolve().parents[2]
SOURCE = "models/SmolLM2-135M-Instruct"
SAYS = {
    "docs/reference/library.md": [
        f"Converted {SOURCE} to smol-3bit",
        "bits per weight, relative error 0.0",
        "no such folder: ./not-there",
    ],
    "README.md": [],
}


@pytest.mark.parametrize("document", SAYS)
def test_python_code_runs(document, tmp_path, monkeypatch, capsys):
    tiny.build_source(tmp_path / SOURCE, "llama")
    monkeypatch.chdir(tmp_path)
    text = (ROOT / document).read_text(encoding="utf-8")
    pieces = re.findall(r"^```python\n(.*?)^```", text, flags=re.S | re.M)
    assert pieces
    names: dict[str, object] = {}
    for number, piece in enumerate(pieces):
        exec(compile(piece, f"{document}, piece {number}", "exec"), names)
    printed = capsys.readouterr().out
    for words in SAYS[document]:
        assert words in printed

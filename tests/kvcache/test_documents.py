"""The guide's Python runs as it stands; its figures of sizes are those of the code.

The program that starts mlx-vlm's server is run in ``test_mlx_vlm.py``.
"""

from __future__ import annotations

import re
from pathlib import Path

import tiny
from turboquant_mlx.kvcache.spec import PRESETS, KVSpec

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "kv-cache.md").read_text(encoding="utf-8")


def test_python_code_runs(tmp_path, monkeypatch, capsys):
    tiny.build_source(tmp_path / "models/SmolLM2-135M-Instruct", "llama")
    monkeypatch.chdir(tmp_path)
    code, _ = re.findall(r"^```python\n(.*?)^```", GUIDE, flags=re.S | re.M)
    exec(compile(code, "docs/guides/kv-cache.md", "exec"), {})
    assert "2 of 2 layers are packed" in capsys.readouterr().out


def test_presets_are_as_the_guide_says():
    rows = dict(re.findall(r"^\| `(\w+)` \| (\d / \d) \| [\d.]+", GUIDE, flags=re.M))
    for name, (key, value) in PRESETS.items():
        assert rows[name] == f"{key} / {value}"


def test_bits_are_as_the_guide_says():
    rows = re.findall(r"^\| `[\w.]+` \| (\d) / (\d) \| ([\d.]+)", GUIDE, flags=re.M)
    assert len(rows) == 7
    for key, value, bits in rows:
        assert abs(KVSpec(int(key), int(value)).token_bytes(64) * 8 / 128 - float(bits)) < 0.006

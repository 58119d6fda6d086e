"""scripts/bench_quality.py: the predecessor's method as its own files show it, and the table."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests" / "fixtures" / "predecessor"


@pytest.fixture(scope="module")
def bench():
    path = ROOT / "scripts" / "bench_quality.py"
    spec = importlib.util.spec_from_file_location("bench_quality", path)
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up by name
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "bench_quality", module)
        spec.loader.exec_module(module)
        yield module


@pytest.mark.parametrize(
    ("width", "block"),
    [
        *((128, 128), (160, 160), (224, 224), (352, 32), (5120, 5120), (6656, 512)),
        *((11008, 256), (13824, 1536), (14336, 14336), (576, 192), (1536, 1536)),
    ],
)
def test_the_predecessors_blocks(bench, width, block):
    assert bench.predecessor_block(width) == block


@pytest.mark.parametrize(("fixture", "bits"), [("dense-3bit-g64", 3), ("dense-2bit-g32", 2)])
def test_its_sizes_and_signs_are_those_in_its_files(bench, fixture, bits, monkeypatch):
    config = json.loads((FIXTURES / fixture / "config.json").read_text())["quantization"]
    monkeypatch.setattr(bench, "GROUP_SIZE", config["group_size"])
    stored = mx.load(str(FIXTURES / fixture / "model.safetensors"))
    paths = [name.removesuffix(".codebook") for name in stored if name.endswith(".codebook")]
    assert paths
    for path in paths:
        arrays = {
            name: stored[f"{path}.{name}"] for name in ("weight", "scales", "codebook", "signs")
        }
        shape = (arrays["weight"].shape[0], arrays["signs"].size)
        assert bench.predecessor_bytes(shape, bits) == sum(a.nbytes for a in arrays.values())
        np.testing.assert_array_equal(
            bench.predecessor_signs(shape[1], path, config["rotation_seed"]),
            np.array(arrays["signs"].astype(mx.float32)),
        )


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_its_error_is_that_of_the_table_on_normal_values(bench, bits):
    weight = np.random.default_rng(0).standard_normal((64, 576)).astype(np.float32)
    decoded = bench.predecessor_weight(weight, bits, "some.path", 42)
    error = np.square(decoded - weight).sum() / np.square(weight).sum()
    expected = {2: 0.1145, 3: 0.0334, 4: 0.0092}[bits]  # measured with the package itself
    assert error == pytest.approx(expected, rel=0.05)


def test_the_table_and_its_json(bench, source, text, models, capsys, monkeypatch):
    # what the rows are scored on is tested here, not error feedback, which takes its time
    monkeypatch.setitem(bench.KIND_OPTIONS, "in-domain", "--balance-text {text}")
    arguments = [str(source), "--text", str(text), "--bits", "3", "--chunks", "2", "--seeds", "2"]
    arguments += ["--seq-len", "40", "--cache-dir", str(models / "cache"), "--check"]
    arguments += ["--variant=--no-balance", "--in-domain", "--options=--attn-bits 4"]
    code = bench.main(arguments)
    lines = capsys.readouterr().out.splitlines()
    report = json.loads(lines[-1])
    rows = {row["kind"]: row for row in report["rows"]}
    assert list(rows) == ["affine", "predecessor", "default", "variant", "in-domain"]
    assert (report["chunks"], report["seeds"]) == (2, 2)
    assert report["environment"]["mlx"] and report["model"] == "llama"
    assert [len(row["kl_seeds"]) for row in rows.values()] == [1, 2, 2, 2, 2]
    assert rows["default"]["kl"] == pytest.approx(np.mean(rows["default"]["kl_seeds"]))
    assert rows["default"]["kl_seeds"][0] != rows["default"]["kl_seeds"][1]
    assert rows["default"]["options"] == "--attn-bits 4"
    assert rows["in-domain"]["options"] == "--balance-text {text} --attn-bits 4"
    assert rows["default"]["goal"] == [0.42, 3.3] and rows["affine"]["goal"] is None
    # a tiny random model is far from the goals of a real one
    assert not rows["default"]["holds"] and code == 1
    assert sum("MISSED" in line for line in lines[:-1]) == 2
    assert any(line.startswith("  predecessor 3-bit") for line in lines)


def test_quick_and_full(bench):
    quick, full = bench.parse(["--quick"]), bench.parse([])
    assert (quick.chunks, quick.seeds) == (2, 1)
    assert (full.chunks, full.seeds) == (8, 3)


def test_errors_are_one_line_and_come_first(bench, tmp_path, source, text, capsys):
    assert bench.main([str(tmp_path / "absent"), "--text", "x"]) == 2
    assert capsys.readouterr().err.startswith("error: no such folder")
    assert bench.main([str(source), "--text", str(text), "--variant=--no-such-thing"]) == 2
    assert "unrecognized arguments: --no-such-thing" in capsys.readouterr().err


def test_the_halves_of_a_text(bench):
    assert bench.halves("one\ntwo\nthree\n") == ("one\ntwo\n", "three\n")
    assert bench.halves("no line end") == ("no li", "ne end")

"""``python -m turboquant_mlx.evaluate``: what each option changes, and how it fails."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from distances import divergences
from tiny import build_source
from turboquant_mlx.checkpoint.loader import load_model, load_tokenizer
from turboquant_mlx.evaluate import candidates, pipeline, scorer
from turboquant_mlx.evaluate.command import main
from turboquant_mlx.evaluate.text import make_chunks
from turboquant_mlx.kernels.dispatch import force_backend

PREDECESSOR = Path(__file__).parents[1] / "fixtures" / "predecessor" / "dense-3bit-g64"
ONE = ("--bits", "3", "--no-affine", "--no-qjl", "--no-noise-floor")


@pytest.fixture
def quickly(evaluate, converted):
    """Run the command without converting anything: the rows are the source and one folder."""
    return partial(evaluate, "--compare", converted, "--no-noise-floor")


def test_everything_by_default(evaluate):
    result = evaluate("--bits", "4")
    assert result.code == 0, result.err
    rows = result.rows
    assert list(rows) == [
        "16-bit model",
        "noise floor",
        "affine 4-bit g64",
        "mxfp4",
        "nvfp4",
        "TurboQuant 4-bit",
        "TurboQuant 4-bit + QJL",
    ]
    assert result.report["schema"] == 1 and result.report["complete"]
    assert result.report["chunks"] == {"count": 3, "length": 48, "scored_tokens": 141}
    assert {"machine", "device", "python", "mlx", "mlx-lm", "numpy"} <= set(
        result.report["environment"]
    )
    for row in rows.values():
        assert row["tokens"] == 141 and row["perplexity"] > 1
        assert len(row["chunk_kl"]) == len(row["chunk_nll"]) == 3
    reference = rows.pop("16-bit model")
    assert (reference["kl_mean"], reference["top1"], reference["bits_per_weight"]) == (0, 1, None)
    floor = rows.pop("noise floor")
    for row in rows.values():
        assert row["kl_mean"] > 2 * floor["kl_mean"] > 0
        assert 0 < row["kl_median"] < row["kl_mean"] < row["kl_p99"]
        assert row["top1"] < 1 and row["bits_per_weight"] > 4 and row["kl_error"] > 0
    assert rows["TurboQuant 4-bit + QJL"]["kl_mean"] < rows["TurboQuant 4-bit"]["kl_mean"]
    assert rows["TurboQuant 4-bit"]["options"]["bits"] == 4


def test_the_table_has_a_line_for_each_row(quickly):
    result = quickly()
    head, blank, titles, *lines = result.out.splitlines()
    assert head.endswith("on prose.txt: 3 chunks of 48 tokens, 141 predictions") and not blank
    assert "KL (nats)" in titles and "bits/weight" in titles
    assert [line.split("  ")[1] for line in lines] == ["16-bit model", "llama-3bit"]
    assert f"{result.rows['llama-3bit']['kl_mean']:.4f}" in lines[1]
    # each row is told as soon as it is there, and where the numbers went
    assert "llama-3bit: KL " in result.err
    assert result.err.endswith(f"written to {result.output}\n")
    assert "scoring llama-3bit" in result.err


def test_json_is_the_file(quickly):
    result = quickly("--json")
    assert json.loads(result.out) == result.report


def test_the_divergence_is_that_of_the_two_models(quickly, source, converted, text):
    """Checked with logits made and compared elsewhere."""
    result = quickly()
    tokenizer = load_tokenizer(source, {})
    chunks = make_chunks(tokenizer, text.read_text(), 3, 48)
    means, right, surprise = [], 0, []
    dense, ours = (load_model(folder)[0] for folder in (source, converted))
    for model in (dense, ours):
        model.model.embed_tokens.weight = model.model.embed_tokens.weight.astype(mx.float32)
    for ids in chunks.ids:
        a, b = (model(mx.array(ids)[None])[0, :-1] for model in (dense, ours))
        means.append(divergences(a, b).mean())
        right += (a.argmax(-1) == b.argmax(-1)).sum().item()
        nll = mx.logsumexp(b, axis=-1) - b[mx.arange(47), mx.array(ids[1:])]
        surprise.append(nll.mean().item())
    row = result.rows["llama-3bit"]
    np.testing.assert_allclose(row["chunk_kl"], means, rtol=5e-3)
    np.testing.assert_allclose(row["chunk_nll"], surprise, rtol=1e-4)
    assert row["top1"] == pytest.approx(right / 141, abs=0.01)
    assert row["kl_mean"] == pytest.approx(np.mean(means), rel=2e-3)


def test_a_gpu_would_give_the_same(quickly, tmp_path):
    """Without our CPU back-end: MLX's own layers and the packed layers' portable path."""
    flags = ("--cache-dir", tmp_path / "cache")
    ours = quickly()
    with force_backend("portable"):
        rows = quickly(*flags).rows
    for name, row in ours.rows.items():
        np.testing.assert_allclose(rows[name]["chunk_kl"], row["chunk_kl"], rtol=2e-3)
        np.testing.assert_allclose(rows[name]["chunk_nll"], row["chunk_nll"], rtol=1e-4)


def test_a_folder_scores_as_the_same_conversion_on_the_fly(evaluate, converted, source):
    result = evaluate("--compare", converted, source, *ONE)
    assert list(result.rows) == ["16-bit model", "TurboQuant 3-bit", "llama-3bit", "llama"]
    made, found, plain = list(result.rows.values())[1:]
    for key in ("kl_mean", "perplexity", "top1", "bits_per_weight", "model_bytes", "options"):
        assert found[key] == made[key]
    assert plain["kl_mean"] == pytest.approx(0, abs=1e-5)
    assert plain["bits_per_weight"] is None


def test_a_quantized_model_alone_gets_its_perplexity(evaluate, quickly, converted):
    result = evaluate(model=converted)
    (row,) = result.report["rows"]
    compared = quickly().rows["llama-3bit"]
    assert row["perplexity"] == compared["perplexity"]
    assert row["kl_mean"] is row["top1"] is None and row["chunk_kl"] == []
    assert row["bits_per_weight"] == compared["bits_per_weight"]
    assert "KL" not in result.out


# --- options that change what is scored -----------------------------------------------------------


def test_group_size_reaches_our_rows_and_affine(evaluate):
    flags = ("--bits", "3", "--no-qjl", "--no-noise-floor", "--group-size", "32")
    affine, ours = evaluate(*flags).report["rows"][1:]
    assert affine["bits_per_weight"] == 4.0
    assert ours["options"]["group_size"] == 32


def test_a_variant_is_one_more_row(evaluate):
    result = evaluate(*ONE, "--variant=--attn-bits 4", "--variant=--rotation none")
    plain, attention, unrotated = list(result.rows.values())[1:]
    assert attention["name"] == "TurboQuant 3-bit --attn-bits 4"
    assert attention["options"]["attn_bits"] == 4
    assert attention["bits_per_weight"] > plain["bits_per_weight"]
    assert unrotated["options"]["rotation"] == "none"


def test_chunks_and_their_length(quickly):
    result = quickly("--num-samples", "2", "--seq-len", "20")
    assert result.report["chunks"] == {"count": 2, "length": 20, "scored_tokens": 38}
    assert result.messages == []


def test_more_chunks_than_the_text_has(quickly):
    result = quickly("--num-samples", "512", "--seq-len", "1000")
    count = result.report["chunks"]["count"]
    assert 1 <= count < 512
    assert result.messages == [f"note: the text has room for no more than {count} chunks"]


def test_raw_text_stays_as_it_is(quickly, tmp_path):
    text = tmp_path / "wikitext.txt"
    text.write_text("a well @-@ known harbour , they say . " * 40)
    joined, raw = (quickly("--text", text, *flags) for flags in ((), ("--raw-text",)))
    assert (joined.report["text"]["joined"], raw.report["text"]["joined"]) == (True, False)
    assert joined.report["text"]["sha256"] != raw.report["text"]["sha256"]
    assert joined.rows["16-bit model"]["perplexity"] != raw.rows["16-bit model"]["perplexity"]


def test_trust_is_handed_on(quickly, monkeypatch):
    seen = {}
    for module, name in (
        (scorer, "load_source"),
        (scorer, "load_tokenizer"),
        (pipeline, "prepare"),
        (candidates, "load_folder"),
    ):
        real = getattr(module, name)

        def spy(*args, name=name, real=real, trust_remote_code=False, **kwargs):
            seen[name] = trust_remote_code
            return real(*args, trust_remote_code=trust_remote_code, **kwargs)

        monkeypatch.setattr(module, name, spy)
    quickly("--cache-dir", "never-made", "--cache-limit", "0")
    assert len(seen) == 4 and set(seen.values()) == {False}
    quickly("--cache-dir", "never-made", "--cache-limit", "0", "--trust-remote-code")
    assert set(seen.values()) == {True}


# --- the cache ------------------------------------------------------------------------------------


def test_the_16_bit_model_runs_once_per_text(quickly, tmp_path, monkeypatch):
    flags = ("--cache-dir", tmp_path / "cache")
    first = quickly(*flags)
    assert len(list((tmp_path / "cache").iterdir())) == 1
    monkeypatch.setattr(scorer, "load_source", None)  # calling it would fail
    second = quickly(*flags)
    assert second.code == 0, second.err
    keys = ("perplexity", "kl_mean", "kl_p99", "chunk_kl")
    for name in first.rows:
        assert [first.rows[name][k] for k in keys] == [second.rows[name][k] for k in keys]


def test_without_room_for_the_cache_the_numbers_are_the_same(quickly, tmp_path):
    kept = quickly()
    again = quickly("--cache-dir", tmp_path / "cache", "--cache-limit", "0.0000001")
    assert any("the model runs again for each row" in line for line in again.messages)
    assert not (tmp_path / "cache").exists()
    for name, row in kept.rows.items():
        assert row["chunk_kl"] == again.rows[name]["chunk_kl"]
        assert row["perplexity"] == again.rows[name]["perplexity"]


# --- results --------------------------------------------------------------------------------------


def test_without_output_the_file_gets_a_name(source, converted, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = ["--text", str(text), "-n", "1", "--seq-len", "32", "--cache-dir", "cache"]
    assert main(["--hf-path", str(converted), *flags]) == 0
    (file,) = tmp_path.glob("evaluate-*.json")
    assert re.fullmatch(r"evaluate-llama-3bit-\d{8}-\d{6}\.json", file.name)


def test_finished_rows_survive_an_interruption(quickly, source, monkeypatch):
    real = candidates.prepare

    def prepare(candidate, *args, **kwargs):
        if candidate.name == "llama":
            raise KeyboardInterrupt
        return real(candidate, *args, **kwargs)

    monkeypatch.setattr(pipeline, "prepare", prepare)
    result = quickly("--compare", source)
    assert result.code == 130
    assert not result.report["complete"]
    assert list(result.rows) == ["16-bit model", "llama-3bit"]


def test_a_long_evaluation_is_announced_once(quickly, source, monkeypatch):
    monkeypatch.setattr(pipeline, "LONG_SECONDS", 0.0)
    (line,) = quickly("--compare", source, PREDECESSOR).messages
    assert re.fullmatch(r"note: the remaining rows take about \d+ minutes; .* is faster", line)


# --- errors ---------------------------------------------------------------------------------------


def refused(result) -> str:
    """The one error line of a run that failed without a traceback."""
    assert result.code == 2
    (line,) = [line for line in result.messages if line.startswith("error: ")]
    assert not line.endswith(".") and "Traceback" not in result.err
    assert result.out == ""
    return line.removeprefix("error: ")


def test_models_that_are_not_there(evaluate, tmp_path):
    absent = tmp_path / "absent"
    assert refused(evaluate(model=absent)).startswith("no such folder")
    assert refused(evaluate("--compare", absent)).startswith("no such folder")
    assert "--hf-path" in refused(evaluate(model=None))


def test_a_quantized_model_is_no_reference(evaluate, converted):
    result = evaluate("--bits", "3", model=converted)
    assert "is quantized already" in refused(result)
    assert any("--compare" in line for line in result.messages if line.startswith("hint: "))


def test_texts_and_outputs(evaluate, tmp_path):
    assert "cannot read the text" in refused(evaluate("--text", tmp_path / "absent"))
    (tmp_path / "short").write_text("too short")
    assert "fewer than one chunk" in refused(evaluate("--text", tmp_path / "short"))
    assert "is a folder" in refused(evaluate("--output", tmp_path))
    nowhere = tmp_path / "absent" / "result.json"
    assert "there is no folder" in refused(evaluate("--output", nowhere))
    os.mkfifo(tmp_path / "pipe")
    assert "is a device or a pipe" in refused(evaluate("--output", tmp_path / "pipe"))
    long = refused(evaluate("--output", tmp_path / ("x" * 250)))
    assert long.endswith("cannot be written: File name too long")
    assert refused(evaluate("--output", "")) == "--output is empty"


def test_what_a_variant_cannot_be_is_known_before_anything_runs(evaluate, tmp_path, monkeypatch):
    monkeypatch.setattr(scorer.Scorer, "__init__", None)
    absent = tmp_path / "absent"
    for option in ("--balance-text", "--error-feedback --feedback-text"):
        message = refused(evaluate(*ONE, f"--variant={option} {absent}"))
        assert message == f"TurboQuant 3-bit {option} {absent}: no such text file: {absent}"
    message = refused(evaluate("--bits", "2", "4", "--variant=--target-bpw 3.7"))
    assert message.startswith("--variant '--target-bpw 3.7': --target-bpw takes the place")


def test_options_without_effect(evaluate, converted):
    for option in ("--include-affine", "--include-qjl"):
        message = refused(evaluate("--compare", converted, option))
        assert message == f"{option} has no effect without --bits when --compare is given"
    result = evaluate("--no-affine", "--no-noise-floor", "-g", "64", model=converted)
    assert result.code == 0
    (note,) = result.messages
    assert note.endswith("scored alone: --group-size, --no-affine, --no-noise-floor have no effect")


def test_a_source_without_tokenizer(evaluate, models):
    folder = models / "mute"
    build_source(folder, "llama", tokenizer=False)
    assert "has no tokenizer" in refused(evaluate(model=folder))


def test_another_vocabulary_names_the_row(evaluate, models):
    folder = models / "wordy"
    build_source(folder, "llama", vocab_size=320)
    message = refused(evaluate("--compare", folder, "--no-noise-floor"))
    assert message.startswith("wordy: its vocabulary has 320 tokens, that of the 16-bit model 288")


def test_a_model_that_predicts_nothing_names_the_row(evaluate, source, tmp_path):
    folder = tmp_path / "broken"
    shutil.copytree(source, folder)
    weights = mx.load(str(folder / "model.safetensors"))
    weights["model.norm.weight"] = weights["model.norm.weight"] * mx.array(float("nan"))
    mx.save_safetensors(str(folder / "new.safetensors"), weights, metadata={"format": "mlx"})
    os.replace(folder / "new.safetensors", folder / "model.safetensors")
    message = refused(evaluate("--compare", folder, "--no-noise-floor"))
    assert message == "broken: its predictions are not finite numbers"


def test_a_tokenizer_of_another_model(evaluate, models, tmp_path):
    folder = models / "far"
    build_source(folder, "llama")
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    far = {**tokenizer["added_tokens"][0], "id": 100_000, "content": "<|far|>"}
    tokenizer["added_tokens"].append(far)
    file.write_text(json.dumps(tokenizer), encoding="utf-8")
    words = tmp_path / "words"
    words.write_text("hi <|far|> there " * 40)
    message = refused(evaluate("--text", words, model=folder))
    assert message == f"{folder}: its tokenizer gives the id 288, its vocabulary ends at 287"


@pytest.mark.parametrize("kind", [ValueError, TypeError, KeyError])
def test_a_model_whose_code_fails(quickly, source, tmp_path, monkeypatch, kind):
    def fail(*_, **__):
        raise kind("no such thing")

    monkeypatch.setattr("mlx_lm.models.llama.Model.__call__", fail)
    message = refused(quickly("--cache-dir", tmp_path))
    assert message.replace("'", "") == "this model cannot be run: no such thing"


def test_usage_errors_load_nothing():
    program = (
        "import sys\nfrom turboquant_mlx.evaluate.command import main\n"
        "code = main(['--hf-path', 'x', '--num-samples', '0'])\n"
        "assert not {'mlx', 'mlx_lm', 'transformers'} & set(sys.modules)\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stderr == "error: --num-samples 0 is not a positive number\n"
    assert done.returncode == 2

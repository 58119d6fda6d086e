"""Error feedback in whole conversions: what it is worth, what it reaches, what it says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from filelock import FileLock

import tiny
from converting import (
    Conversion,
    Workshop,
    contents,
    convert,
    manifest_of,
    modules_that_differ,
    packed_weight,
    stored,
)
from turboquant_mlx.checkpoint.loader import load_model
from turboquant_mlx.convert import feedback, self_text
from turboquant_mlx.convert.calibrate import begin_tokens
from turboquant_mlx.convert.feedback import second_moments
from turboquant_mlx.convert.feedback_store import FeedbackStore
from turboquant_mlx.convert.layer_pass import intercept
from turboquant_mlx.convert.self_text import sample_sequences
from turboquant_mlx.convert.source_model import open_source
from turboquant_mlx.quant.rotation import hadamard_matrix
from turboquant_mlx.quant.weight import dequantize_weight

TEXT = "the quick brown fox jumps over 13 lazy dogs, and so on. " * 400


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(TEXT)
    return str(file)


@pytest.fixture(scope="module", autouse=True)
def short_texts() -> None:
    """So that the tiny models of these tests are done in a moment."""
    patch = pytest.MonkeyPatch()
    patch.setattr(feedback, "TEXT_PIECES", 8)
    patch.setattr(feedback, "TEXT_LENGTH", 64)
    patch.setattr(self_text, "SEQUENCES", 8)
    patch.setattr(self_text, "LENGTH", 48)
    yield
    patch.undo()


def inputs_of(source: Path, paths: list[str], folder: Path) -> dict[str, np.ndarray]:
    """What reaches layers of the 16-bit model when it reads other parts of the same text."""
    opened = open_source(source)
    found: dict[str, np.ndarray] = {}
    modules = dict(opened.model.named_modules())

    def watch(path, call, x, *args, **kwargs):
        found[path] = np.array(x.astype(mx.float32)).reshape(-1, x.shape[-1])
        return call(x, *args, **kwargs)

    for path in paths:
        intercept(modules[path], lambda *a, path=path, **k: watch(path, *a, **k))
    tokens = opened.tokenizer.encode(TEXT, add_special_tokens=False)[1000:1400]
    mx.eval(opened.model(mx.array([tokens])))
    return found


def errors(source: Path, folder: Path, paths: list[str]) -> dict[str, float]:
    """Relative error of the outputs of layers on the inputs that the 16-bit model gives them."""
    weights = dict(open_source(source).model.named_modules())
    result = {}
    for path, x in inputs_of(source, paths, folder).items():
        w = np.array(weights[path].weight.astype(mx.float32))
        e = np.array(dequantize_weight(packed_weight(folder, path))) - w
        result[path] = float(np.square(x @ e.T).sum() / np.square(x @ w.T).sum())
    return result


FIRST = [
    "model.layers.0.self_attn.q_proj",
    "model.layers.0.self_attn.v_proj",
    "model.layers.0.mlp.gate_proj",
    "model.layers.0.mlp.down_proj",
    "model.layers.1.self_attn.o_proj",
]


def test_outputs_of_the_layers_are_closer(workshop: Workshop, llama: Path, text: str) -> None:
    plain = workshop.converted(llama, balanced=True).folder
    fed = workshop.converted(
        llama, "--error-feedback", "--feedback-text", text, balanced=True
    ).folder
    before, after = errors(llama, plain, FIRST), errors(llama, fed, FIRST)
    for path in FIRST:
        assert after[path] < 0.8 * before[path], path


def test_every_layer_is_coded_anew_and_nothing_else_changes(
    workshop: Workshop, llama: Path, text: str
) -> None:
    plain = workshop.converted(llama)
    fed = workshop.converted(llama, "--error-feedback", "--feedback-text", text)
    assert modules_that_differ(plain.folder, fed.folder) == set(manifest_of(fed.folder).modules)
    assert manifest_of(plain.folder).modules == manifest_of(fed.folder).modules
    kinds = [{n: (t[0], t[1]) for n, t in stored(f.folder).items()} for f in (plain, fed)]
    assert kinds[0] == kinds[1]
    assert fed.warnings == []
    assert contents(plain.folder).keys() == contents(fed.folder).keys()
    model, _ = load_model(fed.folder)
    assert mx.isfinite(model(mx.array([tiny.token_ids()]))).all().item()


def test_it_says_first_how_long_it_will_take(workshop: Workshop, llama: Path, text: str) -> None:
    fed = workshop.converted(llama, "--error-feedback", "--feedback-text", text)
    (forecast,) = (note for note in fed.notes if "error feedback" in note)
    assert forecast.startswith("note: error feedback will take about 5 seconds, and 0.0 GB of")


@pytest.mark.parametrize("model_type", tiny.MOE_TYPES)
def test_experts_of_every_kind(workshop: Workshop, model_type: str, text: str) -> None:
    source = workshop.source(model_type)
    plain = workshop.converted(source)
    fed = workshop.converted(source, "--error-feedback", "--feedback-text", text)
    assert modules_that_differ(plain.folder, fed.folder) == set(manifest_of(fed.folder).modules)
    assert fed.warnings == []
    assert any("experts; the inputs of their block" in note for note in fed.notes)


def test_an_expert_is_fitted_to_the_tokens_that_it_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((6, 1, 1, 8)).astype(np.float32)  # tokens, as a stack gets them
    indices = np.array([[0, 1], [0, 1], [1, 0], [0, 3], [0, 3], [1, 3]])
    asked = []

    def moments(x: np.ndarray) -> np.ndarray:
        asked.append(x.copy())
        return np.eye(8) * len(x)

    experts = feedback._Experts(values, indices, mx.zeros((4, 2, 8)), moments)
    flat = values.reshape(6, 8)
    assert np.array_equal(asked.pop(), flat)
    for expert, tokens in enumerate([[0, 1, 2, 3, 4], [0, 1, 2, 5], [], [3, 4, 5]]):
        assert experts(expert).shape == (8, 8)
        if tokens:
            assert np.array_equal(asked.pop(), flat[tokens])
        assert not asked
    assert experts.sparse == 4


def test_second_moments_are_those_of_the_rotated_input() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3000, 24)).astype(np.float32)
    m = rng.uniform(0.5, 2, 24).astype(np.float16)
    z = (x * m.astype(np.float32)) @ np.kron(np.eye(3), hadamard_matrix(8)).T
    assert np.allclose(second_moments(x, 8, m), z.T @ z, rtol=1e-3, atol=0.5)


def test_later_layers_see_what_quantized_layers_give(
    workshop: Workshop, llama: Path, text: str
) -> None:
    # first layer in fewer bits: other inputs for the second, so other codes there
    flags = ["--error-feedback", "--feedback-text", text]
    a = workshop.converted(llama, *flags)
    b = workshop.converted(llama, *flags, "--attn-bits", "2")
    assert "model.layers.1.mlp.down_proj" in modules_that_differ(a.folder, b.folder)
    plain = [workshop.converted(llama, *bits) for bits in ([], ["--attn-bits", "2"])]
    assert not any("mlp" in p for p in modules_that_differ(plain[0].folder, plain[1].folder))


def test_streaming_gives_the_same_bytes(workshop: Workshop, moe: Path, text: str) -> None:
    flags = ["--error-feedback", "--feedback-text", text]
    plain, streamed = (
        workshop.converted(moe, *flags, *more).folder for more in ([], ["--streaming"])
    )
    assert stored(plain) == stored(streamed)


def test_a_model_that_cannot_run_is_converted_without(
    workshop: Workshop, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError("no\nsuch thing")

    monkeypatch.setattr(feedback, "sample_sequences", fail)
    done = convert(llama, tmp_path / "out", "--no-balance", "--error-feedback")
    assert done.code == 0
    count = len(manifest_of(done.folder).modules)
    assert done.warnings == [
        f"warning: no error feedback for {count} of {count} layers: this model cannot be run "
        "(ValueError: no such thing)"
    ]
    assert modules_that_differ(done.folder, workshop.converted(llama).folder) == set()


def test_nothing_is_left_behind_when_it_fails(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(FeedbackStore, "put", stop)
    target = tmp_path / "place" / "out"
    target.parent.mkdir()
    done = convert(llama, target, "--error-feedback", "--feedback-text", text, "--no-balance")
    assert done.code == 130
    assert list(target.parent.iterdir()) == []


@pytest.mark.parametrize("what", ["tokens", "a layer"])
def test_a_full_disk_is_no_fault_of_the_model(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, what: str
) -> None:
    def numpy_fails(*_: object) -> None:
        raise OSError("6016 requested and 2016 written")

    def mlx_fails(*_: object) -> None:
        raise RuntimeError("[write] Unable to write 6016 bytes to file.")

    if what == "tokens":
        monkeypatch.setattr(np, "save", numpy_fails)
    else:
        monkeypatch.setattr(mx, "save_safetensors", mlx_fails)
    target = tmp_path / "place" / "out"
    target.parent.mkdir()
    done = convert(llama, target, "--error-feedback", "--feedback-text", text, "--no-balance")
    assert done.code == 2
    assert not done.warnings
    error, hint = done.messages[-2:]
    assert error.startswith(f"error: {target.parent}/.out.feedback-")
    assert "cannot be written" in error
    assert "free some space" in hint
    assert list(target.parent.iterdir()) == []


class TestInterrupted:
    """A second run of the same command goes on where the first was stopped."""

    def interrupted(self, source: Path, target: Path, flags: list[str], after: int) -> Conversion:
        put, count = FeedbackStore.put, 0

        def stop_after(store: FeedbackStore, path: str, packed: object) -> None:
            nonlocal count
            count += 1
            if count > after:
                raise KeyboardInterrupt
            put(store, path, packed)  # type: ignore[arg-type]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FeedbackStore, "put", stop_after)
            return convert(source, target, *flags)

    def test_it_goes_on(
        self, workshop: Workshop, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        flags = ["--no-balance", "--error-feedback"]  # the text of the model's own is kept as well
        target = tmp_path / "out"
        stopped = self.interrupted(llama, target, flags, after=4)
        assert stopped.code == 130
        assert stopped.notes[-1].startswith("note: 4 quantized layers are kept in ")
        assert not target.exists()
        (left,) = tmp_path.iterdir()
        assert left.name.startswith(".out.feedback-")

        coded: list[str] = []
        put = FeedbackStore.put
        monkeypatch.setattr(
            FeedbackStore, "put", lambda s, path, w: coded.append(path) or put(s, path, w)
        )
        monkeypatch.setattr(feedback, "sample_sequences", None)
        done = convert(llama, target, *flags)
        assert done.code == 0, done.err
        assert "note: an earlier run of this command has left 4 layers" in done.notes
        assert len(coded) == len(manifest_of(target).modules) - 4
        assert [path.name for path in tmp_path.iterdir()] == ["out"]
        monkeypatch.undo()
        whole = workshop.converted(llama, *flags[1:])
        assert stored(target) == stored(whole.folder)

    def test_not_while_the_first_is_still_at_work(self, llama: Path, tmp_path: Path) -> None:
        flags = ["--no-balance", "--error-feedback"]
        target = tmp_path / "out"
        self.interrupted(llama, target, flags, after=4)
        (left,) = tmp_path.iterdir()
        before = contents(left)
        with FileLock(left / ".lock"):  # as a process holds it that has not ended
            done = convert(llama, target, *flags)
            assert done.code == 2
            assert done.messages[-2].startswith("error: another process runs this very conversion")
            assert contents(left) == before
            # one with other options leaves it alone, too
            assert convert(llama, target, *flags, "--bits", "2").code == 0
            assert contents(left) == before
        assert convert(llama, target, *flags, "--overwrite").code == 0
        assert [path.name for path in tmp_path.iterdir()] == ["out"]

    def test_what_is_damaged_is_made_again(
        self,
        workshop: Workshop,
        llama: Path,
        tmp_path: Path,
        text: str,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        flags = ["--no-balance", "--error-feedback", "--feedback-text", text]
        target = tmp_path / "out[1]"  # of a pattern for file names, nothing is a pattern here
        self.interrupted(llama, target, flags, after=4)
        (left,) = tmp_path.iterdir()
        cut, empty = sorted(left.glob("*.safetensors"))[:2]
        cut.write_bytes(cut.read_bytes()[:300])
        empty.write_bytes(b"")
        tokens = left / "tokens.npy"
        tokens.write_bytes(tokens.read_bytes()[:100])

        done = convert(llama, target, *flags)
        assert done.code == 0, done.err
        assert "note: an earlier run of this command has left 2 layers" in done.notes
        for file in (cut, empty, tokens):
            assert any(file.name in line for line in caplog.messages if "damaged" in line)
        assert [path.name for path in tmp_path.iterdir()] == ["out[1]"]
        whole = workshop.converted(llama, *flags[1:])
        assert stored(target) == stored(whole.folder)

    def test_other_options_begin_anew_and_clear_up_at_the_end(
        self, llama: Path, tmp_path: Path, text: str
    ) -> None:
        flags = ["--no-balance", "--error-feedback", "--feedback-text", text]
        target = tmp_path / "out"
        self.interrupted(llama, target, flags, after=3)
        done = convert(llama, target, *flags, "--bits", "2")
        assert done.code == 0
        assert not any("earlier run" in note for note in done.notes)
        assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--feedback-text", "x"], "--feedback-text has no effect without --error-feedback"),
        (["--error-feedback", "--use-qjl"], "--error-feedback and --use-qjl exclude each other"),
        (
            ["--error-feedback", "--streaming"],
            "--error-feedback with --streaming needs --feedback-text",
        ),
        (["--error-feedback", "--feedback-text", "no.txt"], "no such text file: no.txt"),
    ],
)
def test_contradictions_are_refused(
    llama: Path, tmp_path: Path, flags: list[str], message: str
) -> None:
    done = convert(llama, tmp_path / "out", *flags)
    assert done.code == 2
    assert done.messages[0] == f"error: {message}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello", "error: the text is too short to learn from"),
        ("a" * 10_000, "error: the text has only 1 different tokens: too few to learn from"),
    ],
)
def test_a_text_that_says_too_little_is_refused(
    llama: Path, tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "text.txt"
    file.write_text(text)
    flags = ["--error-feedback", "--feedback-text", str(file), "--no-balance"]
    done = convert(llama, tmp_path / "out", *flags)
    assert done.code == 2
    assert done.messages[-2] == message


# --- the text that the model writes ---------------------------------------------------------------


def written(source: Path, **options: object) -> np.ndarray:
    opened = open_source(source)
    lead = begin_tokens(opened.tokenizer)
    options = {"sequences": 6, "length": 24} | options
    return sample_sequences(opened.model, opened.tokenizer, lead, **options)


def test_a_model_writes_the_same_text_each_time(llama: Path) -> None:
    first = written(llama)
    assert first.shape == (6, 24)
    assert np.array_equal(first, written(llama))
    assert not np.array_equal(first, written(llama, seed=1))
    assert len({row.tobytes() for row in first}) == 6


def test_each_text_starts_with_a_beginning_of_its_own(llama: Path) -> None:
    tokenizer = open_source(llama).tokenizer
    for row, beginning in zip(written(llama), self_text.BEGINNINGS, strict=False):
        start = begin_tokens(tokenizer) + tokenizer.encode(beginning, add_special_tokens=False)
        assert row[: len(start)].tolist() == start


def test_tokens_are_drawn_from_the_distribution() -> None:
    logits = np.log(np.array([[0.5, 0.3, 0.0, 0.2]], np.float32) + 1e-30)
    uniform = np.random.Generator(np.random.PCG64(0))
    drawn = [self_text._draw(logits, 1.0, uniform)[0] for _ in range(4000)]
    shares = np.bincount(drawn, minlength=4) / 4000
    assert shares == pytest.approx([0.5, 0.3, 0.0, 0.2], abs=0.03)
    cold = [self_text._draw(logits, 0.05, uniform)[0] for _ in range(100)]
    assert set(cold) == {0}


def test_no_token_beyond_the_vocabulary_is_drawn(llama: Path) -> None:
    assert written(llama, vocabulary=20)[:, 12:].max() < 20


@pytest.mark.heavy  # plain conversions are compared by default, see test_determinism
def test_two_processes_write_identical_files(llama: Path, tmp_path: Path) -> None:
    program = (
        "import sys\nfrom turboquant_mlx.convert import self_text\n"
        "self_text.sample_sequences.__kwdefaults__.update(sequences=4, length=32)\n"
        "from turboquant_mlx.convert.command import main\nsys.exit(main(sys.argv[1:]))"
    )
    folders = [tmp_path / name for name in ("first", "second")]
    for number, folder in enumerate(folders):
        arguments = ["--hf-path", str(llama), "--mlx-path", str(folder), "--error-feedback"]
        subprocess.run(
            [sys.executable, "-c", program, *arguments],
            env=os.environ | {"PYTHONHASHSEED": str(number)},
            check=True,
            capture_output=True,
        )
    first, second = (stored(folder) for folder in folders)
    assert first == second

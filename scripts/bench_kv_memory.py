#!/usr/bin/env python3
"""What a long prompt takes in memory with packed caches, beside the plain cache, in one run.

    python scripts/bench_kv_memory.py [--shape 8b] [--context 16384] [--chunk 2048] [--check]

The model is a Llama of random weights in bfloat16 (scripts/made_up.py). A prompt of --context
tokens is read --chunk at a time, as mlx-lm reads it, into each cache in turn; then 8 tokens are
decoded. "peak" is what MLX's counter shows at most beyond the weights, activations included. "held"
are the bytes of the tokens in the cache at the end, "spare" what is allocated beside them, "of 16
bits" is held in proportion to the same tokens in 16 bits.

--check is exit code 1 if a packed cache has a higher peak than the plain one, more than a sixteenth
to spare, or, at 3.5 bits with heads of 128, more than 1/4.2 of 16 bits. On a CPU the counter does
not see NumPy, which codes and decodes there, and a prompt takes minutes: measure on a GPU. The last
line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import made_up


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog=__doc__.partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", choices=sorted(made_up.SHAPES), default="8b")
    parser.add_argument("--context", type=int, default=16384, help="tokens of the prompt")
    parser.add_argument("--chunk", type=int, default=2048, help="tokens read at a time")
    parser.add_argument(
        "--bits", nargs="+", default=["3.5", "small", "balanced"], help="packed caches, --kv-bits"
    )
    parser.add_argument("--check", action="store_true", help="exit 1 where a goal is missed")
    args = parser.parse_args(argv)

    import mlx.core as mx

    from turboquant_mlx.kernels.dispatch import why_backend
    from turboquant_mlx.kvcache.install import install, uninstall
    from turboquant_mlx.kvcache.spec import KVOptions, resolve

    print(f"{why_backend()}; MLX {mx.__version__}", file=sys.stderr)
    model = made_up.llama(args.shape, "bf16")
    print("| cache | peak | held | spare | of 16 bits | seconds |\n|---|---|---|---|---|---|")
    rows = []
    for name in ["plain", *args.bits]:
        uninstall(model)
        if name != "plain":
            spec = resolve(KVOptions(bits=name), {})
            assert spec is not None
            install(model, spec)
            name = f"{name} ({spec.describe()})"
        row = {"cache": name, **measure(model, args)}
        rows.append(row)
        mega = {key: f"{row[key] / 1e6:.0f} MB" for key in ("peak", "held", "spare")}
        share = f"1/{row['plain'] / row['held']:.2f}"
        print(
            f"| {name} | {mega['peak']} | {mega['held']} | {mega['spare']} | {share} "
            f"| {row['seconds']:.2f} |",
            flush=True,
        )
    missed = [line for row in rows[1:] for line in missed_goals(row, rows[0])]
    for line in missed:
        print(f"missed: {line}")
    facts = {"machine": platform.platform(), "backend": why_backend(), "mlx": mx.__version__}
    asked = {"shape": args.shape, "context": args.context, "chunk": args.chunk}
    print(json.dumps({"benchmark": "kv_memory", **facts, **asked, "rows": rows}))
    return 1 if args.check and missed else 0


def measure(model: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Peak beyond the weights, and bytes of the caches, in bytes."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    from turboquant_mlx.kvcache.install import CacheReport

    vocabulary = made_up.SHAPES[args.shape]["vocab_size"]
    tokens = mx.random.randint(0, vocabulary, (1, args.context + 8), key=mx.random.key(0))
    mx.eval(tokens)
    gc.collect()
    mx.clear_cache()
    mx.reset_peak_memory()
    before, began = mx.get_active_memory(), time.perf_counter()
    cache = make_prompt_cache(model)
    for start in range(0, args.context, args.chunk):
        model(tokens[:, start : min(start + args.chunk, args.context)], cache=cache)
        mx.eval([layer.state for layer in cache])
        mx.clear_cache()
    seconds = time.perf_counter() - began
    peak = mx.get_peak_memory() - before
    for i in range(args.context, args.context + 8):
        mx.eval(model(tokens[:, i : i + 1], cache=cache))
    report = CacheReport.of(cache)
    if report.packed:
        plain, held = report.plain, report.held - report.spare
    else:
        plain = held = sum(
            2 * layer.keys.nbytes // layer.keys.shape[2] * layer.offset for layer in cache
        )
    spare = report.held - held
    head = model.args.hidden_size // model.args.num_attention_heads
    return {"peak": peak, "held": held, "spare": spare, "plain": plain, "head": head,
            "seconds": seconds}  # fmt: skip


def missed_goals(row: dict[str, Any], plain: dict[str, Any]) -> list[str]:
    """What a packed cache should have done and did not."""
    missed = []
    if row["peak"] >= plain["peak"]:
        missed.append(f"{row['cache']}: the peak is not below that of the plain cache")
    if row["spare"] > row["held"] / 16 * 1.02:
        missed.append(f"{row['cache']}: more than a sixteenth is spare")
    if row["head"] == 128 and "K3/V4" in row["cache"] and row["held"] > row["plain"] / 4.2:
        missed.append(f"{row['cache']}: more than 1/4.2 of 16 bits")
    return missed


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""How fast a real model decodes with packed caches, beside the plain cache, in one run.

    python scripts/bench_kv_cpu.py MODEL [--contexts 256 2048] [--bits 3.5 balanced] [--steps 20]

MODEL is a folder that turboquant_mlx.load reads. A prompt of random tokens fills each cache; then
one token is decoded with each in turn, and taken back, --steps times over. The fastest step of each
cache counts, so that other programs on the machine do least harm. "of plain" is the time of a
step in proportion to that with the plain cache. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    from turboquant_mlx import cli

    return cli.run(command, argv)


def command(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog=__doc__.partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 2048])
    parser.add_argument("--bits", nargs="+", default=["3.5", "4", "balanced"])
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args(argv)

    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    from turboquant_mlx.checkpoint.loader import load
    from turboquant_mlx.kernels.dispatch import why_backend
    from turboquant_mlx.kvcache.install import install, uninstall
    from turboquant_mlx.kvcache.spec import KVOptions, resolve

    model, _ = load(args.model)
    print(f"{why_backend()}; MLX {mx.__version__}", file=sys.stderr)
    rows = []
    print("| context | cache | tokens/s | of plain |\n|---|---|---|---|")
    for context in args.contexts:
        prompt = mx.random.randint(0, 1000, (1, context), key=mx.random.key(0))
        caches = {}
        for name in ["plain", *args.bits]:
            uninstall(model)
            if name != "plain":
                spec = resolve(KVOptions(bits=name), {})
                assert spec is not None
                install(model, spec)
            caches[name] = make_prompt_cache(model)
            for start in range(0, context, 512):
                model(prompt[:, start : start + 512], cache=caches[name])
                mx.eval([layer.state for layer in caches[name]])
        uninstall(model)
        best = dict.fromkeys(caches, float("inf"))
        for _ in range(args.steps):
            for name, cache in caches.items():
                began = time.perf_counter()
                mx.eval(model(mx.array([[7]]), cache=cache))
                best[name] = min(best[name], time.perf_counter() - began)
                for layer in cache:
                    layer.trim(1)
        for name, seconds in best.items():
            times = seconds / best["plain"]
            rows.append({"context": context, "cache": name, "tokens_per_s": 1 / seconds,
                         "of_plain": times})  # fmt: skip
            print(f"| {context} | {name} | {1 / seconds:.2f} | {times:.2f} |", flush=True)
    facts = {"machine": platform.platform(), "backend": why_backend(), "mlx": mx.__version__}
    print(json.dumps({"benchmark": "kv_cpu", "model": args.model.name, **facts, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

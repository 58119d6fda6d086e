#!/usr/bin/env python3
"""Microseconds that the cache costs a layer and token: appending, and appending and attending.

No weights: each layer appends a key and a value per head (32 heads of 128 over 8) to its own cache,
and attends with what the layer before gave. Measured twice: ``ahead`` hands the next step over
while one runs, as mlx-lm does, and ``waiting`` ends each step first. Appending should cost the same
at every context and in both ways. Where it grows with the context in the first only, the cache is
copied: MLX writes into an array in place only when no unfinished work reads it.

    python scripts/bench_kv_step.py             contexts of 4k to 128k, batch 1 and 8
    python scripts/bench_kv_step.py --small     few layers and tokens, to see that it runs

The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import mlx.core as mx

import mlx_lm_models  # noqa: F401  (before mlx-lm)

# isort: split
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import KVCache

from bench_kv_decode import DTYPE, packed_caches, plain_caches
from kernel_timing import describe_machine
from turboquant_mlx import cli

CASES = [(1, 4096), (1, 32768), (1, 131072), (8, 4096), (8, 32768)]
SMALL = [(1, 64), (2, 200)]
HEADS, KV_HEADS, WIDTH = 32, 8, 128
STEPS = 32
REPEATS = 5

Step = Callable[[mx.array], list[mx.array]]


def held(caches: list[Any]) -> list[mx.array]:
    """All arrays of the caches."""
    return [
        a for c in caches for a in ([c.keys, c.values] if type(c) is KVCache else c.store.arrays())
    ]


def appending(caches: list[Any], batch: int) -> Step:
    new = mx.random.normal((batch, KV_HEADS, 1, WIDTH)).astype(DTYPE)

    def step(x: mx.array) -> list[mx.array]:
        for cache in caches:
            cache.update_and_fetch(new, new)
        # stands for what reads the caches in a model, and makes the next step wait for this one
        return [mx.depends(x, held(caches))]

    return step


def attending(caches: list[Any], batch: int) -> Step:
    def step(x: mx.array) -> list[mx.array]:
        for cache in caches:
            keys, values = cache.update_and_fetch(x[:, :KV_HEADS], x[:, KV_HEADS : 2 * KV_HEADS])
            x = scaled_dot_product_attention(x, keys, values, cache, WIDTH**-0.5, None)
        return [x]

    return step


def microseconds(step: Step, batch: int, layers: int, ahead: bool, steps: int) -> float:
    """Median of a layer's share of a step, over runs of ``steps``."""
    times = []
    for _ in range(REPEATS):
        x = mx.random.normal((batch, HEADS, 1, WIDTH)).astype(DTYPE)
        mx.eval(x)
        mx.synchronize()
        start = time.perf_counter()
        made = [x]
        for _ in range(steps):
            following = step(made[0])
            mx.async_eval(following)
            if ahead:
                mx.eval(made[0])
            else:
                mx.synchronize()
            made = following
        mx.synchronize()
        times.append((time.perf_counter() - start) / steps / layers)
    return statistics.median(times[1:]) * 1e6


def main(argv: Sequence[str] | None = None) -> int:
    return cli.run(command, argv)


def command(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="few layers, on any device")
    arguments = parser.parse_args(argv)
    machine = describe_machine(any_device=arguments.small)
    print(machine)
    layers, steps = (2, 2) if arguments.small else (32, STEPS)
    shape: Any = SimpleNamespace(
        layers=range(layers),
        args=SimpleNamespace(num_key_value_heads=KV_HEADS, head_dim=WIDTH),
    )
    results = []
    print("\nmicroseconds of a layer")
    print(f"{'batch':>5} {'context':>7} {'cache':<6} {'part':<16} {'ahead':>8} {'waiting':>8}")
    for batch, columns in SMALL if arguments.small else CASES:
        for label in ("plain", "K3/V4"):
            for part, make in (("append", appending), ("append, attend", attending)):
                mx.random.seed(1)
                caches: list[Any] = (
                    plain_caches(shape, batch, columns)
                    if label == "plain"
                    else list(packed_caches(shape, batch, columns, (3, 4)))
                )
                ahead, waiting = (
                    microseconds(make(caches, batch), batch, layers, way, steps)
                    for way in (True, False)
                )
                print(
                    f"{batch:>5} {columns:>7} {label:<6} {part:<16} {ahead:>8.1f} {waiting:>8.1f}",
                    flush=True,
                )
                results.append(
                    {
                        "batch": batch,
                        "context": columns,
                        "cache": label,
                        "part": part,
                        "ahead_us": round(ahead, 2),
                        "waiting_us": round(waiting, 2),
                    }
                )
                del caches
                mx.clear_cache()
    print(json.dumps({"machine": machine, "step": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Tokens a second of a whole model with the packed cache, beside the plain cache in the same run.

The model has the shape of an 8B one (llama, 32 layers of 4096, 32 heads over 8 of keys, 128 values
a head) and seeded random weights: of 3 bits, scalar code, unless --weights says otherwise
(scripts/made_up.py); activations are bfloat16. The caches are filled with random keys and values,
as reading a prompt of that length would take most of the time; what is measured is decoding, one
token a step and row, each step waiting for the one before it.

    python scripts/bench_kv_decode.py                  batch 1 and 8
    python scripts/bench_kv_decode.py --quick          4k in batch 1, 32k in batch 8
    python scripts/bench_kv_decode.py --weights bf16   weights in 16 bits
    python scripts/bench_kv_decode.py --small          a tiny model, to see that it runs

The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

import mlx_lm_models  # noqa: F401  (before mlx-lm)

# isort: split
from mlx_lm.models.cache import KVCache

import made_up
from bench_attention import random_store
from kernel_timing import describe_machine
from turboquant_mlx import cli
from turboquant_mlx.kvcache.attend import why_reference
from turboquant_mlx.kvcache.cache import TurboQuantKVCache
from turboquant_mlx.kvcache.spec import KVSpec

CASES = [(1, 4096), (1, 32768), (1, 131072), (8, 4096), (8, 32768)]
QUICK = [(1, 4096), (8, 32768)]
WIDTHS = [(3, 4), (4, 4)]
DTYPE = mx.bfloat16
STEPS = 32
REPEATS = 5


def plain_caches(model: Any, batch: int, columns: int) -> list[KVCache]:
    caches = []
    heads = model.args.num_key_value_heads
    for _ in model.layers:
        cache = KVCache()
        shape = (batch, heads, columns, model.args.head_dim)
        cache.update_and_fetch(*(mx.random.normal(shape).astype(DTYPE) for _ in range(2)))
        mx.eval(cache.keys, cache.values)
        caches.append(cache)
    return caches


def packed_caches(
    model: Any, batch: int, columns: int, bits: tuple[int, int]
) -> list[TurboQuantKVCache]:
    caches = []
    for _ in model.layers:
        cache = TurboQuantKVCache(spec=KVSpec(*bits))
        capacity = columns + columns // 16
        cache.store = random_store(
            bits,
            batch,
            columns,
            capacity,
            heads=model.args.num_key_value_heads,
            width=model.args.head_dim,
            dtype=DTYPE,
        )
        caches.append(cache)
    return caches


def seconds_of_a_step(model: Any, caches: list[Any], batch: int) -> float:
    """Median over runs of STEPS steps; the next step is prepared while one runs, as mlx-lm does."""

    def step(token):
        logits = model(token[:, None], cache=caches)
        return mx.argmax(logits[:, -1], axis=-1)

    token = mx.zeros((batch,), mx.int32)
    times = []
    for _ in range(REPEATS):
        mx.synchronize()
        start = time.perf_counter()
        for _ in range(STEPS):
            following = step(token)
            mx.async_eval(following)
            mx.eval(token)
            token = following
        mx.eval(token)
        times.append((time.perf_counter() - start) / STEPS)
    return statistics.median(times[1:])


def main(argv: Sequence[str] | None = None) -> int:
    return cli.run(command, argv)


def command(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two cases, one width")
    parser.add_argument("--small", action="store_true", help="a tiny model on any device")
    parser.add_argument(
        "--weights", default="scalar3", help="scalar or trellis and bits, or bf16 (%(default)s)"
    )
    arguments = parser.parse_args(argv)
    machine = describe_machine(any_device=arguments.small)
    print(f"{machine}; weights {arguments.weights}")
    model = made_up.llama("tiny" if arguments.small else "8b", arguments.weights)
    cases = [(2, 200)] if arguments.small else QUICK if arguments.quick else CASES
    widths = WIDTHS[:1] if arguments.quick else WIDTHS
    results = []
    print(f"\n{'batch':>5} {'context':>7} {'cache':<7} {'tokens/s':>9} {'x plain':>7} {'GB':>6}")
    for batch, columns in cases:
        plain = 0.0
        for name in ["plain", *widths]:
            mx.random.seed(1)
            if name == "plain":
                caches: list[Any] = plain_caches(model, batch, columns)
            else:
                assert isinstance(name, tuple)
                caches = packed_caches(model, batch, columns, name)
                q = mx.zeros((batch, model.args.num_attention_heads, 1, model.args.head_dim), DTYPE)
                why = why_reference(q, caches[0].store, None)
                if why:
                    print(f"no kernel answers: {why}")
            held = sum(c.nbytes for c in caches)
            rate = batch / seconds_of_a_step(model, caches, batch)
            plain = plain or rate
            label = name if isinstance(name, str) else f"K{name[0]}/V{name[1]}"
            print(
                f"{batch:>5} {columns:>7} {label:<7} {rate:>9.1f} {rate / plain:>7.2f}"
                f" {held / 1e9:>6.2f}",
                flush=True,
            )
            results.append(
                {
                    "batch": batch,
                    "context": columns,
                    "cache": label,
                    "tokens_per_second": round(rate, 2),
                    "bytes": held,
                }
            )
            del caches
            mx.clear_cache()
    print(json.dumps({"machine": machine, "weights": arguments.weights, "decode": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

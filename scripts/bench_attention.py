#!/usr/bin/env python3
"""How fast decode attention over the packed cache is, beside MLX's own in the same run.

One query token, 32 heads over 8 heads of keys, 128 values a head, fp16. ``kernel`` times are per
call inside one graph in which every call waits for the one before it, less the same graph without
attention, by the GPU's own clock where PyTorch for CUDA is installed (gpu_clock.py), elsewhere by
the host's and compiled; ``called`` times are per call from Python. Caches go through more copies
than a GPU's second-level cache holds. Every figure is a median. ``x fp16`` is how many times as
fast as ``mx.fast.scaled_dot_product_attention`` on plain fp16 keys and values.

    python scripts/bench_attention.py             all contexts, batch 1 and 8
    python scripts/bench_attention.py --quick     4k, 32k and 131k, K3/V4 and K4/V4
    python scripts/bench_attention.py --affine    also mlx-lm's cache of 8 and 4 bits, for whose
                                                  products MLX compiles some minutes on CUDA
    python scripts/bench_attention.py --sweep     which launch is the best for each context

The last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

import mlx_lm_models  # noqa: F401  (before mlx-lm)

# isort: split
from mlx_lm.models.base import quantized_scaled_dot_product_attention

from gpu_clock import has_gpu_clock
from kernel_timing import (
    clock,
    describe_machine,
    median_seconds,
    random_words,
    seconds_of_a_graph,
)
from turboquant_mlx import cli
from turboquant_mlx.errors import TurboQuantError
from turboquant_mlx.kernels import kv_attend, kv_selection
from turboquant_mlx.kernels.dispatch import force_backend, kernels_of_backend
from turboquant_mlx.kernels.kv_selection import AttendLaunch
from turboquant_mlx.kvcache.attend import attend, why_reference
from turboquant_mlx.kvcache.codec import kernel_facts, kernel_sides
from turboquant_mlx.kvcache.spec import KVSpec
from turboquant_mlx.kvcache.store import PackedStore

HEADS, KV_HEADS, WIDTH = 32, 8, 128
SCALE = WIDTH**-0.5
CONTEXTS = {1: [4096, 16384, 32768, 65536, 131072], 8: [4096, 16384, 32768, 65536]}
QUICK = {1: [4096, 32768, 131072], 8: [4096, 32768]}
WIDTHS = [(3, 4), (4, 4), (8, 4)]
CACHE_BYTES = 160 * 2**20  # more than any second-level cache
MOST_COPIES = 48
CALLS = 32

Attention = Callable[[mx.array, Any], mx.array]


def random_store(
    bits: tuple[int, int],
    batch: int,
    columns: int,
    capacity: int = 0,
    *,
    heads: int = KV_HEADS,
    width: int = WIDTH,
    dtype: mx.Dtype = mx.float16,
) -> PackedStore:
    """A store as it is after ``columns`` tokens, of random codes."""
    spec = KVSpec(*bits)
    store = PackedStore(spec, [0] * batch, columns=columns, frozen=[True] * batch)
    store.widths, store.dtype_name = (width, width), str(dtype).rpartition(".")[2]
    lead = (batch, heads, max(capacity, columns))
    sides = []
    for codec in (store.key_codec, store.value_codec):
        scales = mx.random.randint(124, 133, (*lead, 1)).astype(mx.uint8)
        sides.append((random_words(*lead, codec.words), scales))
    store.keys, store.values = sides
    few = (batch, heads, spec.min_tokens, width)
    store.raw_keys, store.raw_values = (mx.random.normal(few).astype(dtype) for _ in range(2))
    store.shift = mx.random.normal((batch, heads, 1, width)).astype(dtype)
    mx.eval(store.arrays())
    return store


def kernel_seconds(attention: Attention, q: mx.array, caches: list) -> float:
    """Per call in a graph where each needs the one before it."""
    order = list(itertools.islice(itertools.cycle(caches), max(CALLS, len(caches))))
    # the host alone gains by compiling, and in a compiled function MLX's own attention is slower
    traced = (lambda function: function) if has_gpu_clock() else mx.compile

    @traced
    def chain(x):
        for cache in order:
            x = x + attention(x, cache) * 0
        return x

    @traced
    def empty(x):
        for _ in order:
            x = x + x[..., ::-1] * 0
        return x

    taken = seconds_of_a_graph(lambda: chain(q)) - seconds_of_a_graph(lambda: empty(q))
    return taken / len(order)


def called_seconds(attention: Attention, q: mx.array, caches: list) -> float:
    """Per call from Python, one after the other."""
    order = list(itertools.islice(itertools.cycle(caches), CALLS))
    return median_seconds(lambda: [attention(q, cache) for cache in order]) / len(order)


def plain(batch: int, columns: int) -> tuple[mx.array, mx.array]:
    shape = (batch, KV_HEADS, columns, WIDTH)
    made = tuple(mx.random.normal(shape).astype(mx.float16) for _ in range(2))
    mx.eval(made)
    return made[0], made[1]


def affine(bits: int, batch: int, columns: int) -> tuple:
    made = tuple(mx.quantize(x, group_size=64, bits=bits) for x in plain(batch, columns))
    mx.eval(made)
    return made


def plain_attention(q: mx.array, cache: Any) -> mx.array:
    return mx.fast.scaled_dot_product_attention(q, *cache, scale=SCALE)


def affine_attention(bits: int) -> Attention:
    def attention(q, cache):
        return quantized_scaled_dot_product_attention(
            q * 1, *cache, scale=SCALE, mask=None, group_size=64, bits=bits
        )

    return attention


def packed_attention(q: mx.array, store: PackedStore) -> mx.array:
    return attend(q, store, scale=SCALE)


def candidates(
    batch: int, columns: int, widths: list[tuple[int, int]], with_affine: bool
) -> list[tuple[str, Attention, Callable[[], Any], int]]:
    """Name, attention, maker of a cache, bytes of one."""
    numbers = 2 * batch * KV_HEADS * columns * WIDTH
    found: list[tuple[str, Attention, Callable[[], Any], int]] = [
        ("fp16", plain_attention, partial(plain, batch, columns), 2 * numbers)
    ]
    for bits_kv in widths:
        size = batch * KV_HEADS * columns * KVSpec(*bits_kv).token_bytes(WIDTH)
        make = partial(random_store, bits_kv, batch, columns)
        found.append((f"K{bits_kv[0]}/V{bits_kv[1]}", packed_attention, make, size))
    for bits in (8, 4) if with_affine else ():
        size = numbers * bits // 8 + numbers // 64 * 4
        make = partial(affine, bits, batch, columns)
        found.append((f"affine{bits}", affine_attention(bits), make, size))
    return found


def check(bits: tuple[int, int], batch: int) -> float:
    """Relative distance of the kernels from attention in float64 over the decoded store."""
    store = random_store(bits, batch, 700, 800, dtype=mx.float32)
    q = mx.random.normal((batch, HEADS, 1, WIDTH)).astype(mx.float16)
    if why := why_reference(q, store, None):
        raise TurboQuantError(f"no kernel answers: {why}")
    with force_backend("portable"):
        plain = store.decoded(store.columns)
        mx.eval(plain)
    keys, values = (np.array(x).astype(np.float64) for x in plain)
    shape = (batch, KV_HEADS, HEADS // KV_HEADS, WIDTH)
    scores = np.array(q).astype(np.float64).reshape(shape) @ keys.swapaxes(-1, -2) * SCALE
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    want = weights / weights.sum(axis=-1, keepdims=True) @ values
    got = np.array(attend(q, store, scale=SCALE)).astype(np.float64).reshape(shape)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def caches_of(make: Callable[[], Any], n_bytes: int) -> list:
    return [make() for _ in range(max(1, min(MOST_COPIES, -(-CACHE_BYTES // n_bytes))))]


def measure(
    contexts: dict[int, list[int]], widths: list[tuple[int, int]], with_affine: bool
) -> list[dict]:
    results = []
    for bits in widths:
        print(f"K{bits[0]}/V{bits[1]}: error {check(bits, 2):.1e}")
    print(
        f"\n{'batch':>5} {'context':>7} {'cache':<8} {'kernel us':>9} {'called us':>9} {'GB/s':>6}"
        f" {'x fp16':>7}"
    )
    for batch, lengths in contexts.items():
        q = mx.random.normal((batch, HEADS, 1, WIDTH)).astype(mx.float16)
        for columns in lengths:
            fp16 = 0.0
            for name, attention, make, n_bytes in candidates(batch, columns, widths, with_affine):
                caches = caches_of(make, n_bytes)
                kernel = kernel_seconds(attention, q, caches)
                called = called_seconds(attention, q, caches)
                del caches
                fp16 = fp16 or kernel
                print(
                    f"{batch:>5} {columns:>7} {name:<8} {kernel * 1e6:>9.1f} {called * 1e6:>9.1f}"
                    f" {n_bytes / kernel / 1e9:>6.0f} {fp16 / kernel:>7.2f}",
                    flush=True,
                )
                results.append(
                    {
                        "batch": batch,
                        "context": columns,
                        "cache": name,
                        "kernel_us": round(kernel * 1e6, 2),
                        "called_us": round(called * 1e6, 2),
                        "bytes": n_bytes,
                    }
                )
            mx.clear_cache()
    return results


def sweep(contexts: dict[int, list[int]], widths: list[tuple[int, int]]) -> list[dict]:
    """Every launch at every context, best first."""
    dialect = kernels_of_backend(mx.float16)
    assert dialect is not None
    tensor = dialect == "cuda"
    # tiles and warps; larger products need more registers than a multiprocessor has
    shapes = [(1, 4), (1, 8), (1, 16), (2, 4), (2, 8)] if tensor else [(1, 2), (1, 4), (1, 8)]
    launches = [
        AttendLaunch(tensor, 8 if tensor else 4, tiles, warps, -groups)
        for (tiles, warps), groups in itertools.product(shapes, [132, 264, 396, 528, 1056])
    ]
    results = []
    for bits, (batch, lengths) in itertools.product(widths, contexts.items()):
        q = mx.random.normal((batch, HEADS, 1, WIDTH)).astype(mx.float16)
        for columns in lengths:
            one = random_store(bits, batch, columns)
            caches = caches_of(partial(random_store, bits, batch, columns), one.nbytes)
            rows = []
            for launch in launches:
                if max(bits) > 4 and launch.warps * launch.tiles > 8:
                    continue
                splits = math.ceil(-launch.splits / (batch * KV_HEADS))
                chosen = AttendLaunch(
                    launch.tensor, launch.rows, launch.tiles, launch.warps, splits
                )
                try:
                    seconds = kernel_seconds(partial(with_launch, chosen, dialect), q, caches)
                except (RuntimeError, ValueError) as error:
                    print(f"  {chosen}: {str(error).splitlines()[0]}")
                    continue
                rows.append((seconds, -launch.splits, chosen))
            rows.sort(key=lambda row: row[0])
            print(f"\nK{bits[0]}/V{bits[1]}, batch {batch}, context {columns}")
            for seconds, groups, chosen in rows[:6]:
                print(
                    f"  {seconds * 1e6:>7.1f} us  groups {groups:>4}  splits {chosen.splits:>3}"
                    f"  warps {chosen.warps:>2}  tiles {chosen.tiles}",
                    flush=True,
                )
            results += [
                {
                    "bits": bits,
                    "batch": batch,
                    "context": columns,
                    "us": round(seconds * 1e6, 2),
                    "groups": groups,
                    "warps": chosen.warps,
                    "tiles": chosen.tiles,
                }
                for seconds, groups, chosen in rows
            ]
            del caches
            mx.clear_cache()
    return results


def with_launch(launch: AttendLaunch, dialect: Any, q: mx.array, store: PackedStore) -> mx.array:
    assert store.raw_keys is not None and store.raw_values is not None
    return kv_attend.kv_attend(
        q,
        store.keys,
        store.values,
        dialect,
        sides=kernel_sides(store.key_codec, store.value_codec),
        facts=kernel_facts(store.key_codec, store.value_codec),
        rows=store.token_rows(),
        scale=SCALE,
        shift=store.shift,
        raw=(store.raw_keys, store.raw_values),
        launch=launch,
    )


def main(argv: Sequence[str] | None = None) -> int:
    return cli.run(command, argv)


def command(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="three contexts, two widths")
    parser.add_argument("--sweep", action="store_true", help="which launch is best")
    parser.add_argument("--affine", action="store_true", help="also mlx-lm's quantized caches")
    arguments = parser.parse_args(argv)
    machine = describe_machine()
    print(f"{machine}; kernel times by {clock()}")
    contexts = QUICK if arguments.quick else CONTEXTS
    widths = WIDTHS[:2] if arguments.quick else WIDTHS
    if arguments.sweep:
        results = sweep(contexts, [WIDTHS[0]] if arguments.quick else WIDTHS)
    else:
        results = measure(contexts, widths, arguments.affine)
    dialect = kernels_of_backend(mx.float16)
    launches = kv_selection.GROUPS[dialect] if dialect else {}
    print(
        json.dumps(
            {
                "machine": machine,
                "clock": clock(),
                "groups": [
                    {"warps": warps, "tiles": tiles, "groups": groups}
                    for (warps, tiles), groups in launches.items()
                ],
                "sweep" if arguments.sweep else "attention": results,
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""How fast whole models write, as ratios to 16-bit weights and to MLX's own 4 bits in one run.

    python scripts/bench_decode.py [--shape 8b] [--weights bf16 affine4 trellis3 ...] [--json FILE]

The models are Llamas of random weights (scripts/made_up.py), each made, measured and dropped in
turn. mlx-lm's own loop writes --tokens greedy tokens after a prompt of --prompt-tokens; the median
time of a token counts, over all but the first tokens. "over stored" is what MLX's counter shows at
most beyond the bytes of the weights and the key-value cache. Then a prompt of --prefill-tokens is
read, the best of three times.

--profile also shows how long the GPU works for a token and for how many operations, by its own
clock (gpu_clock.py; needs PyTorch for CUDA). Where that is much less than a token takes, the host
is what is slow.

--check writes the same tokens twice, on the GPU and by the reference on the CPU, always from the
same tokens before them, and reports where the two would have gone on differently: two logits must
then lie within the rounding of the activation's dtype. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import made_up
from turboquant_mlx import cli

PROFILED_TOKENS = 32


def main(argv: Sequence[str] | None = None) -> int:
    return cli.run(command, argv)


def command(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog=__doc__.partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", choices=sorted(made_up.SHAPES), default="8b")
    parser.add_argument(
        "--weights",
        nargs="+",
        default=["bf16", "affine4", "affine3", "trellis3", "scalar3", "trellis2", "trellis4"],
        help="bf16, affine, scalar or trellis, each of the last three with its bits",
    )
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--prefill-tokens", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--profile", action="store_true", help="also the GPU's own time")
    parser.add_argument("--check", action="store_true", help="compare tokens, measure nothing")
    args = parser.parse_args(argv)

    import mlx.core as mx

    from gpu_clock import has_gpu_clock
    from turboquant_mlx.errors import TurboQuantError
    from turboquant_mlx.kernels.dispatch import why_backend

    if args.profile and not has_gpu_clock():
        raise TurboQuantError("--profile needs PyTorch for CUDA, and a GPU of NVIDIA's")
    print(f"{why_backend()}; MLX {mx.__version__}", file=sys.stderr)
    rows = []
    for weights in args.weights:
        model = made_up.llama(args.shape, weights)
        row = check(model, args) if args.check else measure(model, args)
        rows.append({"weights": weights, "stored_bytes": made_up.stored_bytes(model)} | row)
        print(json.dumps(rows[-1]), file=sys.stderr)
        del model
        gc.collect()
        mx.clear_cache()
    print("\n".join(agreement_table(rows) if args.check else speed_table(rows)))
    print(json.dumps({"benchmark": "decode", "shape": args.shape, "rows": rows}))
    return 0


def prompt_of(args: argparse.Namespace, tokens: int) -> Any:
    import mlx.core as mx

    return mx.arange(tokens) * 7 % made_up.SHAPES[args.shape]["vocab_size"]


def measure(model: Any, args: argparse.Namespace) -> dict:
    """Time of a token and memory, mlx-lm's loop."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step
    from mlx_lm.models.cache import make_prompt_cache

    def write(count: int, prompt_tokens: int) -> tuple[list[float], Any]:
        cache, prompt = make_prompt_cache(model), prompt_of(args, prompt_tokens)
        mx.eval(prompt)
        times = [time.perf_counter()]
        for _ in generate_step(prompt, model, max_tokens=count, prompt_cache=cache):
            times.append(time.perf_counter())
        return [b - a for a, b in itertools.pairwise(times)], cache

    write(8, args.prompt_tokens)
    mx.reset_peak_memory()
    seconds, cache = write(args.tokens, args.prompt_tokens)
    kv_bytes = sum(layer.nbytes for layer in cache)
    token_s = statistics.median(seconds[4:])
    peak = mx.get_peak_memory()
    prefill_s = min(write(1, args.prefill_tokens)[0][0] for _ in range(3))
    profile = profile_of(lambda: write(PROFILED_TOKENS, 1)) if args.profile else {}
    return profile | {
        "token_ms": 1e3 * token_s,
        "tokens_per_s": 1 / token_s,
        "peak_bytes": peak,
        "kv_bytes": kv_bytes,
        "over_stored": peak / (made_up.stored_bytes(model) + kv_bytes) - 1,
        "prefill_tokens_per_s": args.prefill_tokens / prefill_s,
    }


def profile_of(run: Callable[[], Any]) -> dict:
    """What the GPU does for each of PROFILED_TOKENS, the first of them among them."""
    from gpu_clock import busy_seconds, operations_of

    def silent() -> list:
        run()
        return []

    operations = operations_of(silent)
    return {
        "gpu_ms": 1e3 * busy_seconds(operations) / PROFILED_TOKENS,
        "gpu_operations": len(operations) / PROFILED_TOKENS,
    }


def speed_table(rows: list[dict]) -> list[str]:
    rates = {row["weights"]: row["tokens_per_s"] for row in rows}
    names = [name for name in ("bf16", "affine4") if name in rates]
    lines = [
        f"{'weights':10}{'stored GB':>10}{'token ms':>10}{'tokens/s':>10}"
        + "".join(f"{'x ' + name:>11}" for name in names)
        + f"{'peak GB':>9}{'over stored':>13}{'prefill/s':>11}"
        + (f"{'GPU ms':>8}{'operations':>12}" if "gpu_ms" in rows[0] else "")
    ]
    for row in rows:
        lines.append(
            f"{row['weights']:10}{row['stored_bytes'] / 1e9:10.2f}{row['token_ms']:10.2f}"
            f"{row['tokens_per_s']:10.1f}"
            + "".join(f"{row['tokens_per_s'] / rates[name]:11.2f}" for name in names)
            + f"{row['peak_bytes'] / 1e9:9.2f}{row['over_stored']:13.1%}"
            + f"{row['prefill_tokens_per_s']:11.0f}"
            + (f"{row['gpu_ms']:8.2f}{row['gpu_operations']:12.0f}" if "gpu_ms" in row else "")
        )
    return lines


def check(model: Any, args: argparse.Namespace) -> dict:
    """Greedy tokens of the default device, and what the CPU makes of the same text."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    from turboquant_mlx.kernels.dispatch import backend

    here = mx.default_device()
    caches = {device: make_prompt_cache(model) for device in ("here", "cpu")}
    tokens = prompt_of(args, args.prompt_tokens)[None]
    differences = []
    for step in range(args.tokens):
        logits = model(tokens, cache=caches["here"])[0, -1]
        mx.eval(logits)
        mx.set_default_device(mx.cpu)
        try:
            reference = model(tokens, cache=caches["cpu"])[0, -1]
            mx.eval(reference)
        finally:
            mx.set_default_device(here)
        chosen, other = int(mx.argmax(logits)), int(mx.argmax(reference))
        if chosen != other:
            gap = float(reference[other] - reference[chosen])
            differences.append({"step": step, "gap": gap, "top": float(reference[other])})
        tokens = mx.array([[chosen]])
    return {"backend": backend(), "tokens": args.tokens, "differences": differences}


def agreement_table(rows: list[dict]) -> list[str]:
    lines = []
    for row in rows:
        lines.append(f"{row['weights']:10}{row['tokens']} tokens, {len(row['differences'])} differ")
        for other in row["differences"]:
            lines.append(
                f"    token {other['step']}: on the CPU the two logits are {other['gap']:.4f} "
                f"apart, at {other['top']:.4f}"
            )
    return lines


if __name__ == "__main__":
    sys.exit(main())

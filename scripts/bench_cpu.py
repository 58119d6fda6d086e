#!/usr/bin/env python3
"""How fast our models run on a CPU, as ratios to stock mlx-lm measured in the same run.

    python scripts/bench_cpu.py MODEL [--bits 3 4] [--prompt-tokens 512] [--decode-prompt-tokens 41]

MODEL is a 16-bit source folder. It is converted to each width; then stock mlx-lm with the source
and this package with each conversion are timed in the same way, each in a process of its own so
that peak memory is the model's, in turns, --rounds times; the best rate of each is reported, for a
shared machine only ever makes one slower. Prefill is timed on exactly --prompt-tokens tokens and
decode on --generate-tokens greedy ones after a prompt of --decode-prompt-tokens, all after a
warm-up that also expands the weights; the time of that is reported apart. ``--expand never`` times
the path that keeps no expanded weights. ``--awake`` keeps the processor cores from falling asleep
while any of them is measured, stock mlx-lm included, as ``turboquant-generate --cpu-awake`` does.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import resource
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", type=Path, help="16-bit source folder")
    parser.add_argument("--bits", type=int, nargs="+", default=[3, 4], choices=[2, 3, 4])
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--generate-tokens", type=int, default=40)
    parser.add_argument("--decode-prompt-tokens", type=int, default=41)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--expand", choices=["auto", "always", "never"], default="auto")
    parser.add_argument("--awake", action="store_true", help="keep cores awake, for stock too")
    parser.add_argument("--measure", choices=["stock", "ours"], help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.measure:
        print(json.dumps(measure(args)))
        return 0
    awake = keep_awake(parser) if args.awake else contextlib.nullcontext()

    rows: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as scratch:
        candidates = {"stock bf16": (args.model, "stock")}
        for bits in args.bits:
            folder = Path(scratch) / f"{bits}bit"
            convert(args.model, folder, bits)
            candidates[f"ours {bits}-bit"] = (folder, "ours")
        with awake:
            for _ in range(args.rounds):
                for name, (folder, kind) in candidates.items():
                    rows[name] = better(rows.get(name), run(args, folder, kind))
    stock = rows["stock bf16"]
    columns = {"prefill": 10, "ratio": 8, "decode": 10, "ratio ": 8, "warm-up": 9, "peak RSS": 10}
    corner = "cores awake" if args.awake else ""
    print(f"{corner:14}" + "".join(f"{name.strip():>{width}}" for name, width in columns.items()))
    for name, row in rows.items():
        row["prefill_ratio"] = row["prefill_tokens_per_s"] / stock["prefill_tokens_per_s"]
        row["decode_ratio"] = row["decode_tokens_per_s"] / stock["decode_tokens_per_s"]
        print(
            f"{name:14}{row['prefill_tokens_per_s']:10.2f}{row['prefill_ratio']:8.2f}"
            f"{row['decode_tokens_per_s']:10.2f}{row['decode_ratio']:8.2f}"
            f"{row['warm_up_s']:8.1f}s{row['peak_rss_bytes'] / 1e9:8.2f}GB"
        )
    machine = {"machine": platform.platform(), "python": platform.python_version()}
    machine |= {name: version(name) for name in ("mlx", "mlx-lm", "numpy")}
    settings = {"model": args.model.name, "awake": args.awake}
    print(json.dumps({"benchmark": "cpu", **settings, **machine, "rows": rows}))
    return 0


def keep_awake(parser: argparse.ArgumentParser) -> contextlib.AbstractContextManager[object]:
    """The context of ``--awake``; here, so that the measured processes are the same without it."""
    import mlx.core as mx

    from turboquant_mlx.kernels.awake import cores_awake, why_not_awake

    mx.set_default_device(mx.cpu)
    reason = why_not_awake()
    if reason:
        parser.error(f"--awake does not apply: {reason}")
    return cores_awake()


def convert(source: Path, target: Path, bits: int) -> None:
    command = [sys.executable, "-m", "turboquant_mlx.convert", "--hf-path", str(source)]
    subprocess.run(
        [*command, "--bits", str(bits), "--mlx-path", str(target)],
        check=True,
        stdout=subprocess.DEVNULL,
    )


def better(before: dict | None, now: dict) -> dict:
    """The best rates and times of two runs, and the largest memory."""
    if before is None:
        return now
    most = {name for name in now if name.endswith("_per_s") or name == "peak_rss_bytes"}
    return {name: (max if name in most else min)(before[name], now[name]) for name in now}


def run(args: argparse.Namespace, model: Path, kind: str) -> dict:
    """Measure one model in a process of its own."""
    command = [sys.executable, __file__, str(model), "--measure", kind, "--expand", args.expand]
    command += ["--prompt-tokens", str(args.prompt_tokens)]
    command += ["--decode-prompt-tokens", str(args.decode_prompt_tokens)]
    command += ["--generate-tokens", str(args.generate_tokens)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure(args: argparse.Namespace) -> dict:
    """Prefill and decode rates of one model, in tokens per second."""
    import mlx.core as mx
    from mlx_lm import stream_generate

    mx.set_default_device(mx.cpu)
    if args.measure == "stock":
        from mlx_lm import load

        model, tokenizer = load(str(args.model))
    else:
        from turboquant_mlx import load

        model, tokenizer = load(args.model, cpu_expand=args.expand)

    text = "The history of the town goes back to a river crossing where traders met. " * 64
    prompt = tokenizer.encode(text)[: args.prompt_tokens]
    assert len(prompt) == args.prompt_tokens, "the built-in text is too short"

    started = time.perf_counter()
    mx.eval(model(mx.array(prompt[:8])[None]))
    warm_up = time.perf_counter() - started
    # no stop token: every run generates the same number of tokens
    tokenizer._eos_token_ids = set()
    *_, prefill = stream_generate(model, tokenizer, prompt, max_tokens=1)
    prompt = prompt[: args.decode_prompt_tokens]
    *_, last = stream_generate(model, tokenizer, prompt, max_tokens=args.generate_tokens)
    return {
        "prompt_tokens": args.prompt_tokens,
        "decode_prompt_tokens": args.decode_prompt_tokens,
        "generated_tokens": last.generation_tokens,
        "prefill_tokens_per_s": prefill.prompt_tps,
        "decode_tokens_per_s": last.generation_tps,
        "warm_up_s": warm_up,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        * (1 if sys.platform == "darwin" else 1024),
    }


if __name__ == "__main__":
    sys.exit(main())

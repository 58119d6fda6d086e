#!/usr/bin/env python3
"""Compare the peak that turboquant-plan predicts with the one that is measured.

    python scripts/check_plan.py MODEL [MODEL ...] [--context 256 1024 2048] [--chunk 128 512]

Every model, context and chunk runs in a process of its own: it loads the model, reads a prompt of
``context`` tokens chunk by chunk and writes four more. On a GPU the peak is MLX's own counter, on
the CPU the resident memory of the process, its highest since start. Prints a table, and as the last
line the same as JSON.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NEW_TOKENS = 4
MB = 10**6


def measure(model: str, context: int, chunk: int) -> dict[str, int]:
    """Run the model once; bytes. To be called in a fresh process."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    from turboquant_mlx import load

    network, _ = load(model)
    after_load = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    prompt = mx.arange(context - NEW_TOKENS) % 200 + 100
    steps = generate_step(prompt, network, max_tokens=NEW_TOKENS, prefill_step_size=chunk)
    for _ in steps:
        pass
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    unit = 1 if sys.platform == "darwin" else 1024
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {
        "peak_bytes": rss if on_cpu else mx.get_peak_memory(),
        "loaded_bytes": after_load * unit,
        "mlx_peak_bytes": mx.get_peak_memory(),
    }


def predict(model: str, context: int, chunk: int) -> dict:
    """What the planner says for this machine."""
    from turboquant_mlx.plan.command import make_plan

    return make_plan(model, context=context, prefill_step_size=chunk).to_dict()["projection"]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--context", type=int, nargs="+", default=[256, 1024, 2048])
    parser.add_argument("--chunk", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--measure-one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--no-predict", action="store_true", help="only measure")
    args = parser.parse_args(argv)
    sys.path.insert(0, str(ROOT / "src"))
    if args.measure_one:
        print(json.dumps(measure(args.models[0], args.context[0], args.chunk[0])))
        return 0
    rows = []
    print("model  context  chunk  measured MB  predicted MB  difference")
    for model in args.models:
        for context in args.context:
            for chunk in args.chunk:
                command = [sys.executable, __file__, model, "--measure-one"]
                command += ["--context", str(context), "--chunk", str(chunk)]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                row = json.loads(done.stdout.splitlines()[-1])
                row |= {"model": Path(model).name, "context": context, "chunk": chunk}
                predicted = None
                if not args.no_predict:
                    predicted = predict(model, context, chunk)["peak_bytes"]
                    row["predicted_bytes"] = predicted
                rows.append(row)
                print(line(row, predicted), flush=True)
    print(json.dumps(rows))
    return 0


def line(row: dict, predicted: int | None) -> str:
    measured = row["peak_bytes"]
    text = f"{row['model']}  {row['context']}  {row['chunk']}  {measured / MB:.0f}"
    if predicted is None:
        return text
    return f"{text}  {predicted / MB:.0f}  {predicted / measured - 1:+.1%}"


if __name__ == "__main__":
    sys.exit(main())

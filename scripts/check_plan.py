#!/usr/bin/env python3
"""Compare the peak that turboquant-plan predicts with the one that is measured.

    python scripts/check_plan.py MODEL [MODEL ...] [--context 256 1024 2048] [--chunk 128 512]
    python scripts/check_plan.py made-up-1b --context 4096 16384 65536 --chunk 512 2048
    python scripts/check_plan.py --held-out

``made-up-1b`` is a Llama of a billion random weights, made in memory: it needs MLX and mlx-lm's
model files alone, for GPU machines without anything else. ``made-up-3b`` is another, with more
layers, wider heads and other ratios. The planner's constants were chosen with the first at hand;
``--held-out`` runs the second, at contexts and chunks that the first did not have.

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


MADE_UP = {
    "made-up-1b": {
        "model_type": "llama",
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "vocab_size": 128256,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
    "made-up-3b": {
        "model_type": "llama",
        "hidden_size": 3072,
        "num_hidden_layers": 28,
        "intermediate_size": 8192,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "vocab_size": 32000,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
}
HELD_OUT = {"models": ["made-up-3b"], "context": [8192, 32768], "chunk": [256, 1024]}


def made_up_network(name: str):
    """The model, its weights random bfloat16 numbers of a fixed seed."""
    import mlx.core as mx

    import mlx_lm_models  # noqa: F401  (before mlx-lm)

    # isort: split
    import made_up

    network = made_up.evaluated(made_up.build(MADE_UP[name], mx.bfloat16))
    mx.reset_peak_memory()
    return network


def measure_made_up(name: str, context: int, chunk: int) -> dict[str, int]:
    """The same as ``measure``, with mlx-lm's loop over the chunks written out."""
    network = made_up_network(name)

    import mlx.core as mx
    from mlx_lm.models.cache import KVCache

    caches = [KVCache() for _ in network.layers]
    prompt = mx.arange(context - NEW_TOKENS) % 200 + 100
    while prompt.size > 1:
        part = min(chunk, prompt.size - 1)
        network(prompt[:part][None], cache=caches)
        mx.eval([cache.state for cache in caches])
        prompt = prompt[part:]
        mx.clear_cache()
    token = prompt[None]
    for _ in range(NEW_TOKENS):
        logits = network(token, cache=caches)
        token = mx.argmax(logits[:, -1:], axis=-1)
        mx.eval(token)
    peak = mx.get_peak_memory()
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    return {"peak_bytes": peak, "mlx_peak_bytes": peak, "gpu": on_gpu}


def predict_made_up(name: str, context: int, chunk: int, gpu: bool) -> dict:
    """The plan of a model whose headers are written down here."""
    from turboquant_mlx.checkpoint.headers import TensorInfo
    from turboquant_mlx.plan.headers import ModelFiles
    from turboquant_mlx.plan.machine import Machine, detect
    from turboquant_mlx.plan.projection import Request, plan_model

    config = MADE_UP[name]
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    shapes = {"model.embed_tokens": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        where = f"model.layers.{layer}."
        for part in ("gate", "up"):
            shapes[f"{where}mlp.{part}_proj"] = (inner, hidden)
        shapes[f"{where}mlp.down_proj"] = (hidden, inner)
        for part, rows in (("q", hidden), ("k", kv), ("v", kv), ("o", hidden)):
            shapes[f"{where}self_attn.{part}_proj"] = (rows, hidden)
    tensors, end = {}, 0
    for path, shape in shapes.items():
        size = 2 * shape[0] * shape[1]
        tensors[f"{path}.weight"] = TensorInfo("BF16", shape, end, end + size)
        end += size
    home = dict.fromkeys(tensors, "model.safetensors")
    model = ModelFiles(name, "local", config, tensors, home, {"model.safetensors": end})
    machine = detect()
    if gpu and machine.backend == "cpu":
        # MLX found a GPU that the driver's own program does not report: its size is not asked here
        machine = Machine("cuda", "", machine.ram_bytes, 2**40, "not asked")
    return plan_model(model, machine, Request(context, None, chunk)).to_dict()["projection"]


def measure(model: str, context: int, chunk: int) -> dict[str, int]:
    """Run the model once; bytes. To be called in a fresh process."""
    if model in MADE_UP:
        return measure_made_up(model, context, chunk)
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
        "gpu": not on_cpu,
    }


def predict(model: str, context: int, chunk: int, gpu: bool) -> dict:
    """What the planner says for this machine."""
    if model in MADE_UP:
        return predict_made_up(model, context, chunk, gpu)
    import turboquant_mlx

    return turboquant_mlx.plan(model, context=context, prefill_step_size=chunk).to_dict()[
        "projection"
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--context", type=int, nargs="+", default=[256, 1024, 2048])
    parser.add_argument("--chunk", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--held-out", action="store_true", help="what the constants never saw")
    parser.add_argument("--measure-one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--no-predict", action="store_true", help="only measure")
    args = parser.parse_args(argv)
    if args.held_out:
        vars(args).update(HELD_OUT)
    if not args.models:
        parser.error("name a model, or give --held-out")
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
                    gpu = row.pop("gpu")
                    found = predict(model, context, chunk, gpu)
                    # MLX's counter knows nothing of the runtime around it
                    predicted = found["allocated_bytes" if gpu else "peak_bytes"]
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

"""Record logits of transformers on the tiny test models, as an outside reference.

The weights are rebuilt by ``tests/tiny.py`` from a seed, so a recording holds only the input,
the logits (float32, CPU, eager attention) and how to build the model. It needs PyTorch and
transformers; the tests that read the recordings need neither:

    pip install torch transformers
    python scripts/record_transformers.py            # all, into tests/fixtures/transformers
    python scripts/record_transformers.py llama      # one

Rotary bases are far from every default: a loader that overlooks the base in the config gives
visibly other logits.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import tiny  # noqa: E402

# A random model has attention and routing decisions on a knife-edge at some positions, where any
# rounding of the weights gives another answer. These seeds have none, so that the distance of a
# converted model measures the conversion.
SEEDS = {**dict.fromkeys(tiny.MODEL_TYPES, 6), "gemma3_text": 8, "granitemoe": 5, "deepseek_v2": 3}
N_TOKENS = 12
OVERRIDES = {
    **{name: {"rope_theta": 500.0} for name in tiny.MODEL_TYPES},
    "gemma3_text": {"rope_theta": 500.0, "rope_local_base_freq": 60.0},
}


def record(model_type: str, dst: Path) -> None:
    import torch
    import transformers

    seed = SEEDS[model_type]
    recipe = {"model_type": model_type, "seed": seed, "dtype": "float32", **OVERRIDES[model_type]}
    ids = tiny.token_ids(N_TOKENS, seed)
    with tempfile.TemporaryDirectory() as folder:
        tiny.build_source(folder, **recipe, experts="fused")
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    if any(report.values()):
        raise SystemExit(f"{model_type}: tensors and model do not match: {report}")
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].numpy()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    np.savez_compressed(
        dst / f"{model_type}.npz",
        input_ids=np.array(ids, np.int32),
        logits=logits.astype(np.float32),
        recipe=json.dumps(recipe),
        versions=json.dumps(versions),
    )
    print(f"{model_type}: logits {logits.shape}, standard deviation {logits.std():.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model_types", nargs="*", metavar="TYPE", help="default: all types")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "tests/fixtures/transformers", metavar="FOLDER"
    )
    args = parser.parse_args()
    unknown = set(args.model_types) - set(tiny.MODEL_TYPES)
    if unknown:
        parser.error(f"unknown model type: {', '.join(sorted(unknown))}")
    args.out.mkdir(parents=True, exist_ok=True)
    for model_type in args.model_types or tiny.MODEL_TYPES:
        record(model_type, args.out)


if __name__ == "__main__":
    main()

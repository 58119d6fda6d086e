"""Adapters of mlx-lm's on packed layers: made, trained, saved, loaded, and merged where asked."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tuner.lora import LoRALinear, LoRASwitchLinear
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters

from converting import convert
from tiny import build_source
from turboquant_mlx.checkpoint.loader import load_model
from turboquant_mlx.errors import OptionError
from turboquant_mlx.layers.packed import PackedLayer

CONFIG = {"rank": 4, "scale": 2.0, "dropout": 0.0}
TOKENS = mx.array([[5, 9, 2, 7, 1, 3]])


@pytest.fixture(scope="module", params=["llama", "qwen3_moe"])
def folder(request, tmp_path_factory) -> Path:
    """A converted model; the second one has experts."""
    root = tmp_path_factory.mktemp(request.param)
    build_source(root / "source", request.param, dtype="float32")
    assert convert(root / "source", root / "out", "--bits", "4", "--no-balance").code == 0
    return root / "out"


def loaded(folder: Path) -> nn.Module:
    model, _ = load_model(folder)
    return model


def adapted(folder: Path) -> nn.Module:
    model = loaded(folder)
    model.freeze()
    linear_to_lora_layers(model, len(model.layers), CONFIG)
    return model


def test_every_packed_layer_gets_one_and_nothing_changes_at_first(folder):
    plain, model = loaded(folder), adapted(folder)
    inside = [m for layer in plain.layers for m in layer.modules()]  # the head is not adapted
    packed = [m for m in inside if isinstance(m, PackedLayer)]
    made = [m for m in model.modules() if isinstance(m, LoRALinear | LoRASwitchLinear)]
    assert len([m for m in made if isinstance(m.linear, PackedLayer)]) == len(packed)
    assert mx.array_equal(model(TOKENS), plain(TOKENS))
    names = [name for name, _ in tree_flatten(model.trainable_parameters())]
    assert names and all(name.endswith(("lora_a", "lora_b")) for name in names)


def test_training_lowers_the_loss_and_the_adapter_comes_back_from_its_file(folder, tmp_path):
    model = adapted(folder)
    model.train()

    def loss(model):
        logits = model(TOKENS[:, :-1]).astype(mx.float32)
        return nn.losses.cross_entropy(logits, TOKENS[:, 1:]).mean()

    step, optimizer = nn.value_and_grad(model, loss), optim.Adam(2e-3)
    losses = []
    for _ in range(12):
        value, gradients = step(model)
        optimizer.update(model, gradients)
        mx.eval(model.parameters(), optimizer.state)
        losses.append(value.item())
    assert losses[-1] < 0.8 * losses[0]

    model.eval()
    adapter = dict(tree_flatten(model.trainable_parameters()))
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), adapter)
    config = {"fine_tune_type": "lora", "num_layers": len(model.layers), "lora_parameters": CONFIG}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    again = load_adapters(loaded(folder), str(tmp_path))
    again.eval()
    assert mx.array_equal(again(TOKENS), model(TOKENS))


def test_merged_layers_are_plain_ones_of_the_sum(folder):
    model = adapted(folder)
    layers = (m for m in model.modules() if isinstance(getattr(m, "linear", None), PackedLayer))
    kinds = {type(m): m for m in layers}
    for layer in kinds.values():
        layer.lora_b = mx.random.normal(layer.lora_b.shape, key=mx.random.key(1)) * 0.1
        x = mx.random.normal((3, 1, layer.linear.input_dims), key=mx.random.key(2))
        more = [mx.array([[0], [1], [1]])] if isinstance(layer, LoRASwitchLinear) else []
        with pytest.raises(OptionError, match="cannot be merged into a packed weight"):
            layer.fuse()
        merged = layer.fuse(dequantize=True)
        assert merged.weight.dtype == mx.bfloat16
        merged.weight = merged.weight.astype(mx.float32)
        got, want = (np.array(f(x, *more)) for f in (merged, layer))
        assert np.abs(got - want).max() < 2e-2 * np.abs(want).max()


def test_a_model_of_merged_layers_runs(folder):
    model, plain = adapted(folder), loaded(folder)
    merged = [(name, m.fuse(True)) for name, m in model.named_modules() if _is_packed_adapter(m)]
    model.update_modules(tree_unflatten(merged))
    got, want = (np.array(m(TOKENS)) for m in (model, plain))
    # for a rounding to bfloat16 a router of random weights may take another expert
    distances = np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)
    assert np.median(distances) < 0.2


def _is_packed_adapter(module: nn.Module) -> bool:
    return isinstance(getattr(module, "linear", None), PackedLayer)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_another_dtype_of_the_model_leaves_packed_weights_as_they_are(folder, dtype):
    model, other = loaded(folder), loaded(folder)
    other.set_dtype(dtype)
    own = ("codes", "scales", "table", "multiplier")
    before = dict(tree_flatten(model.parameters()))
    for name, array in tree_flatten(other.parameters()):
        path, _, kind = name.rpartition(".")
        if f"{path}.codes" in before and kind in own:
            assert array.dtype == before[name].dtype
            assert mx.array_equal(array, before[name])
        elif mx.issubdtype(array.dtype, mx.floating) and kind != "multiplier":
            assert array.dtype == dtype
    assert mx.isfinite(other(TOKENS)).all()


def test_a_packed_parameter_of_another_dtype_is_taken_in_that_of_the_format(folder):
    model = loaded(folder)
    layer = next(m for m in model.modules() if isinstance(m, PackedLayer))
    layer.table = (layer.table * 2).astype(mx.bfloat16)
    assert layer.table.dtype == mx.float32
    assert layer.table.max().item() > 0

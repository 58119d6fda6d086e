"""Read a GGUF file as the tensors, the config and the tokenizer of a Hugging Face checkpoint.

Used by example_model.py, for the three models that it builds. GGUF keeps the rows of q and k in
another order and Gemma's norms with 1 added; both are undone here. Values are float32 numpy
arrays, one tensor at a time. Needs the packages numpy, gguf and tokenizers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf as gguf_format
import numpy as np
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

DITHER_SEED = 20251129
EXPERT_SEED = 7
EXPERTS, EXPERTS_PER_TOKEN = 4, 2

# Weights that share one scale in each GGUF type that is dithered.
GRID_GROUPS = {"Q4_0": 32, "Q4_1": 32, "Q5_0": 32, "Q5_1": 32, "Q4_K": 32, "Q5_K": 32, "Q6_K": 16}

Tensors = Iterator[tuple[str, np.ndarray]]


class UnknownTensorError(ValueError):
    """The GGUF holds a tensor that belongs to none of the models known here."""


class Gguf:
    """The metadata and the tensors of one GGUF file, as numpy arrays."""

    def __init__(self, path: Path):
        reader = gguf_format.GGUFReader(path)
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._fields = reader.fields
        self.architecture = self["general.architecture"]

    def __getitem__(self, key: str) -> Any:
        return self._fields[key].contents()

    def __contains__(self, key: str) -> bool:
        return key in self._fields

    def model(self, key: str) -> Any:
        """A value of the architecture's own group of keys."""
        return self[f"{self.architecture}.{key}"]

    def epsilon(self) -> float:
        """The norm's epsilon, which GGUF keeps in float32, as the decimal that was meant."""
        return float(f"{self.model('attention.layer_norm_rms_epsilon'):.5g}")

    def names(self) -> list[str]:
        return sorted(self._tensors)

    def values(self, name: str) -> np.ndarray:
        """A tensor expanded to float32."""
        tensor = self._tensors[name]
        return gguf_format.dequantize(tensor.data, tensor.tensor_type).astype("float32")

    def dithered(self, name: str, rng: np.random.Generator) -> np.ndarray:
        """The tensor with uniform noise as wide as one step of each group's grid.

        The step is the smallest distance between two different values of the group. Tensors of
        finer types (Q8_0 and above) come back as they are and draw nothing from ``rng``.
        """
        values = self.values(name)
        group = GRID_GROUPS.get(self._tensors[name].tensor_type.name)
        if group is None:
            return values
        levels = np.sort(values.reshape(-1, group), axis=1)
        steps = np.diff(levels, axis=1)
        # Equal values come out of the expansion with rounding noise between them.
        same = steps <= 1e-4 * np.abs(levels).max(axis=1, keepdims=True)
        steps[same] = np.inf
        step = steps.min(axis=1, keepdims=True)
        step[~np.isfinite(step)] = 0
        noise = rng.uniform(-0.5, 0.5, levels.shape).astype("float32") * step
        return values + noise.reshape(values.shape)


# --- names and row order -------------------------------------------------------------------------

BLOCK_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
}
LLAMA_NAMES = BLOCK_NAMES | {"ffn_norm": "post_attention_layernorm"}
GEMMA_NAMES = BLOCK_NAMES | {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def split_name(name: str, names: dict[str, str]) -> tuple[str, str]:
    """(name in transformers, part of the block or "") of a GGUF tensor."""
    top = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
    }
    if name in top:
        return top[name], ""
    pieces = name.split(".")
    if len(pieces) != 4 or pieces[0] != "blk" or pieces[3] != "weight" or pieces[2] not in names:
        raise UnknownTensorError(f"the GGUF holds a tensor that is not known: {name}")
    return f"model.layers.{pieces[1]}.{names[pieces[2]]}.weight", pieces[2]


def halves_apart(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo GGUF's row order of q and k, which puts the two partners of a rotary pair side by side;
    transformers keeps all first partners of a head before all second ones."""
    rows, width = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, width)
    return pairs.transpose(0, 2, 1, 3).reshape(rows, width)


def llama_tensors(gguf: Gguf, dither: bool) -> Tensors:
    heads = {
        "attn_q": gguf.model("attention.head_count"),
        "attn_k": gguf.model("attention.head_count_kv"),
    }
    rng = np.random.default_rng(DITHER_SEED)
    for name in gguf.names():
        new_name, part = split_name(name, LLAMA_NAMES)
        value = gguf.dithered(name, rng) if dither else gguf.values(name)
        yield new_name, halves_apart(value, heads[part]) if part in heads else value


def mixtral_tensors(gguf: Gguf, dither: bool) -> Tensors:
    """Llama's tensors with each MLP copied into experts; dither makes the copies differ."""
    rng = np.random.default_rng(EXPERT_SEED)
    expert_names = {"ffn_gate": "w1", "ffn_down": "w2", "ffn_up": "w3"}
    for (new_name, value), name in zip(llama_tensors(gguf, False), gguf.names(), strict=True):
        part = split_name(name, LLAMA_NAMES)[1]
        if part not in expert_names:
            yield new_name, value
            continue
        block = new_name.split(".mlp.")[0] + ".block_sparse_moe"
        for expert in range(EXPERTS):
            copy = gguf.dithered(name, rng) if dither else value
            yield f"{block}.experts.{expert}.{expert_names[part]}.weight", copy
        if part == "ffn_gate":
            router = rng.normal(0, 0.02, (EXPERTS, value.shape[1]))
            yield f"{block}.gate.weight", router.astype("float32")


def gemma3_tensors(gguf: Gguf, dither: bool) -> Tensors:
    rng = np.random.default_rng(DITHER_SEED)
    for name in gguf.names():
        value = gguf.dithered(name, rng) if dither else gguf.values(name)
        # GGUF keeps Gemma's norms as the factor itself, transformers as what is added to 1.
        yield split_name(name, GEMMA_NAMES)[0], value - 1 if value.ndim == 1 else value


# --- tokenizers and configs ----------------------------------------------------------------------

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # token types of GGUF


def added_tokens(gguf: Gguf, tokenizer: Tokenizer) -> None:
    types = gguf["tokenizer.ggml.token_type"]
    for token, kind in zip(gguf["tokenizer.ggml.tokens"], types, strict=True):
        if kind == CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif kind == USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=False)])


def byte_level_tokenizer(gguf: Gguf) -> Tokenizer:
    """SmolLM's: byte-level BPE, every digit a token of its own."""
    vocabulary = {token: n for n, token in enumerate(gguf["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in gguf["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added_tokens(gguf, tokenizer)
    return tokenizer


def sentencepiece_tokenizer(gguf: Gguf) -> Tokenizer:
    """Gemma's: a SentencePiece vocabulary, whose scores stand for the order of merges."""
    tokens = gguf["tokenizer.ggml.tokens"]
    types, scores = gguf["tokenizer.ggml.token_type"], gguf["tokenizer.ggml.scores"]
    vocabulary = {token: n for n, token in enumerate(tokens)}
    ranked = []
    for token, kind, score in zip(tokens, types, scores, strict=True):
        if kind != NORMAL:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                order = (-score, -len(left), vocabulary[left], vocabulary[right])
                ranked.append((order, (left, right)))
    ranked.sort()
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary,
            [pair for _, pair in ranked],
            unk_token=tokens[gguf["tokenizer.ggml.unknown_token_id"]],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    added_tokens(gguf, tokenizer)
    bos = tokens[gguf["tokenizer.ggml.bos_token_id"]]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[bos, "$A"],
        pair=[bos, "$A", f"{bos}:1", "$B:1"],
        special_tokens=[(bos, vocabulary[bos])],
    )
    return tokenizer


def special_ids(gguf: Gguf) -> dict[str, int]:
    names = {"bos": "bos", "eos": "eos", "pad": "padding"}
    return {f"{ours}_token_id": gguf[f"tokenizer.ggml.{gg}_token_id"] for ours, gg in names.items()}


def common_config(gguf: Gguf) -> dict[str, Any]:
    return {
        "hidden_size": gguf.model("embedding_length"),
        "intermediate_size": gguf.model("feed_forward_length"),
        "num_hidden_layers": gguf.model("block_count"),
        "num_attention_heads": gguf.model("attention.head_count"),
        "num_key_value_heads": gguf.model("attention.head_count_kv"),
        "max_position_embeddings": gguf.model("context_length"),
        "rms_norm_eps": gguf.epsilon(),
        "rope_theta": float(gguf.model("rope.freq_base")),
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": len(gguf["tokenizer.ggml.tokens"]),
        **special_ids(gguf),
    }


def llama_config(gguf: Gguf) -> dict[str, Any]:
    return common_config(gguf) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "head_dim": gguf.model("rope.dimension_count"),
        "hidden_act": "silu",
        "mlp_bias": False,
    }


def mixtral_config(gguf: Gguf) -> dict[str, Any]:
    return llama_config(gguf) | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "sliding_window": None,
    }


def gemma3_config(gguf: Gguf) -> dict[str, Any]:
    every = 6  # one layer in six looks at the whole context; the GGUF does not say so
    layers = gguf.model("block_count")
    return common_config(gguf) | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "head_dim": gguf.model("attention.key_length"),
        "query_pre_attn_scalar": gguf.model("attention.key_length"),
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_local_base_freq": 10000.0,
        "sliding_window": gguf.model("attention.sliding_window"),
        "sliding_window_pattern": every,
        "layer_types": [
            "sliding_attention" if n % every else "full_attention" for n in range(1, layers + 1)
        ],
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }


RECIPES = {
    "smollm2": (llama_tensors, llama_config, byte_level_tokenizer),
    "smollm2-moe": (mixtral_tensors, mixtral_config, byte_level_tokenizer),
    "gemma3-270m": (gemma3_tensors, gemma3_config, sentencepiece_tokenizer),
}


# --- files ---------------------------------------------------------------------------------------


def write_bfloat16(path: Path, tensors: Tensors) -> int:
    """Write a safetensors file; returns the number of parameters."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    blobs, parameters = [], 0
    for name, value in tensors:
        bits = np.ascontiguousarray(value).view(np.uint32)
        # Round to nearest, ties to even. None of these weights is near the end of the range.
        half = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype("<u2")
        span = [2 * parameters, 2 * (parameters + half.size)]
        header[name] = {"dtype": "BF16", "shape": list(half.shape), "data_offsets": span}
        blobs.append(half)
        parameters += half.size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for blob in blobs:
            file.write(blob.data)
    return parameters


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def write_checkpoint(model: str, gguf_path: Path, folder: Path, dither: bool) -> int:
    """Write weights, configs and tokenizer into an existing folder.

    Args:
        model: a key of ``RECIPES``.
        gguf_path: the file that ``model`` is made from.
        folder: where to write; files of the same names are overwritten.
        dither: whether to move the weights off the grid of the GGUF.

    Returns:
        the number of parameters.

    Raises:
        UnknownTensorError: the file is not of this model's architecture.
    """
    gguf = Gguf(gguf_path)
    tensors, config, tokenizer = RECIPES[model]
    parameters = write_bfloat16(folder / "model.safetensors", tensors(gguf, dither))
    write_json(folder / "config.json", config(gguf))
    write_json(folder / "generation_config.json", special_ids(gguf))
    tokenizer(gguf).save(str(folder / "tokenizer.json"), pretty=False)
    tokens = gguf["tokenizer.ggml.tokens"]
    ids = special_ids(gguf) | {"unk_token_id": gguf["tokenizer.ggml.unknown_token_id"]}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": gguf.model("context_length"),
        **{key.removesuffix("_id"): tokens[n] for key, n in ids.items()},
    }
    write_json(folder / "tokenizer_config.json", settings)
    if "tokenizer.chat_template" in gguf:
        template = gguf["tokenizer.chat_template"]
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return parameters

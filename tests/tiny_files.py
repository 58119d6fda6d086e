"""The files of a tiny checkpoint, written without MLX: safetensors, index, tokenizer."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

VOCAB_SIZE = 288
PAD_ID, START_ID, END_ID, THINK_ID, END_THINK_ID = range(5)
SPECIAL_TOKENS = ("<|pad|>", "<|start|>", "<|end|>", "<think>", "</think>")

CORPUS = """
the small red boat waits by the old stone bridge. a short question gets a short answer.
why does ice float? because it is lighter than the water around it.
numbers: 0 1 2 3 4 5 6 7 8 9 10 20 30 and more. rows and columns, keys and values, groups of rows.
def double(x):
    return x + x
{"name": "read_file", "arguments": {"path": "notes"}}
"""

# Follows the convention of Qwen3: thinking switched off means an empty thought in the prompt.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|start|>' + message['role'] + '\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\n\n</think>\n\n' }}"
    "{% endif %}{% endif %}"
)


def encode(value: np.ndarray, dtype: str) -> np.ndarray:
    """float32 to the stored dtype; bfloat16 (rounded to nearest even) is held in a uint16."""
    value = np.ascontiguousarray(value, dtype=np.float32)
    if dtype == "bfloat16":
        bits = value.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return value.astype({"float32": np.float32, "float16": np.float16}[dtype])


_SAFETENSORS_NAMES = {"float32": "F32", "float16": "F16", "uint16": "BF16", "uint8": "U8"}


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write one safetensors file; a uint16 array is taken for bfloat16."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, value in tensors.items():
        header[name] = {
            "dtype": _SAFETENSORS_NAMES[value.dtype.name],
            "shape": list(value.shape),
            "data_offsets": [offset, offset + value.nbytes],
        }
        offset += value.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for value in tensors.values():
            file.write(np.ascontiguousarray(value).tobytes())


def write_shards(dst: Path, tensors: dict[str, np.ndarray], shards: int) -> None:
    if shards == 1:
        write_safetensors(dst / "model.safetensors", tensors)
        return
    names = sorted(tensors)
    per_shard = math.ceil(len(names) / shards)
    weight_map = {}
    for n in range(shards):
        file = f"model-{n + 1:05d}-of-{shards:05d}.safetensors"
        part = names[n * per_shard : (n + 1) * per_shard]
        write_safetensors(dst / file, {name: tensors[name] for name in part})
        weight_map.update(dict.fromkeys(part, file))
    index = {
        "metadata": {"total_size": sum(value.nbytes for value in tensors.values())},
        "weight_map": weight_map,
    }
    (dst / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


@functools.lru_cache
def _tokenizer_json(vocab_size: int) -> str:
    """A byte-level BPE tokenizer with exactly ``vocab_size`` entries."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    content = json.loads(tokenizer.to_str())
    for token in content["added_tokens"]:
        # Thoughts are text: their marks must survive decoding that skips special tokens.
        token["special"] = "think" not in token["content"]
    return json.dumps(content, ensure_ascii=False)


def write_tokenizer(dst: Path, vocab_size: int = VOCAB_SIZE, *, transformers5: bool = True) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template.

    The template lies in chat_template.jinja, where transformers 5 puts it, or else inside
    tokenizer_config.json. A vocabulary beyond what the corpus yields leaves the rest of the
    model's rows without a token, as padded vocabularies do.
    """
    (dst / "tokenizer.json").write_text(
        _tokenizer_json(min(vocab_size, VOCAB_SIZE)), encoding="utf-8"
    )
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "pad_token": "<|pad|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }
    if transformers5:
        (dst / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    else:
        config["chat_template"] = CHAT_TEMPLATE
    (dst / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2) + "\n", encoding="utf-8"
    )

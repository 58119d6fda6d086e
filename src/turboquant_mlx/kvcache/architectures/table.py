"""Which rule each model type follows, and how a config.json is matched with one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..pieces import UnknownGeometryError
from . import attention, latent, recurrent
from .settings import Rule, Settings


def find(config: Mapping[str, Any], text: Mapping[str, Any]) -> tuple[str, Settings]:
    """The rule's name for a config, and the settings that it reads.

    A nested text config names its own type; where that type is unknown or absent, the outer one
    decides.

    Raises:
        UnknownGeometryError: there is no rule for it.
    """
    outer, inner = config.get("model_type"), text.get("model_type")
    if config.get("model_type") == "bailing_hybrid":
        kinds = config.get("architectures") or []
        if "BailingMoeV3ForCausalLM" in kinds:
            outer = inner = "bailing_moe_v3"
    for candidate in (_OUTER_FIRST.get(str(outer)), inner, outer):
        name = _canonical(candidate)
        if name is not None:
            return name, Settings(name, text, config)
    raise UnknownGeometryError(f"no rule for the caches of model type {inner or outer!r}")


def _canonical(model_type: Any) -> str | None:
    if not isinstance(model_type, str):
        return None
    name = ALIASES.get(model_type, model_type)
    if name in RULES:
        return name
    for suffix in ("_text", "_language"):
        base = name.removesuffix(suffix)
        base = ALIASES.get(base, base)
        if base != name and base in RULES:
            return base
    return None


def _family(rule: Rule, names: str) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


RULES: dict[str, Rule] = {
    **_family(
        attention.plain,
        "bitnet dots1 ernie4_5 ernie4_5_moe gemma gemma2 glm glm4 glm4_moe "
        "hunyuan_v1_dense llama4_text minimax nemotron olmo2 olmoe qwen3 qwen3_moe seed_oss "
        "smollm3 solar_open telechat3",
    ),
    **_family(
        attention.plain_derived,
        "Klear apertus bailing_moe cohere deepseek granite granitemoe helium hunyuan internlm2 "
        "internlm3 mimo minicpm mixtral nanochat phi phi3 phi3small phimoe qwen2 qwen2_moe "
        "stablelm starcoder2",
    ),
    "gpt_neox": attention.all_heads,
    "plamo": attention.plamo,
    **_family(attention.by_layer_types(), "llama ministral3 laguna afmoe exaone_moe"),
    **_family(attention.by_layer_types("WWWF"), "spark2_5 muse_glimmer muse_spark"),
    **_family(attention.by_layer_types("WWWF", "window"), "olmo3"),
    **_family(attention.by_layer_types("WF", "window"), "gpt_oss"),
    **_family(attention.by_layer_types(None, "window"), "mellum"),
    "cohere2": lambda c: attention.every(c, "sliding_window_pattern"),
    "plamo3": lambda c: attention.every(
        c,
        "sliding_window_pattern",
        "sliding_window" if c.has("sliding_window") else "window_size",
    ),
    **_family(attention.gemma3, "gemma3 gemma3_text"),
    "gemma3n": attention.gemma3n,
    "gemma4_text": attention.gemma4,
    "exaone4": attention.exaone4,
    "mimo_v2_flash": attention.mimo_v2,
    "step3p5": attention.step3p5,
    "llama4": attention.llama4,
    "iquestloopcoder": attention.loop_coder,
    "nanbeige": attention.nanbeige,
    **_family(latent.latent, "deepseek_v3 glm4_moe_lite mistral4 kimi_vl kimi_k25"),
    **_family(latent.expanded_latent, "deepseek_v2 minicpm3 youtu_llm"),
    **_family(latent.indexed_latent, "deepseek_v32 glm_moe_dsa"),
    **_family(latent.longcat, "longcat_flash longcat_flash_ngram"),
    "minimax_m3_vl": latent.minimax_m3,
    "mamba": recurrent.pure_mamba,
    "mamba2": recurrent.pure_mamba2,
    "jamba": recurrent.jamba,
    "granitemoehybrid": recurrent.granite_hybrid,
    "falcon_h1": recurrent.falcon_h1,
    "nemotron_h": recurrent.nemotron_h,
    "nemotron-nas": attention.nemotron_nas,
    "plamo2": recurrent.plamo2,
    **_family(recurrent.qwen3_next, "qwen3_next qwen3_5 qwen3_5_moe"),
    "olmo_hybrid": recurrent.olmo_hybrid,
    **_family(recurrent.kimi_linear, "kimi_linear kimi_k3"),
    "bailing_hybrid": recurrent.bailing_hybrid,
    "bailing_moe_linear": recurrent.bailing_linear,
    "bailing_moe_v3": recurrent.bailing_v3,
    **_family(recurrent.lfm2, "lfm2 lfm2_moe"),
    "baichuan_m1": recurrent.baichuan_m1,
    "recurrent_gemma": recurrent.recurrent_gemma,
    "rwkv7": recurrent.rwkv7,
    **_family(attention.gpt2, "gpt2 gptj"),
    "gpt_bigcode": attention.gpt_bigcode,
    "lille-130m": attention.lille,
    "dbrx": attention.dbrx,
    "openelm": attention.openelm,
    "phixtral": attention.phixtral,
    "qwen": attention.qwen1,
    "talkie": attention.talkie,
    "exaone": attention.exaone,
    "afm7": attention.afm7,
}
"""Model type -> rule, under the names of mlx-lm's modules."""

ALIASES: dict[str, str] = {
    # what mlx-lm itself loads with another type's class
    "mistral": "llama",
    "phi-msft": "phixtral",
    "falcon_mamba": "mamba",
    "joyai_llm_flash": "deepseek_v3",
    "kimi_k2": "deepseek_v3",
    "minimax_m2": "minimax",
    "iquestcoder": "llama",
    "xverse": "llama",
    # language models inside of others
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_text",
    "lfm2-vl": "lfm2",
    "lfm2_vl": "lfm2",
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
    "qwen3_omni_moe": "qwen3_moe",
    "glm4v": "glm4",
    "glm4v_moe": "glm4_moe",
    "mistral3": "llama",
    "pixtral": "llama",
    "llava": "llama",
    "llava_next": "llama",
    "idefics3": "llama",
    "smolvlm": "llama",
    "minimax_m3": "minimax_m3_vl",
    "ernie4_5_moe_vl": "ernie4_5_moe",
    "paligemma": "gemma2",
    "granitemoeshared": "granitemoe",
}

# Here the wrapper decides and not the type of the text inside it.
_OUTER_FIRST = {
    "gemma3": "gemma3",
    "llama4": "llama4",
    "kimi_vl": "kimi_vl",
    "kimi_k25": "kimi_k25",
}
_OUTER_FIRST |= {"kimi_k3": "kimi_k3", "muse_spark": "muse_spark"}
_OUTER_FIRST |= {"minimax_m3_vl": "minimax_m3_vl", "minimax_m3": "minimax_m3_vl"}

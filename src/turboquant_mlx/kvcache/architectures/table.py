"""Which rule each model type follows, and how a config.json is matched with one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..pieces import UnknownGeometryError
from . import attention, latent, recurrent, vision
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
    for candidate in (_OUTER_FIRST.get(ALIASES.get(str(outer), str(outer))), inner, outer):
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
    lower = model_type.lower()  # as mlx-vlm does
    if lower != model_type:
        return _canonical(lower)
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
    "olmo": attention.olmo,
    "gear": recurrent.gear,
    "deepseek_v41": latent.deepseek_v41,
}
"""Model type -> rule, under the names of mlx-lm's modules."""

# What only mlx-vlm loads. Where such a type wraps a language model, its own class reads the nested
# config, whatever type that calls itself.
VISION_RULES: dict[str, Rule] = {
    **_family(
        attention.plain,
        "glm_ocr hunyuan_vl internvl_chat jina_vlm k2_horizon limite llada2_moe mage_vl minicpmo "
        "molmo2 molmo_point moondream3 nemotron_labs_diffusion paddleocr_vl",
    ),
    **_family(
        attention.plain_derived,
        "dots_ocr fastvlm got granite4_vision granite_vision idefics2 llava_bunny llava_next "
        "llava_onevision locateanything moondream2 multi_modality phi3_v phi4_siglip phi4mm",
    ),
    "aya_vision": lambda c: attention.every(c, "sliding_window_pattern"),
    **_family(attention.by_layer_types(), "cohere_compass kolibri1"),
    "cohere2_moe": vision.cohere2_moe,
    "diffusion_gemma": vision.diffusion_gemma,
    "flint": vision.flint,
    "hrm_text": vision.hrm_text,
    "molmo": vision.molmo,
    "mimo_v2": attention.mimo_v2,
    "step3p7": attention.step3p5,
    **_family(
        vision.deepseek_v2_of_vision, "deepseek_vl_v2 deepseekocr deepseekocr_2 unlimited_ocr"
    ),
    **_family(latent.latent, "mistral_large3 xing4_0 youtu_vl"),
    "deepseek_v4": vision.deepseek_v4,
    "inkling": vision.inkling,
    "plamo2vl": recurrent.plamo2,
    "zaya1_vl": vision.zaya,
}
RULES |= VISION_RULES

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
    "deepseek_v41_text": "deepseek_v41",
    "prism_hadamard_qwen35": "qwen3_5",
    "minicpmv4_6": "qwen3_5",
    "minicpmv4_7": "qwen3_5_moe",
    "nemotron_h_nano_omni": "nemotron_h",
    "nemotron_nas": "nemotron-nas",
    "klear": "Klear",
    "lille_130m": "lille-130m",
    # other spellings that mlx-vlm knows
    "bunny-llama": "llava_bunny",
    "cohere2_vision": "aya_vision",
    "cohere2moe": "cohere2_moe",
    "granite-vision": "granite_vision",
    "granite4-vision": "granite4_vision",
    "inkling_mm_model": "inkling",
    "jvlm": "jina_vlm",
    "llava-qwen2": "llava_bunny",
    "llava_qwen2": "fastvlm",
    "moondream1": "moondream2",
    "muse_spark_open": "muse_spark",
    "nemotron_h_omni": "nemotron_h",
    "nemotron_h_puzzle": "nemotron_h",
    "nemotronh_nano_omni_reasoning_v3": "nemotron_h",
    "phi4-siglip": "phi4_siglip",
    "unlimited-ocr": "unlimited_ocr",
}

# Here the wrapper decides and not the type of the text inside it.
_OUTER_FIRST = {
    "minimax_m3": "minimax_m3_vl",
    **{
        name: name
        for name in (
            *("gemma3", "llama4", "kimi_vl", "kimi_k25", "kimi_k3", "muse_spark", "minimax_m3_vl"),
            *VISION_RULES,
        )
    },
}

"""Values that mlx-vlm 0.7 puts in the place of what a config.json leaves out, for the model types
that only it loads.

Only the fields that the rules read. Tests hold every line against the classes.
"""

from __future__ import annotations

from typing import Any


def _sizes(
    hidden: int, layers: int, heads: int, kv: int | None = None, dim: int | None = None, **more: Any
) -> dict[str, Any]:
    named = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": dim,
    }
    return {key: value for key, value in named.items() if value is not None} | more


def _latent(nope: int = 128, rope: int = 64, rank: int | None = 512) -> dict[str, Any]:
    named = {"qk_nope_head_dim": nope, "qk_rope_head_dim": rope, "v_head_dim": 128}
    return named if rank is None else named | {"kv_lora_rank": rank}


_OCR = _sizes(1280, 30, 32, 32) | _latent(0, 0)

VISION_DEFAULTS: dict[str, dict[str, Any]] = {
    "aya_vision": _sizes(8192, 40, 64, 8, 128, sliding_window=4096, sliding_window_pattern=4),
    "cohere2_moe": _sizes(1024, 36, 64, 8, 128, sliding_window=4096, sliding_window_pattern=4),
    "cohere_compass": _sizes(4096, 32, 32),
    "deepseek_v4": _sizes(4096, 43, 64, dim=512, sliding_window=128, index_head_dim=128),
    "deepseek_vl_v2": _sizes(1280, 30, 32, 32) | _latent(),
    "deepseekocr": _OCR,
    "deepseekocr_2": _OCR,
    "diffusion_gemma": _sizes(
        2816,
        30,
        16,
        8,
        256,
        sliding_window=1024,
        num_global_key_value_heads=2,
        global_head_dim=512,
    ),
    "dots_ocr": _sizes(1536, 28, 12, 2),
    "fastvlm": _sizes(896, 24, 14, 2),
    "flint": _sizes(2048, 49, 32, 4, 128, sliding_window=513),
    "glm_ocr": _sizes(1536, 16, 16, 8, 128),
    "granite4_vision": _sizes(2560, 40, 40, 8),
    "granite_vision": _sizes(2048, 40, 32, 8),
    "hrm_text": _sizes(1536, 16, 12, 12, 128, H_cycles=2, L_cycles=3),
    "hunyuan_vl": _sizes(1024, 24, 16, 8, 128),
    "idefics2": _sizes(4096, 32, 32, 8),
    "inkling": _sizes(
        6144,
        66,
        64,
        8,
        128,
        swa_num_key_value_heads=16,
        swa_head_dim=128,
        sconv_kernel_size=4,
    ),
    "internvl_chat": {"num_key_value_heads": 8},
    "jina_vlm": _sizes(2048, 28, 16, 8, 128),
    "k2_horizon": _sizes(4096, 36, 32, 8, 128),
    "limite": _sizes(1280, 48, 10, 2, 128),
    "llada2_moe": _sizes(2048, 20, 16, 4),
    "llava_next": _sizes(4096, 32, 32, 8),
    "llava_onevision": _sizes(896, 24, 14, 2),
    "locateanything": _sizes(2048, 36, 16, 2),
    "mage_vl": _sizes(2560, 36, 32, 8, 128),
    "mimo_v2": _sizes(
        4096,
        48,
        64,
        4,
        192,
        v_head_dim=128,
        swa_head_dim=192,
        swa_v_head_dim=128,
        swa_num_key_value_heads=8,
        sliding_window_size=128,
    ),
    "mistral_large3": _sizes(7168, 61, 128, 128) | _latent(),
    "molmo": {"d_model": 3584, "n_heads": 28, "n_kv_heads": 4, "n_layers": 28},
    "molmo2": _sizes(2560, 36, 32, 8, 128),
    "molmo_point": _sizes(4096, 36, 32, 8, 128),
    "moondream2": _sizes(2048, 24, 32, 32),
    "moondream3": _sizes(2048, 24, 32, 32, 64),
    "multi_modality": _sizes(4096, 32, 32),
    "nemotron_labs_diffusion": _sizes(4096, 34, 32, 8, 128),
    "paddleocr_vl": _sizes(1024, 18, 16, 2),
    "phi3_v": _sizes(2048, 32, 32),
    "phi4_siglip": _sizes(5120, 40, 40, 10),
    "phi4mm": _sizes(3072, 32, 24, 8),
    "plamo2vl": {
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
        "hidden_size_per_head": 128,
        "mamba_d_state": 64,
        "mamba_d_conv": 4,
        "mamba_num_heads": 64,
        "mamba_step": 2,
        "mamba_enabled": True,
    },
    "step3p7": {"num_hidden_layers": 45, "head_dim": 128, "num_attention_groups": 8},
    "unlimited_ocr": _sizes(1280, 12, 10, 10) | _latent(0, 0, None),
    "xing4_0": _sizes(4096, 30, 32, 32) | _latent(),
    "youtu_vl": _sizes(2560, 40, 32, 32) | _latent(),
    "zaya1_vl": _sizes(2048, 40, 8, 2, 128, cca_time0=2, cca_time1=2),
}

"""Configs of published models, by their names, and how many billions of weights they have.

A new family goes into `published_families`, or into `published_states` if it has other state than
keys and values of every token.

Fields are those of the public config.json that say how a model computes, and those that others'
tools have left in them. Weights count those that are stored for text: one for a tied head, none for
a tower or for layers that predict more than one token.
"""

from __future__ import annotations

from typing import Any

_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "attention_bias": False,
    "hidden_act": "silu",
    "mlp_bias": False,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
}
_SMOLLM2 = _LLAMA | {
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "rope_interleaved": False,
    "rope_theta": 130_000,
    "tie_word_embeddings": True,
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    "vocab_size": 49_152,
}
_QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40_960,
    "max_window_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1_000_000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151_936,
}
_GEMMA3: dict[str, Any] = {
    "model_type": "gemma3_text",
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 32_768,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "rope_local_base_freq": 10_000,
    "rope_scaling": None,
    "rope_theta": 1_000_000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262_144,
}
_GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "initial_context_length": 4096,
    "max_position_embeddings": 131_072,
    "num_experts_per_tok": 4,
    "output_router_logits": False,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150_000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201_088,
}
_LLAMA3 = _LLAMA | {
    "max_position_embeddings": 131_072,
    "pretraining_tp": 1,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128_256,
}
_QWEN2: dict[str, Any] = {
    "model_type": "qwen2",
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "max_position_embeddings": 32_768,
    "max_window_layers": 28,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "sliding_window": 131_072,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152_064,
}
_OLMO: dict[str, Any] = {
    "attention_bias": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 500_000,
    "tie_word_embeddings": False,
}


def sizes(
    hidden: int, inner: int, layers: int, heads: int, key_heads: int | None = None, **others: Any
) -> dict[str, Any]:
    """Return the size fields of most configs."""
    fields = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }
    return fields | ({} if key_heads is None else {"num_key_value_heads": key_heads}) | others


def gemma3(*shape: int, **others: Any) -> dict[str, Any]:
    """Return a multimodal Gemma 3: most of its text config is left out."""
    text = {
        "model_type": "gemma3_text",
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
        **sizes(*shape, **others),
    }
    return {
        "model_type": "gemma3",
        "boi_token_index": 255_999,
        "mm_tokens_per_image": 256,
        "text_config": text,
        "vision_config": {"model_type": "siglip_vision_model"},
    }


def gemma4(kind: str, *shape: int, **others: Any) -> dict[str, Any]:
    """Return a multimodal Gemma 4; `kind` is that of the whole."""
    text = {
        "model_type": f"{kind}_text",
        "attention_bias": False,
        "attention_k_eq_v": True,
        "enable_moe_block": False,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 0,
        "layer_types": [*["sliding_attention"] * 5, "full_attention"] * (shape[2] // 6),
        "max_position_embeddings": 262_144,
        "num_experts": None,
        "num_kv_shared_layers": 0,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "full_attention": {
                "partial_rotary_factor": 0.25,
                "rope_theta": 1_000_000.0,
                "rope_type": "proportional",
            },
            "sliding_attention": {"rope_theta": 10_000.0, "rope_type": "default"},
        },
        "sliding_window": 1024,
        "tie_word_embeddings": True,
        "use_bidirectional_attention": "vision",
        "use_double_wide_mlp": False,
        "vocab_size": 262_144,
        **sizes(*shape, **others),
    }
    vision = {"model_type": f"{kind}_vision"}
    return {"model_type": kind, "text_config": text, "vision_config": vision}


# The models of datatrove's sweep of batch inference, except Qwen3-Next.
BENCHMARK: dict[str, tuple[dict[str, Any], float]] = {
    "SmolLM2-135M": (_SMOLLM2 | sizes(576, 1536, 30, 9, 3), 0.1345),
    "SmolLM2-360M": (_SMOLLM2 | sizes(960, 2560, 32, 15, 5), 0.3618),
    "SmolLM2-1.7B": (_SMOLLM2 | sizes(2048, 8192, 24, 32, 32), 1.711),
    "Qwen3-0.6B": (_QWEN3 | sizes(1024, 3072, 28, 16, tie_word_embeddings=True), 0.596),
    "Qwen3-1.7B": (_QWEN3 | sizes(2048, 6144, 28, 16, tie_word_embeddings=True), 1.72),
    "Qwen3-4B": (_QWEN3 | sizes(2560, 9728, 36, 32, tie_word_embeddings=True), 4.02),
    "Qwen3-8B": (_QWEN3 | sizes(4096, 12_288, 36, 32), 8.19),
    "Qwen3-14B": (_QWEN3 | sizes(5120, 17_408, 40, 40), 14.77),
    "Qwen3-32B": (_QWEN3 | sizes(5120, 25_600, 64, 64), 32.76),
    "Qwen3-30B-A3B": (
        _QWEN3
        | {"model_type": "qwen3_moe", "decoder_sparse_step": 1, "mlp_only_layers": []}
        | {"moe_intermediate_size": 768, "norm_topk_prob": True, "num_experts": 128}
        | {"num_experts_per_tok": 8, "output_router_logits": False, "router_aux_loss_coef": 0.001}
        | sizes(2048, 6144, 48, 32, 4),
        30.53,
    ),
    "gemma-3-270m": (_GEMMA3 | sizes(640, 2048, 18, 4, 1), 0.2681),
    "gemma-3-1b-it": (_GEMMA3 | sizes(1152, 6912, 26, 4, 1), 0.9999),
    "gemma-3-4b-it": (gemma3(2560, 10_240, 34, 8, 4), 3.88),
    "gemma-3-12b-it": (gemma3(3840, 15_360, 48, 16, 8), 11.77),
    "gemma-3-27b-it": (
        gemma3(5376, 21_504, 62, 32, 16, head_dim=128, query_pre_attn_scalar=168),
        27.01,
    ),
    "gpt-oss-20b": (_GPT_OSS | sizes(2880, 2880, 24, 64, 8, num_local_experts=32), 20.91),
    "gpt-oss-120b": (_GPT_OSS | sizes(2880, 2880, 36, 64, 8, num_local_experts=128), 116.83),
}
OTHERS: dict[str, tuple[dict[str, Any], float]] = {
    "Llama-3.1-8B-Instruct": (_LLAMA3 | sizes(4096, 14_336, 32, 32, 8), 8.03),
    "Llama-3.2-1B-Instruct": (
        _LLAMA3
        | {"rope_scaling": _LLAMA3["rope_scaling"] | {"factor": 32.0}, "head_dim": 64}
        | sizes(2048, 8192, 16, 32, 8, tie_word_embeddings=True),
        1.236,
    ),
    "Mistral-7B-Instruct-v0.3": (
        {
            "model_type": "mistral",
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "max_position_embeddings": 32_768,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "vocab_size": 32_768,
        }
        | sizes(4096, 14_336, 32, 32, 8),
        7.248,
    ),
    "Phi-4-mini-instruct": (
        {
            "model_type": "phi3",
            "attention_bias": False,
            "hidden_act": "silu",
            "max_position_embeddings": 131_072,
            "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 0.75,
            "rms_norm_eps": 1e-5,
            "rope_scaling": {
                "long_factor": [1.0] * 48,
                "short_factor": [1.0] * 48,
                "type": "longrope",
            },
            "rope_theta": 10_000.0,
            "sliding_window": 262_144,
            "tie_word_embeddings": True,
            "vocab_size": 200_064,
        }
        | sizes(3072, 8192, 32, 24, 8),
        3.836,
    ),
    "Qwen2.5-1.5B-Instruct": (
        _QWEN2 | sizes(1536, 8960, 28, 12, 2, tie_word_embeddings=True, vocab_size=151_936),
        1.544,
    ),
    "Qwen2.5-7B-Instruct": (_QWEN2 | sizes(3584, 18_944, 28, 28, 4), 7.616),
    "Qwen2.5-VL-7B-Instruct": (
        _QWEN2
        | {
            "model_type": "qwen2_5_vl",
            "image_token_id": 151_655,
            "max_position_embeddings": 128_000,
            "rope_scaling": {"mrope_section": [16, 24, 24], "type": "mrope"},
            "sliding_window": 32_768,
            "vision_config": {"hidden_size": 1280, "out_hidden_size": 3584},
        }
        | sizes(3584, 18_944, 28, 28, 4),
        7.616,
    ),
    "Qwen3-VL-2B-Instruct": (
        {
            "model_type": "qwen3_vl",
            "image_token_id": 151_655,
            "text_config": {
                "model_type": "qwen3_vl_text",
                "attention_bias": False,
                "head_dim": 128,
                "hidden_act": "silu",
                "max_position_embeddings": 262_144,
                "rms_norm_eps": 1e-6,
                "rope_scaling": {
                    "mrope_interleaved": True,
                    "mrope_section": [24, 20, 20],
                    "rope_type": "default",
                },
                "rope_theta": 5_000_000,
                "tie_word_embeddings": True,
                "vocab_size": 151_936,
                **sizes(2048, 6144, 28, 16, 8),
            },
            "tie_word_embeddings": True,
            "vision_config": {"hidden_size": 1024, "model_type": "qwen3_vl"},
        },
        1.72,
    ),
    "gemma-4-12B-it": (
        gemma4("gemma4_unified", 3840, 15_360, 48, 16, 8, num_global_key_value_heads=1),
        11.9,
    ),
    "gemma-4-26B-A4B-it": (
        gemma4(
            *("gemma4", 2816, 2112, 30, 16, 8),
            enable_moe_block=True,
            moe_intermediate_size=704,
            num_experts=128,
            num_global_key_value_heads=2,
            top_k_experts=8,
        ),
        25.2,
    ),
    "gemma-4-31B-it": (
        gemma4("gemma4", 5376, 21_504, 60, 32, 16, num_global_key_value_heads=4),
        30.7,
    ),
    "GLM-4.5-Air": (
        sizes(4096, 10_944, 46, 96, 8)
        | {
            "model_type": "glm4_moe",
            "attention_bias": True,
            "eos_token_id": [151_329, 151_336, 151_338],
            "first_k_dense_replace": 1,
            "head_dim": 128,
            "hidden_act": "silu",
            "max_position_embeddings": 131_072,
            "moe_intermediate_size": 1408,
            "n_group": 1,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_experts_per_tok": 8,
            "num_nextn_predict_layers": 1,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-5,
            "rope_scaling": None,
            "rope_theta": 1_000_000,
            "routed_scaling_factor": 1.0,
            "tie_word_embeddings": False,
            "topk_group": 1,
            "use_qk_norm": False,
            "vocab_size": 151_552,
        },
        106.85,
    ),
    "GLM-4.1V-9B-Thinking": (
        {
            "model_type": "glm4v",
            "image_token_id": 151_343,
            "text_config": sizes(4096, 13_696, 40, 32, 2)
            | {
                "model_type": "glm4v_text",
                "attention_bias": True,
                "hidden_act": "silu",
                "max_position_embeddings": 65_536,
                "partial_rotary_factor": 0.5,
                "rms_norm_eps": 1e-5,
                "rope_scaling": {"mrope_section": [8, 12, 12], "rope_type": "default"},
                "rope_theta": 10_000.0,
                "vocab_size": 151_552,
            },
            "tie_word_embeddings": False,
            "vision_config": {"model_type": "glm4v"},
        },
        9.4,
    ),
    "PaddleOCR-VL-0.9B": (
        sizes(1024, 3072, 18, 16, 2)
        | {
            "model_type": "paddleocr_vl",
            "compression_ratio": 1.0,
            "head_dim": 128,
            "hidden_act": "silu",
            "ignored_index": -100,
            "image_token_id": 100_295,
            "max_position_embeddings": 131_072,
            "max_sequence_length": None,
            "rms_norm_eps": 1e-5,
            "rope_is_neox_style": True,
            "rope_scaling": {
                "mrope_section": [16, 24, 24],
                "rope_type": "default",
                "type": "default",
            },
            "rope_theta": 500_000,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "use_3d_rope": True,
            "use_bias": False,
            "use_flash_attention": False,
            "video_token_id": 101_307,
            "vision_config": {"model_type": "paddleocr_vl"},
            "vision_end_token_id": 101_306,
            "vision_start_token_id": 101_305,
            "vocab_size": 103_424,
            "weight_share_add_bias": True,
        },
        0.4666,
    ),
    "GLM-4-9B-0414": (
        sizes(4096, 13_696, 40, 32, 2)
        | {
            "model_type": "glm4",
            "attention_bias": True,
            "head_dim": 128,
            "hidden_act": "silu",
            "max_position_embeddings": 32_768,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10_000.0,
            "tie_word_embeddings": False,
            "vocab_size": 151_552,
        },
        9.4,
    ),
    "MiniMax-M2": (
        sizes(3072, 1536, 62, 48, 8)
        | {
            "model_type": "minimax_m2",
            "attention_bias": False,
            "attn_type_list": [1] * 62,
            "head_dim": 128,
            "hidden_act": "silu",
            "max_position_embeddings": 196_608,
            "mtp_transformer_layers": 1,
            "num_experts_per_tok": 8,
            "num_local_experts": 256,
            "num_mtp_modules": 3,
            "output_router_logits": False,
            "qk_norm_type": "per_layer",
            "quantization_config": {
                "activation_scheme": "dynamic",
                "fmt": "float8_e4m3fn",
                "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
                "quant_method": "fp8",
                "weight_block_size": [128, 128],
            },
            "rms_norm_eps": 1e-6,
            "rope_theta": 5_000_000,
            "rotary_dim": 64,
            "router_jitter_noise": 0.0,
            "scoring_func": "sigmoid",
            "shared_intermediate_size": 0,
            "tie_word_embeddings": False,
            "use_mtp": True,
            "use_qk_norm": True,
            "use_routing_bias": True,
            "vocab_size": 200_064,
        },
        228.7,
    ),
    "InternVL3-8B-hf": (
        {
            "model_type": "internvl",
            "text_config": sizes(3584, 18_944, 28, 28, 4)
            | {
                "model_type": "qwen2",
                "max_position_embeddings": 32_768,
                "max_window_layers": 70,
                "rms_norm_eps": 1e-6,
                "rope_theta": 1_000_000.0,
                "sliding_window": None,
                "use_sliding_window": False,
                "vocab_size": 151_674,
            },
            "vision_config": {"model_type": "internvl_vision"},
        },
        7.61,
    ),
    "Mistral-Small-3.1-24B": (
        {
            "model_type": "mistral3",
            "text_config": sizes(5120, 32_768, 40, 32, 8)
            | {
                "model_type": "mistral",
                "head_dim": 128,
                "hidden_act": "silu",
                "max_position_embeddings": 131_072,
                "rms_norm_eps": 1e-5,
                "rope_theta": 1_000_000_000.0,
                "sliding_window": None,
                "vocab_size": 131_072,
            },
            "vision_config": {"model_type": "pixtral"},
        },
        23.57,
    ),
    "OLMo-2-1124-7B": (
        _OLMO
        | sizes(4096, 11_008, 32, 32, 32)
        | {"model_type": "olmo2", "max_position_embeddings": 4096, "vocab_size": 100_352},
        7.3,
    ),
    "Olmo-3-7B": (
        _OLMO
        | sizes(4096, 11_008, 32, 32, 32)
        | {
            "model_type": "olmo3",
            "layer_types": ([*["sliding_attention"] * 3, "full_attention"]) * 8,
            "max_position_embeddings": 65_536,
            "rope_scaling": {
                "attention_factor": 1.2079441541679836,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "yarn",
            },
            "sliding_window": 4096,
            "vocab_size": 100_278,
        },
        7.3,
    ),
    "SmolLM3-3B": (
        sizes(2048, 11_008, 36, 16, 4)
        | {
            "model_type": "smollm3",
            "attention_bias": False,
            "hidden_act": "silu",
            "layer_types": ["full_attention"] * 36,
            "max_position_embeddings": 65_536,
            "max_window_layers": 28,
            "mlp_bias": False,
            "no_rope_layer_interval": 4,
            "no_rope_layers": [1, 1, 1, 0] * 9,
            "rms_norm_eps": 1e-6,
            "rope_scaling": None,
            "rope_theta": 5_000_000.0,
            "sliding_window": None,
            "use_sliding_window": False,
            "vocab_size": 128_256,
        },
        3.08,
    ),
    "granite-3.3-8b-instruct": (
        sizes(4096, 12_800, 40, 32, 8)
        | {
            "model_type": "granite",
            "attention_bias": False,
            "attention_multiplier": 0.0078125,
            "embedding_multiplier": 12.0,
            "hidden_act": "silu",
            "logits_scaling": 16.0,
            "max_position_embeddings": 131_072,
            "mlp_bias": False,
            "residual_multiplier": 0.22,
            "rms_norm_eps": 1e-5,
            "rope_scaling": None,
            "rope_theta": 10_000_000.0,
            "tie_word_embeddings": True,
            "vocab_size": 49_159,
        },
        8.17,
    ),
    "EXAONE-4.0-32B": (
        sizes(5120, 27_392, 64, 40, 8)
        | {
            "model_type": "exaone4",
            "attn_implementation": "flash_attention_2",
            "head_dim": 128,
            "hidden_act": "silu",
            "layer_types": ([*["sliding_attention"] * 3, "full_attention"]) * 16,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "rope_scaling": {
                "factor": 16.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "rope_theta": 1_000_000,
            "sliding_window": 4096,
            "sliding_window_pattern": "LLLG",
            "tie_word_embeddings": False,
            "vocab_size": 102_400,
        },
        32.0,
    ),
    "ERNIE-4.5-21B-A3B": (
        sizes(2560, 12_288, 28, 20, 4)
        | {
            "model_type": "ernie4_5_moe",
            "head_dim": 128,
            "hidden_act": "silu",
            "max_position_embeddings": 131_072,
            "moe_capacity": [64, 64, 64],
            "moe_gate": "topk",
            "moe_intermediate_size": 1536,
            "moe_k": 6,
            "moe_layer_end_index": 27,
            "moe_layer_interval": 1,
            "moe_layer_start_index": 1,
            "moe_num_experts": 64,
            "moe_num_shared_experts": 2,
            "moe_use_aux_free": True,
            "num_nextn_predict_layers": 1,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "tie_word_embeddings": True,
            "use_bias": False,
            "vocab_size": 103_424,
        },
        21.83,
    ),
    "Hunyuan-7B-Instruct": (
        sizes(4096, 14_336, 32, 32, 8)
        | {
            "model_type": "hunyuan_v1_dense",
            "attention_bias": False,
            "attention_head_dim": 128,
            "cla_share_factor": 2,
            "eod_token_id": 127_967,
            "head_dim": 128,
            "hidden_act": "silu",
            "max_position_embeddings": 262_144,
            "mlp_bias": False,
            "norm_type": "rms",
            "org_vocab_size": 128_167,
            "pad_id": 127_961,
            "rms_norm_eps": 1e-5,
            "rope_scaling": {
                "alpha": 1000.0,
                "beta_fast": 32,
                "beta_slow": 1,
                "factor": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 0.0,
                "type": "dynamic",
            },
            "rope_theta": 10_000.0,
            "tie_word_embeddings": True,
            "use_cla": False,
            "use_qk_norm": True,
            "vocab_size": 128_167,
        },
        7.5,
    ),
    "c4ai-command-r7b-12-2024": (
        sizes(4096, 14_336, 32, 32, 8)
        | {
            "model_type": "cohere2",
            "attention_bias": False,
            "cache_implementation": "hybrid",
            "head_dim": 128,
            "hidden_act": "silu",
            "layer_norm_eps": 1e-5,
            "layer_switch": 4,
            "logit_scale": 0.25,
            "max_position_embeddings": 132_096,
            "order_of_interleaved_layers": "local_attn_first",
            "position_embedding_type": "rope_gptj",
            "rope_scaling": None,
            "rope_theta": 50_000,
            "rotary_pct": 1.0,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "use_embedding_sharing": True,
            "use_gated_activation": True,
            "use_parallel_block": True,
            "use_parallel_embedding": False,
            "vocab_size": 256_000,
        },
        8.03,
    ),
    "falcon-40b": (
        {
            "model_type": "falcon",
            "alibi": False,
            "apply_residual_connection_post_layernorm": False,
            "bias": False,
            "hidden_size": 8192,
            "layer_norm_epsilon": 1e-5,
            "new_decoder_architecture": True,
            "num_attention_heads": 128,
            "num_hidden_layers": 60,
            "num_kv_heads": 8,
            "parallel_attn": True,
            "vocab_size": 65_024,
        },
        41.3,
    ),
    "gpt2": (
        {
            "model_type": "gpt2",
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "n_ctx": 1024,
            "n_embd": 768,
            "n_head": 12,
            "n_layer": 12,
            "n_positions": 1024,
            "summary_activation": None,
            "summary_first_dropout": 0.1,
            "summary_proj_to_labels": True,
            "summary_type": "cls_index",
            "summary_use_proj": True,
            "vocab_size": 50_257,
        },
        0.1244,
    ),
    "pythia-410m": (
        sizes(1024, 4096, 24, 16)
        | {
            "model_type": "gpt_neox",
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-5,
            "max_position_embeddings": 2048,
            "rotary_emb_base": 10_000,
            "rotary_pct": 0.25,
            "tie_word_embeddings": False,
            "use_parallel_residual": True,
            "vocab_size": 50_304,
        },
        0.4053,
    ),
    "opt-1.3b": (
        {
            "model_type": "opt",
            "_remove_final_layer_norm": False,
            "activation_function": "relu",
            "do_layer_norm_before": True,
            "ffn_dim": 8192,
            "hidden_size": 2048,
            "init_std": 0.02,
            "layerdrop": 0.0,
            "max_position_embeddings": 2048,
            "num_attention_heads": 32,
            "num_hidden_layers": 24,
            "vocab_size": 50_272,
            "word_embed_proj_dim": 2048,
        },
        1.316,
    ),
    "OLMoE-1B-7B-0924": (
        sizes(2048, 1024, 16, 16, 16)
        | {
            "model_type": "olmoe",
            "attention_bias": False,
            "clip_qkv": None,
            "hidden_act": "silu",
            "max_position_embeddings": 4096,
            "norm_topk_prob": False,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "rms_norm_eps": 1e-5,
            "rope_scaling": None,
            "rope_theta": 10_000.0,
            "tie_word_embeddings": False,
            "vocab_size": 50_304,
        },
        6.92,
    ),
    "phi-2": (
        sizes(2560, 10_240, 32, 32, 32)
        | {
            "model_type": "phi",
            "hidden_act": "gelu_new",
            "layer_norm_eps": 1e-5,
            "max_position_embeddings": 2048,
            "partial_rotary_factor": 0.4,
            "qk_layernorm": False,
            "rope_scaling": None,
            "rope_theta": 10_000.0,
            "tie_word_embeddings": False,
            "vocab_size": 51_200,
        },
        2.78,
    ),
}

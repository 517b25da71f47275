"""Configs of published models of smaller families, with billions of weights as in `published`.

Public copies were at hand of Devstral 2, StarCoder2 15B, Qwen1.5-MoE, Apertus 8B, Seed-OSS, Olmo
3.1, MiMo-V2-Flash, Trinity, North and GLM-OCR, and of sizes of AFM-4.5B, ERNIE 4.5, GLM-4.6, Hy3
and Command A+. The others, and what these copies leave out, are from memory; all come to the sizes
that the models are known by.
"""

from __future__ import annotations

from typing import Any

from tests.engine.model.published import sizes

_MINISTRAL3: dict[str, Any] = {
    "model_type": "ministral3",
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "vocab_size": 131_072,
}
_MINISTRAL3_ROPE: dict[str, Any] = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 16.0,
    "llama_4_scaling_beta": 0.1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 16_384,
    "rope_theta": 1_000_000.0,
    "rope_type": "yarn",
    "type": "yarn",
}
_COHERE: dict[str, Any] = {
    "attention_bias": False,
    "hidden_act": "silu",
    "layer_norm_eps": 1e-5,
    "vocab_size": 256_000,
}
_STARCODER2: dict[str, Any] = {
    "model_type": "starcoder2",
    "activation_function": "gelu",
    "attention_softmax_in_fp32": True,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 16_384,
    "mlp_type": "default",
    "norm_epsilon": 1e-5,
    "norm_type": "layer_norm",
    "scale_attention_softmax_in_fp32": True,
    "scale_attn_weights": True,
    "sliding_window": 4096,
    "use_bias": True,
    "vocab_size": 49_152,
}
_PHIMOE: dict[str, Any] = {
    "model_type": "phimoe",
    "attention_bias": True,
    "expert_dropout": 0.0,
    "hidden_act": "silu",
    "input_jitter_noise": 0.01,
    "lm_head_bias": True,
    "num_experts_per_tok": 2,
    "num_local_experts": 16,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "router_jitter_noise": 0.01,
    "tie_word_embeddings": False,
    "vocab_size": 32_064,
}
_APERTUS: dict[str, Any] = {
    "model_type": "apertus",
    "attention_bias": False,
    "hidden_act": "xielu",
    "hidden_dropout": 0.0,
    "max_position_embeddings": 65_536,
    "mlp_bias": False,
    "post_norm": False,
    "qk_norm": True,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 12_000_000,
    "tie_word_embeddings": False,
    "vocab_size": 131_072,
}
_EXAONE4: dict[str, Any] = {
    "model_type": "exaone4",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "factor": 16.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 1_000_000,
    "vocab_size": 102_400,
}
_K_EXAONE: dict[str, Any] = {
    "model_type": "exaone_moe",
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 262_144,
    "moe_intermediate_size": 2048,
    "n_group": 1,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000,
    "routed_scaling_factor": 2.5,
    "sliding_window": 128,
    "sliding_window_pattern": "LLLG",
    "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 12,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "vocab_size": 153_600,
}
_SOLAR_OPEN: dict[str, Any] = {
    "model_type": "solar_open",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131_072,
    "moe_intermediate_size": 1280,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 65_536},
    "rope_theta": 1_000_000,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "vocab_size": 196_608,
}
_TRINITY: dict[str, Any] = {
    "model_type": "afmoe",
    "global_attn_every_n_layers": 4,
    "head_dim": 128,
    "hidden_act": "silu",
    "load_balance_coeff": 0.001,
    "max_position_embeddings": 131_072,
    "mup_enabled": True,
    "n_group": 1,
    "num_dense_layers": 2,
    "num_expert_groups": 1,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_limited_groups": 1,
    "num_shared_experts": 1,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 10_000,
    "route_norm": True,
    "route_scale": 2.826,
    "score_func": "sigmoid",
    "sliding_window": 2048,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_grouped_mm": True,
    "vocab_size": 200_192,
}
_HY3: dict[str, Any] = {
    "model_type": "hy_v3",
    "enable_attention_fp32_softmax": False,
    "enable_lm_head_fp32": True,
    "enable_moe_fp32_combine": False,
    "eod_token_id": 120_026,
    "expert_hidden_dim": 1536,
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 262_144,
    "moe_intermediate_size": 1536,
    "moe_router_enable_expert_bias": True,
    "moe_router_use_sigmoid": True,
    "num_experts": 192,
    "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 1,
    "num_shared_experts": 1,
    "qk_norm": True,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 11_158_840.0, "rope_type": "default"},
    "route_norm": True,
    "router_scaling_factor": 2.826,
    "tie_word_embeddings": False,
    "use_grouped_mm": False,
    "vocab_size": 120_832,
}
_COHERE2_MOE: dict[str, Any] = {
    "model_type": "cohere2_moe",
    "attention_bias": False,
    "expert_selection_fn": "sigmoid",
    "head_dim": 128,
    "hidden_act": "silu",
    "layer_norm_eps": 1e-5,
    "logit_scale": 1.0,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "position_embedding_type": "rope_gptj",
    "rope_theta": 50_000,
    "rotary_pct": 1.0,
    "shared_expert_combination_strategy": "average",
    "sliding_window": 4096,
    "use_embedding_sharing": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_qk_norm": False,
    "vocab_size": 262_144,
}
_NEMOTRON: dict[str, Any] = {
    "model_type": "nemotron",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "relu2",
    "kv_channels": 128,
    "max_position_embeddings": 4096,
    "mlp_bias": False,
    "norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
    "rope_theta": 10_000,
    "tie_word_embeddings": False,
    "vocab_size": 256_000,
}
_ERNIE: dict[str, Any] = {
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "use_bias": False,
    "vocab_size": 103_424,
}


def ministral3(
    *shape: int, theta: float = 1_000_000.0, tie_word_embeddings: bool = False
) -> dict[str, Any]:
    """Return a multimodal Ministral 3, whose text config is nested."""
    rope = {"rope_parameters": _MINISTRAL3_ROPE | {"rope_theta": theta}}
    text = _MINISTRAL3 | sizes(*shape) | rope
    return {
        "model_type": "mistral3",
        "image_token_index": 10,
        "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu",
        "spatial_merge_size": 2,
        "text_config": text | {"tie_word_embeddings": tie_word_embeddings},
        "tie_word_embeddings": tie_word_embeddings,
        "vision_config": {"model_type": "pixtral"},
    }


def _longrope(num_factors: int) -> dict[str, Any]:
    """Return a rope like Phi-3.5-MoE's, with other factors."""
    return {
        "long_factor": [1.0 + index for index in range(num_factors)],
        "long_mscale": 1.243163121016122,
        "original_max_position_embeddings": 4096,
        "short_factor": [1.0 + index / 64 for index in range(num_factors)],
        "short_mscale": 1.243163121016122,
        "type": "longrope",
    }


BY_FAMILY: dict[str, tuple[dict[str, Any], float]] = {
    "Trinity-Nano": (
        _TRINITY | sizes(1024, 3072, 56, 8, 2) | {"moe_intermediate_size": 256},
        6.12,
    ),
    "Trinity-Mini": (
        _TRINITY | sizes(2048, 6144, 32, 32, 4) | {"moe_intermediate_size": 1024},
        26.1,
    ),
    "Trinity-Large": (
        _TRINITY
        | sizes(3072, 12_288, 60, 48, 8)
        | {
            "moe_intermediate_size": 3072,
            "num_dense_layers": 6,
            "num_experts": 256,
            "num_experts_per_tok": 4,
            "sliding_window": 4096,
        },
        398.6,
    ),
    "Hy3-preview": (_HY3 | sizes(4096, 13_312, 80, 64, 8), 295.0),
    "command-a-plus-05-2026": (
        _COHERE2_MOE
        | sizes(4096, 4096, 32, 128, 8)
        | {
            "first_k_dense_replace": 0,
            "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 8,
            "max_position_embeddings": 131_072,
            "norm_topk_prob": True,
            "num_shared_experts": 4,
        },
        218.0,
    ),
    "North-Mini-Code-1.0": (
        _COHERE2_MOE
        | sizes(2048, 768, 49, 32, 4)
        | {
            "first_k_dense_replace": 1,
            "layer_types": ["full_attention", *["sliding_attention"] * 3] * 12 + ["full_attention"],
            "max_position_embeddings": 500_000,
            "norm_topk_prob": False,
            "num_shared_experts": 0,
            "prefix_dense_intermediate_size": 3072,
            "prefix_dense_sliding_window_pattern": 1,
            "rms_norm_eps": 1e-6,
        },
        30.5,
    ),
    "K-EXAONE-236B-A23B": (_K_EXAONE | sizes(6144, 18_432, 48, 64, 8), 236.5),
    "Solar-Open-100B": (_SOLAR_OPEN | sizes(4096, 10_240, 48, 64, 8), 102.6),
    "Ministral-3-3B": (ministral3(3072, 9216, 26, 32, 8, tie_word_embeddings=True), 3.43),
    "Ministral-3-8B": (ministral3(4096, 14_336, 34, 32, 8), 8.49),
    "Ministral-3-14B": (ministral3(5120, 16_384, 40, 32, 8, theta=1e9), 13.5),
    "Devstral-2-123B": (
        _MINISTRAL3
        | sizes(12_288, 28_672, 88, 96, 8)
        | {
            "quantization_config": {
                "activation_scheme": "static",
                "dequantize": False,
                "modules_to_not_convert": ["model.vision_tower", "lm_head"],
                "quant_method": "fp8",
                "weight_block_size": None,
            },
            "rope_parameters": _MINISTRAL3_ROPE
            | {"beta_fast": 4.0, "factor": 64.0, "llama_4_scaling_beta": 0.0}
            | {"mscale_all_dim": 0.0, "original_max_position_embeddings": 4096},
            "tie_word_embeddings": False,
        },
        125.0,
    ),
    "c4ai-command-r-v01": (
        _COHERE
        | sizes(8192, 22_528, 40, 64, 64)
        | {
            "model_type": "cohere",
            "logit_scale": 0.0625,
            "max_position_embeddings": 8192,
            "model_max_length": 131_072,
            "rope_theta": 8_000_000.0,
        },
        34.98,
    ),
    "c4ai-command-r-08-2024": (
        _COHERE
        | sizes(8192, 24_576, 40, 64, 8)
        | {
            "model_type": "cohere",
            "logit_scale": 0.0625,
            "max_position_embeddings": 131_072,
            "rope_theta": 4_000_000,
            "use_qk_norm": False,
        },
        32.3,
    ),
    "c4ai-command-a-03-2025": (
        _COHERE
        | sizes(12_288, 36_864, 64, 96, 8)
        | {
            "model_type": "cohere2",
            "head_dim": 128,
            "layer_switch": 4,
            "logit_scale": 0.25,
            "max_position_embeddings": 131_072,
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
            "use_parallel_embedding": True,
        },
        111.06,
    ),
    "starcoder2-3b": (
        _STARCODER2 | sizes(3072, 12_288, 30, 24, 2, rope_theta=999_999.4420358813),
        3.03,
    ),
    "starcoder2-7b": (_STARCODER2 | sizes(4608, 18_432, 32, 36, 4, rope_theta=1_000_000), 7.17),
    "starcoder2-15b": (
        _STARCODER2
        | sizes(6144, 24_576, 40, 48, 4, rope_theta=100_000)
        | {"rms_norm_eps": 1e-5, "tie_word_embeddings": False},
        15.96,
    ),
    "dots.llm1.inst": (
        sizes(4096, 10_944, 62, 32, 32)
        | {
            "model_type": "dots1",
            "attention_bias": False,
            "first_k_dense_replace": 1,
            "hidden_act": "silu",
            "max_position_embeddings": 32_768,
            "max_window_layers": 62,
            "moe_intermediate_size": 1408,
            "moe_layer_freq": 1,
            "n_routed_experts": 128,
            "n_shared_experts": 2,
            "norm_topk_prob": True,
            "num_experts_per_tok": 6,
            "rms_norm_eps": 1e-5,
            "rope_scaling": None,
            "rope_theta": 10_000_000,
            "routed_scaling_factor": 2.5,
            "scoring_func": "noaux_tc",
            "sliding_window": None,
            "tie_word_embeddings": False,
            "vocab_size": 152_064,
        },
        142.8,
    ),
    "Phi-3.5-MoE": (
        _PHIMOE
        | sizes(4096, 6400, 32, 32, 8)
        | {
            "max_position_embeddings": 131_072,
            "rope_scaling": _longrope(64),
            "sliding_window": 131_072,
        },
        41.87,
    ),
    "Phi-mini-MoE": (
        _PHIMOE
        | sizes(4096, 960, 32, 32, 8)
        | {
            "expert_intermediate_size": 960,
            "head_dim": 128,
            "max_position_embeddings": 4096,
            "rope_scaling": None,
            "sliding_window": 2047,
        },
        7.65,
    ),
    "Phi-tiny-MoE": (
        _PHIMOE
        | sizes(4096, 448, 32, 16, 4)
        | {
            "expert_intermediate_size": 448,
            "head_dim": 128,
            "max_position_embeddings": 4096,
            "rope_scaling": None,
            "sliding_window": 2047,
        },
        3.76,
    ),
    "Qwen1.5-MoE-A2.7B": (
        sizes(2048, 5632, 24, 16, 16)
        | {
            "model_type": "qwen2_moe",
            "decoder_sparse_step": 1,
            "hidden_act": "silu",
            "max_position_embeddings": 8192,
            "max_window_layers": 21,
            "moe_intermediate_size": 1408,
            "norm_topk_prob": False,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "output_router_logits": False,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1_000_000.0,
            "router_aux_loss_coef": 0.001,
            "shared_expert_intermediate_size": 5632,
            "sliding_window": 32_768,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
            "vocab_size": 151_936,
        },
        14.32,
    ),
    "Apertus-8B": (_APERTUS | sizes(4096, 21_504, 32, 32, 8), 8.05),
    "Apertus-70B": (_APERTUS | sizes(8192, 43_008, 80, 64, 8), 70.6),
    "AFM-4.5B": (
        sizes(2560, 18_432, 36, 20, 4)
        | {
            "model_type": "arcee",
            "attention_bias": False,
            "head_dim": 128,
            "hidden_act": "relu2",
            "max_position_embeddings": 65_536,
            "mlp_bias": False,
            "rms_norm_eps": 1e-5,
            "rope_scaling": {
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 20.0,
                "mscale": 1.0,
                "original_max_position_embeddings": 4096,
                "rope_type": "yarn",
                "type": "yarn",
            },
            "rope_theta": 10_000.0,
            "tie_word_embeddings": False,
            "vocab_size": 128_004,
        },
        4.62,
    ),
    "MiMo-V2-Flash": (
        sizes(4096, 16_384, 48, 64, 4)
        | {
            "model_type": "mimo_v2_flash",
            "add_full_attention_sink_bias": False,
            "add_swa_attention_sink_bias": True,
            "attention_bias": False,
            "attention_chunk_size": 128,
            "attention_value_scale": 0.707,
            "head_dim": 192,
            "hidden_act": "silu",
            "hybrid_block_size": None,
            "hybrid_layer_pattern": [0, *[1] * 4, *[0, 1, 1, 1, 1, 1] * 7, 0],
            "layernorm_epsilon": 1e-5,
            "max_position_embeddings": 262_144,
            "moe_intermediate_size": 2048,
            "moe_layer_freq": [0, *[1] * 47],
            "n_group": 1,
            "n_routed_experts": 256,
            "n_shared_experts": None,
            "norm_topk_prob": True,
            "num_experts_per_tok": 8,
            "num_nextn_predict_layers": 3,
            "partial_rotary_factor": 0.334,
            "quantization_config": {
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
                "ignored_layers": [f"model.layers.{layer}.self_attn.o_proj" for layer in range(48)],
                "quant_method": "fp8",
                "weight_block_size": [128, 128],
            },
            "rope_theta": 5_000_000,
            "routed_scaling_factor": None,
            "scoring_func": "sigmoid",
            "sliding_window": 128,
            "sliding_window_size": 128,
            "swa_head_dim": 192,
            "swa_num_attention_heads": 64,
            "swa_num_key_value_heads": 8,
            "swa_rope_theta": 10_000,
            "swa_v_head_dim": 128,
            "tie_word_embeddings": False,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "v_head_dim": 128,
            "vocab_size": 152_576,
        },
        308.8,
    ),
    "stablelm-2-1_6b": (
        sizes(2048, 5632, 24, 32, 32)
        | {
            "model_type": "stablelm",
            "hidden_act": "silu",
            "layer_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "partial_rotary_factor": 0.25,
            "rope_theta": 10_000,
            "tie_word_embeddings": False,
            "use_qkv_bias": True,
            "vocab_size": 100_352,
        },
        1.644,
    ),
    "Nemotron-Mini-4B": (_NEMOTRON | sizes(3072, 9216, 32, 24, 8), 4.19),
    "Minitron-8B": (_NEMOTRON | sizes(4096, 16_384, 32, 48, 8), 8.27),
    "Hunyuan-A13B": (
        sizes(4096, 3072, 32, 32, 8)
        | {
            "model_type": "hunyuan_v1_moe",
            "add_classification_head": False,
            "attention_bias": False,
            "attention_head_dim": 128,
            "cla_share_factor": 2,
            "class_num": 0,
            "dense_list": [4096, 0],
            "eod_token_id": 127_967,
            "group_limited_greedy": False,
            "hidden_act": "silu",
            "im_end_id": 6,
            "im_newline_id": 12,
            "im_start_id": 5,
            "kv_lora_rank": None,
            "mask_init_id": 13,
            "max_position_embeddings": 32_768,
            "mlp_bias": False,
            "moe_drop_tokens": False,
            "moe_intermediate_size": [3072] * 32,
            "moe_layer_num_skipped": 0,
            "moe_random_routing_dropped_token": False,
            "moe_topk": [8] * 32,
            "norm_topk_prob": True,
            "norm_type": "rms",
            "num_experts": 64,
            "num_media_embeds": 257,
            "num_shared_expert": [1] * 32,
            "org_vocab_size": 128_167,
            "pad_id": 127_961,
            "pool_type": "last",
            "position_embedding_xdrope": False,
            "rms_norm_eps": 1e-5,
            "rope_scaling": {
                "alpha": 1000.0,
                "beta_fast": 32,
                "beta_slow": 1,
                "factor": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "type": "dynamic",
            },
            "rope_theta": 10_000.0,
            "routed_scaling_factor": 1.0,
            "skip_cls_token": False,
            "text_end_id": 8,
            "text_start_id": 7,
            "tie_word_embeddings": True,
            "use_cla": False,
            "use_mixed_mlp_moe": True,
            "use_mla": False,
            "use_qk_norm": True,
            "use_rotary_pos_emb": True,
            "video_end_id": 11,
            "video_start_id": 10,
            "vocab_size": 128_167,
        },
        80.4,
    ),
    "Seed-OSS-36B": (
        sizes(5120, 27_648, 64, 80, 8)
        | {
            "model_type": "seed_oss",
            "attention_bias": True,
            "attention_out_bias": False,
            "head_dim": 128,
            "hidden_act": "silu",
            "max_position_embeddings": 524_288,
            "mlp_bias": False,
            "residual_dropout": 0.1,
            "rms_norm_eps": 1e-6,
            "rope_scaling": {"rope_type": "default"},
            "rope_theta": 10_000_000.0,
            "tie_word_embeddings": False,
            "vocab_size": 155_136,
        },
        36.15,
    ),
    "GLM-4.6": (
        sizes(5120, 12_288, 92, 96, 8)
        | {
            "model_type": "glm4_moe",
            "attention_bias": True,
            "eos_token_id": [151_329, 151_336, 151_338],
            "first_k_dense_replace": 3,
            "head_dim": 128,
            "hidden_act": "silu",
            "max_position_embeddings": 202_752,
            "moe_intermediate_size": 1536,
            "n_group": 1,
            "n_routed_experts": 160,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_experts_per_tok": 8,
            "num_nextn_predict_layers": 1,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-5,
            "rope_scaling": None,
            "rope_theta": 1_000_000,
            "routed_scaling_factor": 2.5,
            "tie_word_embeddings": False,
            "topk_group": 1,
            "use_qk_norm": True,
            "vocab_size": 151_552,
        },
        352.8,
    ),
    "EXAONE-4.0-1.2B": (
        _EXAONE4
        | sizes(2048, 4096, 30, 32, 8)
        | {
            "head_dim": 64,
            "layer_types": ["full_attention"] * 30,
            "max_position_embeddings": 65_536,
            "sliding_window": None,
            "sliding_window_pattern": None,
            "tie_word_embeddings": True,
        },
        1.28,
    ),
    "Olmo-3.1-32B": (
        sizes(5120, 27_648, 64, 40, 8)
        | {
            "model_type": "olmo3",
            "attention_bias": False,
            "hidden_act": "silu",
            "layer_types": ([*["sliding_attention"] * 3, "full_attention"]) * 16,
            "max_position_embeddings": 65_536,
            "rms_norm_eps": 1e-6,
            "rope_scaling": {
                "attention_factor": 1.2079441541679836,
                "beta_fast": 32,
                "beta_slow": 1,
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "yarn",
            },
            "rope_theta": 500_000,
            "sliding_window": 4096,
            "tie_word_embeddings": False,
            "vocab_size": 100_278,
        },
        32.23,
    ),
    "ERNIE-4.5-0.3B": (
        _ERNIE
        | sizes(1024, 3072, 18, 16, 2)
        | {"model_type": "ernie4_5", "rope_scaling": None, "tie_word_embeddings": True},
        0.3607,
    ),
    "ERNIE-4.5-300B-A47B": (
        _ERNIE
        | sizes(8192, 28_672, 54, 64, 8)
        | {
            "model_type": "ernie4_5_moe",
            "moe_capacity": [64, 64, 64],
            "moe_gate": "topk",
            "moe_intermediate_size": 3584,
            "moe_k": 8,
            "moe_layer_interval": 1,
            "moe_layer_start_index": 3,
            "moe_num_experts": 64,
            "moe_num_shared_experts": 0,
            "moe_use_aux_free": True,
            "num_nextn_predict_layers": 1,
            "tie_word_embeddings": False,
            "use_rmsnorm": True,
        },
        299.5,
    ),
    "GLM-4.5V": (
        {
            "model_type": "glm4v_moe",
            "image_token_id": 151_363,
            "text_config": sizes(4096, 10_944, 46, 96, 8)
            | {
                "model_type": "glm4v_moe_text",
                "attention_bias": True,
                "eos_token_id": [151_329, 151_336, 151_338],
                "first_k_dense_replace": 1,
                "head_dim": 128,
                "hidden_act": "silu",
                "max_position_embeddings": 65_536,
                "moe_intermediate_size": 1408,
                "n_group": 1,
                "n_routed_experts": 128,
                "n_shared_experts": 1,
                "norm_topk_prob": True,
                "num_experts_per_tok": 8,
                "partial_rotary_factor": 0.5,
                "rms_norm_eps": 1e-5,
                "rope_scaling": {"mrope_section": [8, 12, 12], "rope_type": "default"},
                "rope_theta": 10_000.0,
                "routed_scaling_factor": 1.0,
                "topk_group": 1,
                "use_qk_norm": False,
                "vocab_size": 151_552,
            },
            "tie_word_embeddings": False,
            "vision_config": {"model_type": "glm4v_moe_vision"},
        },
        106.85,
    ),
    "GLM-OCR": (
        {
            "model_type": "glm_ocr",
            "image_token_id": 59_280,
            "text_config": sizes(1536, 4608, 16, 16, 8)
            | {
                "model_type": "glm_ocr_text",
                "attention_bias": False,
                "eos_token_id": [59_246, 59_253],
                "head_dim": 128,
                "hidden_act": "silu",
                "max_position_embeddings": 131_072,
                "num_nextn_predict_layers": 1,
                "rms_norm_eps": 1e-5,
                "rope_parameters": {
                    "mrope_section": [16, 24, 24],
                    "partial_rotary_factor": 1.0,
                    "rope_theta": 10_000,
                    "rope_type": "default",
                },
                "tie_word_embeddings": False,
                "vocab_size": 59_392,
            },
            "tie_word_embeddings": False,
            "vision_config": {"model_type": "glm_ocr_vision"},
        },
        0.6733,
    ),
}

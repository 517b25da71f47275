"""Tiny random models of the supported families, in fp32, and their reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tidemill.engine.model.hf.text_classes import register_text_classes

VOCAB = 320
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": 2,
}
SIGMOID_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
}
LATENT: dict[str, Any] = {
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "num_key_value_heads": 4,
}
# With fewer heads, scores of 0 would be equal where a selection ends.
INDEXER: dict[str, Any] = {"index_n_heads": 16, "index_head_dim": 16, "index_topk": 8}
MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 12}
DELTANET: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "full_attention_interval": 2,
}
NEMOTRON: dict[str, Any] = {
    "layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba", "attention"],
    "num_hidden_layers": 6,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 12,
    "n_groups": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 80,
    "n_group": 2,
    "routed_scaling_factor": 1.5,
}
# Config class → fields that differ from COMMON. Windows are short so that 60 tokens slide.
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaConfig": {},
    "Qwen2Config": {},
    "Qwen3Config": {},
    "MistralConfig": {"sliding_window": 12},
    "GemmaConfig": {},
    "Gemma2Config": {
        "sliding_window": 12,
        "attn_logit_softcapping": 5.0,
        "query_pre_attn_scalar": 16,
    },
    "Gemma3TextConfig": {"sliding_window": 12, "query_pre_attn_scalar": 16},
    "Gemma4TextConfig": {
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "final_logit_softcapping": 20.0,
        "hidden_size_per_layer_input": 0,
    },
    "Phi3Config": {},
    "MixtralConfig": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3MoeConfig": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "GptOssConfig": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 12},
    "ApertusConfig": {},
    "ArceeConfig": {},
    "AfmoeConfig": {
        "sliding_window": 12,
        "moe_intermediate_size": 48,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "route_scale": 1.5,
        "mup_enabled": True,
    },
    "CohereConfig": {"logit_scale": 0.25},
    "Cohere2Config": {"logit_scale": 0.25, "sliding_window": 12},
    "Cohere2MoeConfig": {
        "logit_scale": 0.25,
        "sliding_window": 12,
        "num_experts": 4,
        "num_shared_experts": 2,
        "expert_selection_fn": "sigmoid",
        "first_k_dense_replace": 1,
        "prefix_dense_intermediate_size": 72,
    },
    "Dots1Config": SIGMOID_EXPERTS,
    "Ernie4_5Config": {},
    "Ernie4_5_MoeConfig": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 48,
    },
    "Exaone4Config": {"sliding_window": 12},
    "ExaoneMoeConfig": {
        "sliding_window": 12,
        "moe_intermediate_size": 48,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
    },
    "FalconConfig": {"num_kv_heads": 2, "new_decoder_architecture": True},
    "GlmConfig": {"attention_bias": True},
    "Glm4Config": {"attention_bias": True},
    "Glm4MoeConfig": SIGMOID_EXPERTS
    | {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5, "use_qk_norm": True},
    "GPT2Config": {"n_positions": 512},
    "GPTNeoXConfig": {},
    "GraniteConfig": {
        "embedding_multiplier": 6.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.4,
        "logits_scaling": 3.0,
    },
    "GraniteMoeConfig": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "HunYuanDenseV1Config": {},
    "HunYuanMoEV1Config": {"num_experts": 4, "moe_topk": 2},
    "HYV3Config": {"moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2},
    "MiMoV2FlashConfig": SIGMOID_EXPERTS
    | {"v_head_dim": 12, "num_key_value_heads": 1, "sliding_window": 12}
    | {"attention_value_scale": 0.7},
    "MiniMaxM2Config": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "MinistralConfig": {"sliding_window": 12},
    "Ministral3Config": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "llama_4_scaling_beta": 0.3,
        }
    },
    "NemotronConfig": {},
    "OlmoeConfig": {"num_experts": 4, "num_experts_per_tok": 2},
    "Olmo2Config": {},
    "Olmo3Config": {"sliding_window": 12},
    "OPTConfig": {"ffn_dim": 96},
    "PhimoeConfig": {"num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": True},
    "PhiConfig": {},
    "Qwen2MoeConfig": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 80,
    },
    "Qwen3NextConfig": DELTANET
    | {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 80,
    },
    "Qwen3_5TextConfig": DELTANET,
    "Qwen3_5MoeTextConfig": DELTANET
    | {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 80,
    },
    "Lfm2Config": {"layer_types": ["conv", "full_attention"] * 2},
    "Lfm2MoeConfig": {
        "layer_types": ["conv", "full_attention"] * 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "num_dense_layers": 1,
    },
    "Mamba2Config": {"num_heads": 8, "head_dim": 16, "state_size": 12, "n_groups": 2},
    "BambaConfig": MAMBA | {"attn_layer_indices": [1, 3], "mamba_n_groups": 2},
    "FalconH1Config": MAMBA
    | {
        "mamba_d_ssm": 128,
        "mamba_n_groups": 2,
        "mamba_rms_norm": True,
        "key_multiplier": 0.6,
        "attention_in_multiplier": 1.2,
        "attention_out_multiplier": 0.8,
        "ssm_multipliers": [0.7, 1.1, 0.9, 1.2, 0.8],
        "ssm_in_multiplier": 1.3,
        "ssm_out_multiplier": 0.6,
        "mlp_multipliers": [0.8, 0.7],
        "embedding_multiplier": 1.5,
        "lm_head_multiplier": 0.4,
    },
    "GraniteMoeHybridConfig": MAMBA
    | {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 80,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.4,
    },
    "NemotronHConfig": NEMOTRON,
    "DeepseekV2Config": SIGMOID_EXPERTS | LATENT | {"norm_topk_prob": False, "q_lora_rank": None},
    "DeepseekV3Config": SIGMOID_EXPERTS | LATENT | {"n_group": 2, "topk_group": 1},
    "Glm4MoeLiteConfig": SIGMOID_EXPERTS | LATENT,
    "Mistral4Config": {
        **(SIGMOID_EXPERTS | LATENT),
        "n_group": 2,
        "head_dim": 20,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "mscale": 1.0,
            "mscale_all_dim": 0.8,
            "llama_4_scaling_beta": 0.3,
        },
    },
    "Llama4TextConfig": {
        "attention_chunk_size": 16,
        "intermediate_size_mlp": 80,
        "num_local_experts": 4,
        "interleave_moe_layer_step": 2,
        "floor_scale": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    },
    "SeedOssConfig": {"attention_bias": True},
    "SmolLM3Config": {},
    "SolarOpenConfig": {
        "moe_intermediate_size": 48,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "attention_bias": True,
    },
    "StableLmConfig": {},
    "Starcoder2Config": {"sliding_window": 12},
    "DeepseekV32Config": SIGMOID_EXPERTS
    | LATENT
    | INDEXER
    | {"n_group": 2, "topk_group": 1, "index_topk": 32},
    "GlmMoeDsaConfig": SIGMOID_EXPERTS | LATENT | INDEXER | {"index_topk_freq": 2},
}


# Families whose transformers classes support no other attention.
RECURRENT = {
    *("BambaConfig", "FalconH1Config", "GraniteMoeHybridConfig", "Lfm2Config", "Lfm2MoeConfig"),
    *("Mamba2Config", "NemotronHConfig", "Qwen3NextConfig", "Qwen3_5MoeTextConfig"),
    "Qwen3_5TextConfig",
}
SPARSE = {"DeepseekV32Config", "GlmMoeDsaConfig"}
LATENTS = {"DeepseekV2Config", "DeepseekV3Config", "Glm4MoeLiteConfig", "Mistral4Config", *SPARSE}
ONLY_OURS = {
    *("FalconConfig", "Llama4TextConfig", "NemotronConfig", "StableLmConfig"),
    *RECURRENT,
    *SPARSE,
}
# Families whose transformers classes are also tested, like models without a native decoder.
BY_TRANSFORMERS = ("LlamaConfig", "Gemma2Config", "GptOssConfig", "MixtralConfig", "Olmo2Config")

ROPE: dict[str, Any] = {"rope_theta": 10_000.0}
# Variants of the families' models: name → config class and fields that differ from COMMON.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "Nemotron-H, latent experts": (
        "NemotronHConfig",
        NEMOTRON | {"moe_latent_size": 32, "mlp_bias": True},
    ),
    "North, RMS norms": (
        "Cohere2MoeConfig",
        {
            "sliding_window": 12,
            "num_experts": 4,
            "expert_selection_fn": "sigmoid",
            "norm_topk_prob": False,
            "rms_norm_eps": 1e-6,
        },
    ),
    "Llama, llama3 rope": (
        "LlamaConfig",
        {
            "rope_parameters": ROPE
            | {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "Llama, yarn rope": (
        "LlamaConfig",
        {
            "rope_parameters": ROPE
            | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
        },
    ),
    "Llama, linear rope": (
        "LlamaConfig",
        {"rope_parameters": ROPE | {"rope_type": "linear", "factor": 4.0}},
    ),
    "Llama, dynamic rope": (
        "LlamaConfig",
        {
            "rope_parameters": ROPE
            | {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 32}
        },
    ),
    "Llama, biased and tied": (
        "LlamaConfig",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "Llama, one wide key head": ("LlamaConfig", {"num_key_value_heads": 1, "head_dim": 24}),
    "Qwen2, some layers sliding": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 2},
    ),
    "Qwen3, biased": ("Qwen3Config", {"attention_bias": True}),
    "Gemma2, other scores": (
        "Gemma2Config",
        {"sliding_window": 12, "query_pre_attn_scalar": 60, "attn_logit_softcapping": None},
    ),
    "Gemma3, near and far": (
        "Gemma3TextConfig",
        {
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            "final_logit_softcapping": 20.0,
        },
    ),
    "Gemma4, MoE next to an MLP": (
        "Gemma4TextConfig",
        {
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 48,
        },
    ),
    "Phi3, half turned": ("Phi3Config", {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}),
    "Phi3, long rope": (
        "Phi3Config",
        {
            "original_max_position_embeddings": 256,
            "sliding_window": 12,
            "rope_parameters": ROPE
            | {
                "rope_type": "longrope",
                "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0, 2.5],
                "long_factor": [2.0] * 8,
            },
        },
    ),
    "Mixtral, sliding": (
        "MixtralConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 12},
    ),
    "Qwen3Moe, some layers dense": (
        "Qwen3MoeConfig",
        {
            "num_experts": 4,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
        },
    ),
}


# Fields that a config class names differently, or derives itself.
NOT_ACCEPTED = {
    "DeepseekV2Config": {"head_dim"},
    "DeepseekV3Config": {"head_dim"},
    "FalconConfig": {"head_dim", "intermediate_size", "num_key_value_heads"},
    "GPT2Config": {
        "head_dim",
        "intermediate_size",
        "max_position_embeddings",
        "num_key_value_heads",
    },
    "GPTNeoXConfig": {"num_key_value_heads"},
    "OPTConfig": {"intermediate_size", "num_key_value_heads"},
}


def config_fields(kind: str, differs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a config class."""
    fields = COMMON | differs
    return {key: fields[key] for key in fields.keys() - NOT_ACCEPTED.get(kind, set())}


def build(name: str, **others: Any) -> nn.Module:
    """Make the tiny model of a family or variant with seeded weights, and changed sizes.

    They are spread enough that logits have margins, and norms need every digit.
    """
    import transformers

    torch.manual_seed(7)
    kind, differs = VARIANTS[name] if name in VARIANTS else (name, FAMILIES[name])
    config = getattr(transformers, kind)(**config_fields(kind, differs | others))
    register_text_classes()
    network = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for key, parameter in network.named_parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.15)
        elif "norm" in key:
            has_offset = ("Gemma" in kind and "Gemma4" not in kind) or (
                kind.startswith(("Qwen3Next", "Qwen3_5")) and "linear_attn" not in key
            )
            nn.init.normal_(parameter, 0.0 if has_offset else 1.0, 0.2)
        elif key.endswith("scale"):
            nn.init.normal_(parameter, 1.0, 0.2)
        elif "sinks" in key or key.endswith("bias"):
            nn.init.normal_(parameter, std=0.5)
    for key, buffer in network.named_buffers():
        if key.endswith("layer_scalar"):
            nn.init.normal_(buffer, 1.0, 0.2)
        elif key.endswith("correction_bias"):
            nn.init.normal_(buffer, std=0.5)
    eager: nn.Module = network.eval().requires_grad_(requires_grad=False)
    return eager


@torch.inference_mode()
def judge(network: Any, prompt: list[int], generated: list[int]) -> tuple[list[int], list[float]]:
    """Return what greedy decoding by the model's own eager attention predicts at each position.

    One pass without cache over prompt and output: by induction over the places, the ids returned
    equal `generated` if and only if greedy decoding token by token generates just that.
    """
    logits = network(torch.tensor([prompt + generated]), use_cache=False).logits[0].float()
    scores = logits[len(prompt) - 1 : -1].log_softmax(-1)  # [generated, V]
    best = scores.max(dim=-1)
    return best.indices.tolist(), best.values.tolist()

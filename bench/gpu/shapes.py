"""Shapes of known decoders, as in their config.json, for programs that need no weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.models import SHAPES
from tidemill.engine.model.config.architecture import Architecture
from tidemill.engine.model.config.hf_config import parse_hf_config, read_hf_config
from tidemill.engine.model.families.registry import architecture_of

_LLAMA = {"model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5}
_QWEN3 = {
    "model_type": "qwen3",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "llama-3-8b": {
        **_LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
        "tie_word_embeddings": False,
    },
    # Llama-3.2-1B's, without its rope scaling, which matters from position 8,192 on.
    "llama-3-1b": {
        **_LLAMA,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
        "tie_word_embeddings": True,
    },
    "qwen3-0.6b": {
        **_QWEN3,
        **SHAPES["470m"],
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        **_QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": {
        **_QWEN3,
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
        "tie_word_embeddings": False,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "hidden_act": "silu",
        "attention_bias": True,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "swiglu_limit": 7.0,
        "sliding_window": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 150_000.0},
        "vocab_size": 201_088,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": False,
    },
    "qwen3-next-80b-a3b": {
        **_QWEN3,
        "model_type": "qwen3_next",
        "attention_bias": False,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_hidden_layers": 48,
        "full_attention_interval": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "vocab_size": 151_936,
        "max_position_embeddings": 262_144,
        "tie_word_embeddings": False,
    },
    "llama-4-scout": {
        **_LLAMA,
        "model_type": "llama4_text",
        "attention_bias": False,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16_384,
        "num_hidden_layers": 48,
        "interleave_moe_layer_step": 1,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "use_qk_norm": True,
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": 4,
        "attn_scale": 0.1,
        "floor_scale": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
        "vocab_size": 202_048,
        "max_position_embeddings": 1_048_576,
        "tie_word_embeddings": False,
    },
    "46m": {
        **_QWEN3,
        **SHAPES["46m"],
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
    # For tests that would otherwise take minutes.
    "tiny": {
        **_QWEN3,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 128,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    },
}


def architecture(name: str) -> Architecture:
    """Return the architecture of a known decoder, or of the config.json in a folder."""
    if name in CONFIGS:
        return architecture_of(parse_hf_config(name, CONFIGS[name]))
    if not Path(name).is_dir():
        raise SystemExit(f"{name} is neither a folder nor one of {', '.join(CONFIGS)}")
    return architecture_of(read_hf_config(name))

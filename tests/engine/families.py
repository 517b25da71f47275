"""Tiny random models of the families that the engine is held to, in fp32, and their judge."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

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
# Config class → what differs from COMMON. Windows are short so that 60 tokens slide.
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
}


def build(family: str) -> nn.Module:
    """Make the family's tiny model with seeded weights spread enough that logits have margins."""
    import transformers

    torch.manual_seed(7)
    config = getattr(transformers, family)(**(COMMON | FAMILIES[family]))
    network = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for name, parameter in network.named_parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.15)
        elif "sinks" in name or name.endswith("bias"):
            nn.init.normal_(parameter, std=0.5)
    eager: nn.Module = network.eval().requires_grad_(requires_grad=False)
    return eager


@torch.inference_mode()
def judge(network: Any, prompt: list[int], generated: list[int]) -> tuple[list[int], list[float]]:
    """Return what greedy decoding by the model's own eager attention says at each generated place.

    One pass without cache over prompt and output: by induction over the places, the ids returned
    equal `generated` if and only if greedy decoding token by token generates just that.
    """
    logits = network(torch.tensor([prompt + generated]), use_cache=False).logits[0].float()
    scores = logits[len(prompt) - 1 : -1].log_softmax(-1)  # [generated, V]
    best = scores.max(dim=-1)
    return best.indices.tolist(), best.values.tolist()

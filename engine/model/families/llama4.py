"""Llama 4's text models: chunked attention, layers without a rope, one expert per token."""

from __future__ import annotations

from dataclasses import replace

from ..config.architecture import NO_ROPE, Architecture, Experts, WeightNames
from ..config.hf_config import ConfigFields, UnsupportedConfig
from ..config.rope import read_rope
from .family import FULL, DecoderSizes, Family, attention_biases, make_architecture

CHUNKED = "chunked_attention"


def _llama4(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    turned = _turned_layers(fields, sizes)
    chunk = fields.get("attention_chunk_size", 8192)
    kinds = fields.get("layer_types") or [CHUNKED if is_turned else FULL for is_turned in turned]
    if len(kinds) != sizes.layers or not {*kinds} <= {CHUNKED, FULL}:
        raise UnsupportedConfig(f"{fields.where} has unsupported layer_types {kinds!r}")
    if fields.count("num_experts_per_tok", 1) > 1:
        raise UnsupportedConfig(f"{fields.where} has unsupported num_experts_per_tok above 1")
    width = fields.count("intermediate_size")
    experts = Experts(
        num_experts=fields.count("num_local_experts"),
        num_experts_per_tok=1,
        intermediate_size=width,
        scoring="sigmoid",
        norm_topk_prob=False,
        shared_intermediate_size=width,
        scales_inputs=True,
    )
    step = fields.count("interleave_moe_layer_step", 1)
    mixed = fields.get("moe_layers")
    if mixed is None:
        mixed = range(step - 1, sizes.layers, step)
    for key in ("for_llm_compressor", "rope_theta", "no_rope_layer_interval"):
        fields.get(key)
    rope = read_rope(fields, sizes.head_dim, sizes.positions, 500_000.0)
    architecture = make_architecture(
        fields,
        sizes,
        ropes=[rope if is_turned else NO_ROPE for is_turned in turned],
        experts=[experts if layer in mixed else None for layer in range(sizes.layers)],
        intermediate_size=fields.count("intermediate_size_mlp", 16_384),
        is_qk_norm_late=True,
        **attention_biases(fields),
        names=WeightNames(
            has_rope_pairs=True,
            mlp="feed_forward",
            experts="feed_forward",
            router="router",
            shared_experts="shared_expert",
            stacked_experts="halves",
        ),
    )
    tuned = fields.get("attn_temperature_tuning", 1)
    scaling = fields.number("attn_scale", 0.1), fields.count("floor_scale", 8192)
    has_norm = fields.flag("use_qk_norm", default=True)
    blocks = [
        replace(
            block,
            attention=replace(block.attention, chunk=chunk or 0 if kind == CHUNKED else 0),
            has_unit_qk_norm=has_norm and bool(is_turned),
            query_scaling=scaling if tuned and not is_turned else None,
        )
        for block, kind, is_turned in zip(architecture.blocks, kinds, turned, strict=True)
    ]
    return replace(architecture, blocks=tuple(blocks))


def _turned_layers(fields: ConfigFields, sizes: DecoderSizes) -> list[int]:
    """Return 1 for layers with a rope, 0 for those without."""
    turned = fields.get("no_rope_layers")
    if not turned:
        every = fields.count("no_rope_layer_interval", 4)
        turned = [int((layer + 1) % every != 0) for layer in range(sizes.layers)]
    if len(turned) != sizes.layers or not {*turned} <= {0, 1}:
        raise UnsupportedConfig(f"{fields.where} has unsupported no_rope_layers {turned!r}")
    return list(turned)


LLAMA4 = {
    "llama4_text": Family(
        "Llama4ForCausalLM",
        _llama4,
        128,
        {"rms_norm_eps": 1e-5, "eos_token_id": 2, "max_position_embeddings": 131_072},
        sorts_rows=True,
    ),
}

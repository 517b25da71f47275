"""Families with gated DeltaNet or short-convolution layers between layers of attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...kernels.recurrence import GatedDelta, RecurrentShape
from ..config.architecture import (
    NO_ATTENTION,
    NO_ROPE,
    Architecture,
    Experts,
    NormNames,
    Recurrence,
    WeightNames,
)
from ..config.hf_config import ConfigFields, UnsupportedConfig
from ..config.rope import make_rope
from .family import FULL, DecoderSizes, Family, attention_biases, make_architecture
from .softmax_moe import qwen_experts

LINEAR = "linear_attention"
_ROPES = {"default": "default", "mrope": "default", "yarn": "yarn"}


def _deltanet(fields: ConfigFields) -> Recurrence:
    """Return Qwen's gated DeltaNet."""
    rule = GatedDelta(
        num_key_heads=fields.count("linear_num_key_heads", 16),
        num_value_heads=fields.count("linear_num_value_heads", 32),
        key_dim=fields.count("linear_key_head_dim", 128),
        value_dim=fields.count("linear_value_head_dim", 128),
    )
    if rule.num_value_heads % rule.num_key_heads:
        raise UnsupportedConfig(
            f"{rule.num_value_heads} value heads cannot share {rule.num_key_heads} key heads evenly"
        )
    shape = RecurrentShape(
        num_channels=sum(rule.widths),
        num_taps=fields.count("linear_conv_kernel_dim", 4),
        rule=rule,
    )
    return Recurrence(shape, norm_groups=rule.num_value_heads, is_norm_first=True)


def with_recurrence(
    architecture: Architecture, kinds: Sequence[str], kind: str, recurrence: Recurrence
) -> Architecture:
    """Return an architecture whose layers of a kind are recurrent instead of attending."""
    blocks = tuple(
        replace(block, attention=NO_ATTENTION, rope=NO_ROPE, recurrence=recurrence)
        if own == kind
        else block
        for block, own in zip(architecture.blocks, kinds, strict=True)
    )
    return replace(architecture, blocks=blocks)


def _layer_kinds(
    fields: ConfigFields, sizes: DecoderSizes, recurrent: str, every: int
) -> Sequence[str]:
    """Return the kinds of layers; without a list all are recurrent except one of `every`."""
    kinds: Any = fields.get("layer_types")
    if kinds is None:
        layers = range(1, sizes.layers + 1)
        kinds = [recurrent if layer % every else FULL for layer in layers]
    if len(kinds) != sizes.layers or not {*kinds} <= {recurrent, FULL}:
        raise UnsupportedConfig(f"{fields.where} has unsupported layer_types {kinds!r}")
    return list(kinds)


def _qwen3_next(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    experts = qwen_experts(
        fields,
        sizes,
        norm_topk_prob=fields.flag("norm_topk_prob", default=True),
        shared_intermediate_size=fields.count("shared_expert_intermediate_size"),
        has_shared_gate=True,
    )
    names = WeightNames(
        in_proj=("in_proj_qkvz", "in_proj_ba"),
        has_in_proj_groups=True,
        shared_experts="shared_expert",
        mtp=("mtp.",),
    )
    return _qwen(fields, sizes, has_axes=False, experts=experts, names=names)


def _qwen3_5(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    return _qwen(fields, sizes, names=WeightNames(mtp=("mtp.",)))


def _qwen3_5_moe(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    experts = Experts(
        num_experts=fields.count("num_experts"),
        num_experts_per_tok=fields.count("num_experts_per_tok"),
        intermediate_size=fields.count("moe_intermediate_size"),
        shared_intermediate_size=fields.count("shared_expert_intermediate_size"),
        has_shared_gate=True,
    )
    names = WeightNames(
        shared_experts="shared_expert",
        expert=("experts.gate_up_proj", "", "experts.down_proj"),
        stacked_experts="rows",
        mtp=("mtp.",),
    )
    fields.get("intermediate_size")  # no layer has an MLP alone
    width = experts.intermediate_size
    experts_of = [experts] * sizes.layers
    return _qwen(fields, sizes, experts=experts_of, intermediate_size=width, names=names)


def _qwen(
    fields: ConfigFields, sizes: DecoderSizes, *, has_axes: bool = True, **others: Any
) -> Architecture:
    """Return Qwen's hybrid: its attention has an output gate and rotates a part of each head.

    If it `has_axes`, images are rotated by row and column.
    """
    for key in _QWEN_WITHOUT_EFFECT:
        fields.get(key)
    fields.allow("attn_output_gate", True)  # noqa: FBT003 - a value of a config
    parameters = dict(fields.get("rope_parameters") or fields.get("rope_scaling") or {})
    if has_axes:
        parameters.setdefault("mrope_section", [11, 11, 10])
    else:
        for key in ("mrope_section", "mrope_interleaved"):
            parameters.pop(key, None)  # for images, which it does not accept
    for key in ("rope_theta", "partial_rotary_factor"):
        parameters.setdefault(key, fields.get(key))
    rope = make_rope(
        parameters,
        sizes.head_dim,
        sizes.positions,
        10_000.0,
        _ROPES,
        sections="interleaved" if has_axes else None,
    )
    kinds = _layer_kinds(fields, sizes, LINEAR, fields.count("full_attention_interval", 4))
    architecture = make_architecture(
        fields,
        sizes,
        ropes=[rope] * sizes.layers,
        **attention_biases(fields),
        has_qk_norm=True,
        has_output_gate=True,
        norm_offset=1.0,
        **others,
    )
    return with_recurrence(architecture, kinds, LINEAR, _deltanet(fields))


def _lfm2(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    inner = fields.count("intermediate_size", fields.get("block_ff_dim"))
    fields.get("block_ff_dim")
    multiple, factor = (
        fields.count("block_multiple_of", 256),
        fields.get("block_ffn_dim_multiplier"),
    )
    if fields.flag("block_auto_adjust_ff_dim", default=True):
        inner = int((1.0 if factor is None else factor) * (2 * inner // 3))
        inner = -(-inner // multiple) * multiple
    return _short_convolutions(fields, sizes, intermediate_size=inner, names=_LFM2_NAMES)


def _lfm2_moe(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    experts = Experts(
        num_experts=fields.count("num_experts"),
        num_experts_per_tok=fields.count("num_experts_per_tok"),
        intermediate_size=fields.count("moe_intermediate_size"),
        scoring="sigmoid",
        norm_topk_prob=fields.flag("norm_topk_prob", default=True),
        has_correction_bias=fields.flag("use_expert_bias", default=True),
        routed_scaling_factor=fields.number("routed_scaling_factor", 1.0),
    )
    dense = fields.get("num_dense_layers", 2)
    names = replace(
        _LFM2_NAMES,
        experts="feed_forward",
        expert=("w1", "w3", "w2"),
        correction_bias="expert_bias",
    )
    return _short_convolutions(
        fields,
        sizes,
        experts=[None if layer < dense else experts for layer in range(sizes.layers)],
        names=names,
    )


def _short_convolutions(fields: ConfigFields, sizes: DecoderSizes, **others: Any) -> Architecture:
    """Return LFM2's hybrid: double-gated short convolutions between layers of attention."""
    attending = fields.get("full_attn_idxs")
    kinds = fields.get("layer_types")
    if kinds is None:
        every = range(sizes.layers)
        kinds = [FULL if attending is None or layer in attending else "conv" for layer in every]
    if len(kinds) != sizes.layers or not {*kinds} <= {FULL, "conv"}:
        raise UnsupportedConfig(f"{fields.where} has unsupported layer_types {kinds!r}")
    for key in _LFM2_WITHOUT_EFFECT:
        fields.get(key)
    is_biased = fields.flag("conv_bias")
    shape = RecurrentShape(sizes.hidden, fields.count("conv_L_cache", 3), has_silu=False)
    mixer = Recurrence(shape, has_conv_bias=is_biased, has_proj_bias=is_biased)
    tied = fields.flag("tie_embedding", default=fields.flag("tie_word_embeddings", default=True))
    architecture = make_architecture(
        fields, sizes, key_heads=8, theta=1e6, has_qk_norm=True, **others
    )
    architecture = replace(architecture, tie_word_embeddings=tied)
    return with_recurrence(architecture, kinds, "conv", mixer)


_LFM2_NAMES = WeightNames(
    norm="model.embedding_norm",
    norms=NormNames(input="operator_norm", pre_feedforward="ffn_norm"),
    q_norm="q_layernorm",
    k_norm="k_layernorm",
    o_proj="out_proj",
    mlp="feed_forward",
    gate_up=("w1", "w3"),
    down_proj="w2",
    recurrence="conv",
    in_proj=("in_proj",),
    conv="conv",
)
_LFM2_WITHOUT_EFFECT = (
    *("block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "conv_dim"),
    *("block_use_swiglu", "block_use_xavier_init", "conv_dim_out", "conv_use_xavier_init"),
    *("num_heads", "theta", "use_pos_enc"),
)
_LFM2_EPS = {"norm_eps": "rms_norm_eps"}
_QWEN_WITHOUT_EFFECT = (
    *("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),
    *("mlp_only_layers", "use_sliding_window", "output_router_logits"),
)
_QWEN = {"partial_rotary_factor": 0.25}
HYBRID: dict[str, Family] = {
    "lfm2": Family("Lfm2ForCausalLM", _lfm2, None, {"eos_token_id": 2}, _LFM2_EPS, sorts_rows=True),
    "lfm2_moe": Family(
        "Lfm2MoeForCausalLM", _lfm2_moe, None, {"eos_token_id": 2}, _LFM2_EPS, sorts_rows=True
    ),
    "qwen3_next": Family("Qwen3NextForCausalLM", _qwen3_next, 256, _QWEN, sorts_rows=True),
    "qwen3_5_text": Family("Qwen3_5ForCausalLM", _qwen3_5, 256, _QWEN, sorts_rows=True),
    "qwen3_5_moe_text": Family("Qwen3_5MoeForCausalLM", _qwen3_5_moe, 256, _QWEN, sorts_rows=True),
}

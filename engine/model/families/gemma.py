"""The Gemma families: how each fills the block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..config.architecture import (
    SANDWICH,
    Architecture,
    Block,
    Experts,
    Rope,
    WeightNames,
)
from ..config.hf_config import ConfigFields, UnsupportedConfig
from ..config.rope import make_rope
from .family import (
    FULL,
    GELU,
    SLIDING,
    DecoderSizes,
    Family,
    attention_biases,
    make_architecture,
    optional_number,
    ropes_by_window,
    windows_by_layer,
)


def _gemma(fields: ConfigFields, sizes: DecoderSizes, **others: Any) -> Architecture:
    """Return the fields that all Gemmas share: norms of weight + 1, a scaled embedding, GELU."""
    for key in ("hidden_act", "hidden_activation"):  # released models have "gelu" but use this
        fields.allow(key, "gelu", "gelu_pytorch_tanh")
    fields.allow("use_bidirectional_attention")
    return make_architecture(
        fields,
        sizes,
        gate=GELU,
        tie_word_embeddings=True,
        **attention_biases(fields),
        norm_offset=1.0,
        embedding_scale=sizes.hidden**0.5,
        **others,
    )


def _gemma2(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    return _gemma(
        fields,
        sizes,
        scaling=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        softcap=optional_number(fields, "attn_logit_softcapping", 50.0) or 0.0,
        logit_softcap=optional_number(fields, "final_logit_softcapping", 30.0),
        windows=windows_by_layer(fields, sizes, fields.count("sliding_window", 4096), every=2),
        names=WeightNames(norms=SANDWICH),
    )


def _gemma3(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    fields.allow("attn_logit_softcapping")
    every = fields.count("sliding_window_pattern", fields.count("_sliding_window_pattern", 6))
    windows = windows_by_layer(fields, sizes, fields.count("sliding_window", 4096), every=every)
    thetas = fields.number("rope_local_base_freq", 1e4), fields.number("rope_theta", 1e6)
    kinds = {"default": "default", "linear": "linear"}
    return _gemma(
        fields,
        sizes,
        scaling=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        logit_softcap=optional_number(fields, "final_logit_softcapping", None),
        windows=windows,
        ropes=ropes_by_window(fields, sizes, windows, thetas, kinds),
        has_qk_norm=True,
        names=WeightNames(norms=SANDWICH),
    )


def _gemma4(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    for key, what in _NOT_IN_BLOCK.items():
        if fields.get(key):
            raise UnsupportedConfig(
                f"{fields.where} has unsupported {key} {fields.get(key)!r}: {what}"
            )
    for key in ("use_double_wide_mlp", "vocab_size_per_layer_input"):
        fields.get(key)  # for layers that share keys, and per-layer inputs
    fields.allow("hidden_activation", "gelu_pytorch_tanh")
    fields.allow("use_bidirectional_attention", "vision")  # between an image's tokens, not text's
    windows = windows_by_layer(fields, sizes, fields.count("sliding_window"), every=6)
    windows[-1] = 0  # in any case, as in transformers' class
    has_keys_as_values, experts = fields.flag("attention_k_eq_v"), _gemma4_experts(fields)
    heads = _gemma4_heads(fields, sizes, windows, has_keys_as_values=has_keys_as_values)
    architecture = make_architecture(
        fields,
        sizes,
        scaling=1.0,
        windows=windows,
        ropes=_gemma4_ropes(fields, sizes, windows, [width for width, _ in heads]),
        experts=[experts] * sizes.layers,
        gate=GELU,
        tie_word_embeddings=True,
        **attention_biases(fields),
        has_qk_norm=True,
        has_value_norm=True,
        has_layer_scalar=True,
        embedding_scale=sizes.hidden**0.5,
        logit_softcap=optional_number(fields, "final_logit_softcapping", None),
        names=GEMMA4_NAMES,
    )

    def block(plain: Block, width: int, key_heads: int) -> Block:
        shape = replace(
            plain.attention,
            num_kv_heads=key_heads,
            key_dim=width,
            value_dim=width,
            sees_ahead=bool(plain.attention.window),  # in an image, only its windowed layers do
        )
        has_one = has_keys_as_values and not shape.window
        return replace(plain, attention=shape, has_keys_as_values=has_one)

    blocks = (block(plain, *one) for plain, one in zip(architecture.blocks, heads, strict=True))
    return replace(architecture, blocks=tuple(blocks))


def _gemma4_experts(fields: ConfigFields) -> Experts | None:
    """Return the experts next to a layer's MLP, if it has any."""
    if not fields.flag("enable_moe_block"):
        for key in ("num_experts", "top_k_experts", "moe_intermediate_size"):
            fields.get(key)
        return None
    return Experts(
        num_experts=fields.count("num_experts"),
        num_experts_per_tok=fields.count("top_k_experts"),
        intermediate_size=fields.count("moe_intermediate_size"),
        shared_intermediate_size=fields.count("intermediate_size"),
        has_own_norms=True,
    )


def _gemma4_heads(
    fields: ConfigFields,
    sizes: DecoderSizes,
    windows: Sequence[int],
    *,
    has_keys_as_values: bool,
) -> list[tuple[int, int]]:
    """Return the width of each layer's heads, and its number of key heads.

    Layers without a window have separate values, by layer kind or in transformers' per-layer form.
    """
    keys = fields.count("num_key_value_heads")
    far = fields.count("global_head_dim", 512), fields.count("num_global_key_value_heads", keys)
    if not has_keys_as_values:
        far = far[0], keys
    per_layer = fields.get("per_layer_config")
    if per_layer is None:
        heads = [(sizes.head_dim, keys) if window else far for window in windows]
    else:
        heads = []
        for index in range(sizes.layers):
            layer = ConfigFields(f"layer {index} of {fields.where}", per_layer.get(str(index), {}))
            width = layer.count("head_dim", sizes.head_dim)
            heads.append((width, layer.count("num_key_value_heads", keys)))
            layer.check_all_read()
        if others := per_layer.keys() - {str(index) for index in range(sizes.layers)}:
            raise UnsupportedConfig(
                f"{fields.where} has per_layer_config for layer {min(others)}, which does not exist"
            )
    for _, count in heads:
        if sizes.heads % count:
            raise UnsupportedConfig(f"{sizes.heads} heads cannot share {count} key heads evenly")
    return heads


def _gemma4_ropes(
    fields: ConfigFields, sizes: DecoderSizes, windows: Sequence[int], widths: Sequence[int]
) -> list[Rope]:
    parameters: Mapping[str, Any] = fields.get("rope_parameters") or _GEMMA4_ROPES
    if parameters.keys() != _GEMMA4_ROPES.keys():
        raise UnsupportedConfig("its ropes are not given by kind of layer")
    kinds = {kind: kind for kind in ("default", "linear", "proportional")}
    return [
        make_rope(
            parameters[SLIDING if window else FULL],
            width,
            sizes.positions,
            1e4 if window else 1e6,
            kinds,
        )
        for window, width in zip(windows, widths, strict=True)
    ]


GEMMA4_NAMES = WeightNames(
    norms=SANDWICH,
    experts="",
    router="router.proj",
    shared_experts="mlp",
    expert=("experts.gate_up_proj", "", "experts.down_proj"),
    stacked_experts="rows",
)
# Features of smaller Gemma 4 models, by the field that enables them.
_NOT_IN_BLOCK = {
    "hidden_size_per_layer_input": "its layers have per-layer inputs in addition to the residual",
    "num_kv_shared_layers": "its last layers share the keys and values of others",
}
_GEMMA4_ROPES: dict[str, Any] = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
_GEMMA3 = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 1,
}
_GEMMA4 = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 1,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
}
_GEMMA4_UNIFIED = _GEMMA4 | {
    "max_position_embeddings": 262_144,
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
}
GEMMA: dict[str, Family] = {
    "gemma": Family("GemmaForCausalLM", _gemma, 256, {"eos_token_id": 1}),
    "gemma2": Family("Gemma2ForCausalLM", _gemma2, 256, {"eos_token_id": 1}),
    "gemma3_text": Family("Gemma3ForCausalLM", _gemma3, 256, _GEMMA3),
    "gemma4_text": Family("Gemma4ForCausalLM", _gemma4, 256, _GEMMA4),
    "gemma4_unified_text": Family("Gemma4UnifiedForCausalLM", _gemma4, 256, _GEMMA4_UNIFIED),
}

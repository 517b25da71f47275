"""Families with LayerNorms, or with MLPs without a gate: how each fills the block."""

from __future__ import annotations

from typing import Any

from ...kernels.elementwise import Activation
from ..config.architecture import NO_ROPE, Architecture, NormNames, WeightNames
from ..config.hf_config import ConfigFields, UnsupportedConfig
from ..config.rope import read_rope
from .dense import EPS, SHARED_NORM, partial_rope
from .family import (
    DecoderSizes,
    Family,
    attention_biases,
    make_architecture,
    uniform_windows,
)

ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "xielu": "xielu",
}
ALL_BIASED: dict[str, Any] = {"qkv_bias": True, "o_proj_bias": True, "mlp_bias": True}
LAYER_NORM: dict[str, Any] = {"has_layer_norm": True, "has_norm_bias": True}


def activation(fields: ConfigFields, default: Activation) -> Activation:
    """Return the activation of an MLP that has no gate."""
    name = fields.get("hidden_act") or default
    if name not in ACTIVATIONS:
        raise UnsupportedConfig(f"{fields.where} has unsupported hidden_act {name!r}")
    return ACTIVATIONS[name]


def _starcoder2(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    is_biased = fields.flag("use_bias", default=True)
    fields.allow("norm_type", "layer_norm")
    fields.allow("mlp_type", "default")
    for key in _STARCODER2_WITHOUT_EFFECT:
        fields.get(key)
    return make_architecture(
        fields,
        sizes,
        windows=uniform_windows(fields, sizes),
        gate=activation(fields, "gelu_tanh"),
        tie_word_embeddings=True,
        qkv_bias=is_biased,
        o_proj_bias=is_biased,
        mlp_bias=is_biased,
        **LAYER_NORM,
        names=WeightNames(gate_up=("c_fc",), down_proj="c_proj"),
    )


def _arcee(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    return make_architecture(
        fields,
        sizes,
        key_heads=sizes.heads,
        gate=activation(fields, "relu2"),
        **attention_biases(fields),
        mlp_bias=fields.flag("mlp_bias"),
        names=WeightNames(gate_up=("up_proj",)),
    )


def _nemotron(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    fields.allow("kv_channels", sizes.head_dim)
    fields.get("layer_norm_eps")  # its class reads norm_eps instead
    return make_architecture(
        fields,
        sizes,
        key_heads=sizes.heads,
        ropes=partial_rope(fields, sizes),
        gate=activation(fields, "relu2"),
        **attention_biases(fields),
        mlp_bias=fields.flag("mlp_bias"),
        norm_offset=1.0,
        **LAYER_NORM,
        names=WeightNames(gate_up=("up_proj",)),
    )


def _apertus(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    fields.allow("qk_norm", True)  # noqa: FBT003 - a value of a config
    fields.allow("post_norm")
    fields.allow("mlp_bias")
    rope = read_rope(fields, sizes.head_dim, sizes.positions, 12e6, default=_APERTUS_ROPE)
    return make_architecture(
        fields,
        sizes,
        key_heads=sizes.heads,
        ropes=[rope] * sizes.layers,
        gate=activation(fields, "xielu"),
        **attention_biases(fields),
        has_qk_norm=True,
        names=WeightNames(
            norms=NormNames("attention_layernorm", pre_feedforward="feedforward_layernorm"),
            gate_up=("up_proj",),
        ),
    )


def _stablelm(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    fields.allow("qk_layernorm")
    fields.get("rotary_scaling_factor")
    is_parallel = fields.flag("use_parallel_residual")
    return make_architecture(
        fields,
        sizes,
        ropes=partial_rope(fields, sizes),
        qkv_bias=fields.flag("use_qkv_bias"),
        is_parallel=is_parallel,
        **LAYER_NORM,
        names=WeightNames(norms=SHARED_NORM if is_parallel else NormNames()),
    )


def _phi(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    fields.allow("qk_layernorm")
    return make_architecture(
        fields,
        sizes,
        key_heads=sizes.heads,
        ropes=partial_rope(fields, sizes),
        gate=activation(fields, "gelu_tanh"),
        is_parallel=True,
        head_bias=True,
        **ALL_BIASED,
        **LAYER_NORM,
        names=WeightNames(
            norm="model.final_layernorm",
            norms=SHARED_NORM,
            o_proj="dense",
            gate_up=("fc1",),
            down_proj="fc2",
        ),
    )


def _gpt_neox(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    return make_architecture(
        fields,
        sizes,
        key_heads=sizes.heads,
        ropes=partial_rope(fields, sizes),
        gate=activation(fields, "gelu"),
        is_parallel=fields.flag("use_parallel_residual", default=True),
        **attention_biases(fields, default=True),
        mlp_bias=True,
        **LAYER_NORM,
        names=WeightNames(
            embed_tokens="gpt_neox.embed_in",
            norm="gpt_neox.final_layer_norm",
            lm_head="embed_out",
            layers="gpt_neox.layers",
            attention="attention",
            qkv=("query_key_value",),
            has_qkv_groups=True,
            o_proj="dense",
            gate_up=("dense_h_to_4h",),
            down_proj="dense_4h_to_h",
        ),
    )


def _falcon(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    if fields.flag("alibi"):
        raise UnsupportedConfig(f"{fields.where} has unsupported alibi true")
    is_new = fields.flag("new_decoder_architecture")
    is_shared = fields.flag("multi_query", default=True)
    is_parallel = fields.flag("parallel_attn", default=True) or is_new
    num_norms = fields.get("num_ln_in_parallel_attn")
    norms = NormNames()
    if is_new and (num_norms is None or num_norms == 2):
        norms = NormNames("ln_attn", pre_feedforward="ln_mlp")
    elif is_parallel:
        norms = SHARED_NORM
    key_heads = fields.get("num_kv_heads") or sizes.heads
    heads = key_heads if is_new else 1 if is_shared else sizes.heads
    is_biased = fields.flag("bias")
    return make_architecture(
        fields,
        sizes,
        key_heads=heads,
        gate=activation(fields, "gelu"),
        intermediate_size=fields.count("ffn_hidden_size", 4 * sizes.hidden),
        tie_word_embeddings=True,
        is_parallel=is_parallel,
        qkv_bias=is_biased,
        o_proj_bias=is_biased,
        mlp_bias=is_biased,
        **LAYER_NORM,
        names=WeightNames(
            embed_tokens="transformer.word_embeddings",
            norm="transformer.ln_f",
            layers="transformer.h",
            norms=norms,
            attention="self_attention",
            qkv=("query_key_value",),
            has_qkv_groups=True,
            o_proj="dense",
            gate_up=("dense_h_to_4h",),
            down_proj="dense_4h_to_h",
        ),
    )


def _gpt2(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        fields.allow(key)
    if not fields.flag("scale_attn_weights", default=True):
        raise UnsupportedConfig(f"{fields.where} has unsupported scale_attn_weights false")
    for key in _GPT2_WITHOUT_EFFECT:
        fields.get(key)
    return make_architecture(
        fields,
        sizes,
        key_heads=sizes.heads,
        ropes=[NO_ROPE] * sizes.layers,
        gate=activation(fields, "gelu_tanh"),
        intermediate_size=fields.count("n_inner", 4 * sizes.hidden),
        tie_word_embeddings=True,
        num_positions=sizes.positions,
        **ALL_BIASED,
        **LAYER_NORM,
        names=WeightNames(
            embed_tokens="transformer.wte",
            embed_positions="transformer.wpe",
            norm="transformer.ln_f",
            layers="transformer.h",
            norms=NormNames("ln_1", pre_feedforward="ln_2"),
            attention="attn",
            qkv=("c_attn",),
            o_proj="c_proj",
            gate_up=("c_fc",),
            down_proj="c_proj",
            is_transposed=True,
        ),
    )


def _opt(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    for key in ("do_layer_norm_before", "enable_bias", "layer_norm_elementwise_affine"):
        if fields.get(key, True) is not True:
            raise UnsupportedConfig(f"{fields.where} has unsupported {key} false")
    fields.allow("_remove_final_layer_norm")
    fields.allow("word_embed_proj_dim", sizes.hidden)
    for key in ("init_std", "layerdrop"):
        fields.get(key)
    return make_architecture(
        fields,
        sizes,
        key_heads=sizes.heads,
        ropes=[NO_ROPE] * sizes.layers,
        gate=activation(fields, "relu"),
        tie_word_embeddings=True,
        num_positions=sizes.positions + 2,
        first_position=2,
        **ALL_BIASED,
        **LAYER_NORM,
        names=WeightNames(
            embed_tokens="model.decoder.embed_tokens",
            embed_positions="model.decoder.embed_positions",
            norm="model.decoder.final_layer_norm",
            layers="model.decoder.layers",
            norms=NormNames("self_attn_layer_norm", pre_feedforward="final_layer_norm"),
            o_proj="out_proj",
            mlp="",
            gate_up=("fc1",),
            down_proj="fc2",
        ),
    )


# Fields left over from GPT-BigCode.
_STARCODER2_WITHOUT_EFFECT = (
    *("activation_function", "attention_softmax_in_fp32", "layer_norm_epsilon"),
    *("scale_attention_softmax_in_fp32", "scale_attn_weights"),
)
_GPT2_WITHOUT_EFFECT = (
    *("reorder_and_upcast_attn", "n_ctx", "summary_type", "summary_use_proj"),
    *("summary_activation", "summary_proj_to_labels", "summary_first_dropout"),
)
_APERTUS_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12_000_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
_GPT_NAMES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "activation_function": "hidden_act",
    "layer_norm_epsilon": "rms_norm_eps",
}
GPT = {
    "apertus": Family("ApertusForCausalLM", _apertus, None, {"eos_token_id": 2}),
    "arcee": Family("ArceeForCausalLM", _arcee, None, {"eos_token_id": 128_001}),
    "falcon": Family(
        "FalconForCausalLM",
        _falcon,
        None,
        {"eos_token_id": 11, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
        {
            "n_embed": "hidden_size",
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "n_head_kv": "num_kv_heads",
            "activation": "hidden_act",
            "layer_norm_epsilon": "rms_norm_eps",
        },
        sorts_rows=True,
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        _gpt2,
        None,
        {"eos_token_id": 50_256, "rms_norm_eps": 1e-5, "max_position_embeddings": 1024},
        _GPT_NAMES,
        sorts_rows=True,
    ),
    "gpt_neox": Family(
        "GPTNeoXForCausalLM",
        _gpt_neox,
        None,
        {"eos_token_id": 2, "partial_rotary_factor": 0.25, "hidden_act": "gelu"},
        {
            **EPS,
            "rotary_pct": "partial_rotary_factor",
            "rotary_emb_base": "rope_theta",
        },
        sorts_rows=True,
    ),
    "nemotron": Family(
        "NemotronForCausalLM",
        _nemotron,
        None,
        {"eos_token_id": 3, "partial_rotary_factor": 0.5},
        {"norm_eps": "rms_norm_eps"},
    ),
    "opt": Family(
        "OPTForCausalLM",
        _opt,
        None,
        {"eos_token_id": 2, "rms_norm_eps": 1e-5},
        {"ffn_dim": "intermediate_size", "activation_function": "hidden_act"},
    ),
    "phi": Family(
        "PhiForCausalLM", _phi, None, {"partial_rotary_factor": 0.5, "eos_token_id": 2}, EPS
    ),
    "stablelm": Family(
        "StableLmForCausalLM",
        _stablelm,
        None,
        {"partial_rotary_factor": 0.25, "eos_token_id": 0},
        EPS,
    ),
    "starcoder2": Family(
        "Starcoder2ForCausalLM",
        _starcoder2,
        None,
        {"eos_token_id": 50_256},
        {"norm_epsilon": "rms_norm_eps"},
    ),
}

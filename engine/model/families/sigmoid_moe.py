"""Families of mixtures of experts with sigmoid routers, as in DeepSeek V3."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from ..config.architecture import NO_ROPE, Architecture, Experts, NormNames, WeightNames
from ..config.hf_config import ConfigFields, UnsupportedConfig
from ..config.rope import Sections, make_rope, read_rope
from .dense import exaone_layers, partial_rope
from .family import (
    FULL,
    SLIDING,
    DecoderSizes,
    Family,
    attention_biases,
    count_experts,
    make_architecture,
    ropes_by_window,
    windows_by_layer,
)

MAX_MTP_LAYERS = 100


def sigmoid_experts(fields: ConfigFields) -> Experts:
    """Return experts as in DeepSeek: a sigmoid router with a bias, groups, a shared MLP."""
    fields.allow("scoring_func", "sigmoid", "noaux_tc")  # dots.llm1 has the top-k method here
    fields.allow("topk_method", "noaux_tc")
    width = fields.count("moe_intermediate_size")
    shared = fields.get("n_shared_experts") or 0
    scale = fields.get("routed_scaling_factor")
    return Experts(
        num_experts=fields.count("n_routed_experts"),
        num_experts_per_tok=fields.count("num_experts_per_tok"),
        intermediate_size=width,
        scoring="sigmoid",
        norm_topk_prob=fields.flag("norm_topk_prob"),
        has_correction_bias=True,
        num_groups=fields.count("n_group", 1),
        topk_groups=fields.count("topk_group", 1),
        routed_scaling_factor=1.0 if scale is None else fields.number("routed_scaling_factor"),
        shared_intermediate_size=shared * width,
    )


def _glm4_moe(
    fields: ConfigFields, sizes: DecoderSizes, sections: Sections | None = None
) -> Architecture:
    experts, dense = sigmoid_experts(fields), fields.get("first_k_dense_replace", 1)
    return make_architecture(
        fields,
        sizes,
        ropes=partial_rope(fields, sizes, sections=sections),
        experts=[None if layer < dense else experts for layer in range(sizes.layers)],
        qkv_bias=fields.flag("attention_bias"),
        has_qk_norm=fields.flag("use_qk_norm"),
        num_mtp_layers=mtp_layers(fields, "num_nextn_predict_layers", "num_mtp_layers"),
    )


def _dots1(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    experts, dense = sigmoid_experts(fields), fields.get("first_k_dense_replace", 0)
    fields.allow("moe_layer_freq", 1)
    window, first = fields.get("sliding_window", 4096), fields.get("max_window_layers", 62)
    if fields.get("layer_types") is not None:
        windows = windows_by_layer(fields, sizes, window or -1, every=1)
    else:
        windows = [window if window and layer >= first else 0 for layer in range(sizes.layers)]
    if min(windows) < 0:
        raise UnsupportedConfig(f"{fields.where} has sliding layers but no window")
    return make_architecture(
        fields,
        sizes,
        key_heads=32,
        windows=windows,
        experts=[None if layer < dense else experts for layer in range(sizes.layers)],
        **attention_biases(fields),
        has_qk_norm=True,
    )


def _exaone_moe(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    return make_architecture(
        fields,
        sizes,
        **exaone_layers(fields, sizes),
        experts=sparse_layers(fields, sizes, sigmoid_experts(fields)),
        has_qk_norm=True,
        names=WeightNames(correction_bias="e_score_correction_bias", mtp=("mtp.",)),
    )


def sparse_layers(
    fields: ConfigFields, sizes: DecoderSizes, experts: Experts, dense: int = 1
) -> list[Experts | None]:
    """Return the experts of each layer; without `mlp_layer_types` the first layers have none."""
    dense = fields.get("first_k_dense_replace", dense)
    first = ["dense" if layer < dense else "sparse" for layer in range(sizes.layers)]
    kinds = fields.get("mlp_layer_types") or first
    if len(kinds) != sizes.layers or not {*kinds} <= {"dense", "sparse"}:
        raise UnsupportedConfig(f"{fields.where} has unsupported mlp_layer_types {kinds!r}")
    return [experts if kind == "sparse" else None for kind in kinds]


def _hy_v3(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    for key, value in _HY_V3_FIELDS.items():
        fields.allow(key, value)
    for key in _HY_V3_WITHOUT_EFFECT:
        fields.get(key)
    return make_architecture(
        fields,
        sizes,
        theta=11_158_840.0,
        experts=sparse_layers(fields, sizes, sigmoid_experts(fields)),
        **attention_biases(fields),
        mlp_bias=fields.flag("mlp_bias"),
        has_qk_norm=True,
        num_mtp_layers=mtp_layers(fields, "num_nextn_predict_layers"),
        names=WeightNames(
            router="router.gate", correction_bias="expert_bias", shared_experts="shared_mlp"
        ),
    )


def _afmoe(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    for key, values in _AFMOE_FIELDS.items():
        fields.allow(key, *values)
    for key in ("load_balance_coeff", "use_grouped_mm"):
        fields.get(key)  # for training, and for kernels
    experts, dense = sigmoid_experts(fields), fields.get("num_dense_layers")
    every = fields.count("global_attn_every_n_layers", 4)
    windows = windows_by_layer(fields, sizes, fields.count("sliding_window", 1024), every=every)
    rope = read_rope(fields, sizes.head_dim, sizes.positions, 10_000.0)
    return make_architecture(
        fields,
        sizes,
        key_heads=sizes.heads,
        windows=windows,
        ropes=[rope if window else NO_ROPE for window in windows],
        experts=[None if layer < dense else experts for layer in range(sizes.layers)],
        has_qk_norm=True,
        has_output_gate=True,
        embedding_scale=sizes.hidden**0.5 if fields.flag("mup_enabled") else 1.0,
        names=WeightNames(
            norms=_AFMOE_NORMS,
            output_gate="gate_proj",
            router="router.gate",
            correction_bias="expert_bias",
        ),
    )


def _solar_open(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    experts = sigmoid_experts(fields)
    fields.get("intermediate_size")  # no layer is dense
    return make_architecture(
        fields,
        sizes,
        theta=1e6,
        experts=[experts] * sizes.layers,
        intermediate_size=experts.intermediate_size,
        qkv_bias=fields.flag("attention_bias"),
    )


def _minimax_m2(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    for key, values in _MINIMAX_M2_FIELDS.items():
        fields.allow(key, *values)
    kinds = fields.get("attn_type_list") or ()
    if any(kind != 1 for kind in kinds):
        raise UnsupportedConfig(f"{fields.where} has unsupported attn_type_list {kinds!r}")
    parameters = dict(fields.get("rope_parameters") or fields.get("rope_scaling") or {})
    parameters.setdefault("rope_theta", fields.number("rope_theta", 5e6))
    if (turned := fields.get("rotary_dim")) is not None:
        parameters.setdefault("partial_rotary_factor", turned / sizes.head_dim)
    experts = Experts(
        num_experts=count_experts(fields),
        num_experts_per_tok=fields.count("num_experts_per_tok"),
        intermediate_size=fields.count("intermediate_size"),
        scoring="sigmoid",
        has_correction_bias=True,
    )
    return make_architecture(
        fields,
        sizes,
        ropes=[make_rope(parameters, sizes.head_dim, sizes.positions, 5e6)] * sizes.layers,
        experts=[experts] * sizes.layers,
        has_qk_norm=True,
        has_wide_qk_norm=True,
        num_mtp_layers=mtp_layers(fields, "num_mtp_modules"),
        names=WeightNames(
            experts="block_sparse_moe",
            expert=("w1", "w3", "w2"),
            correction_bias="e_score_correction_bias",
        ),
    )


def _mimo_v2_flash(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    for key in _MIMO_WITHOUT_EFFECT:
        fields.get(key)  # the class does not read it
    full = [layer == 0 or not (layer + 1) % 6 for layer in range(sizes.layers)]
    kinds = fields.get("layer_types") or [FULL if is_full else SLIDING for is_full in full]
    window = fields.count("sliding_window", 129)
    if (before := fields.get("sliding_window_size")) is not None:
        window = before + 1
    if len(kinds) != sizes.layers or not {*kinds} <= {FULL, SLIDING}:
        raise UnsupportedConfig(f"{fields.where} has unsupported layer_types {kinds!r}")
    windows = [window if kind == SLIDING else 0 for kind in kinds]
    sparse = fields.get("mlp_layer_types") or ["dense"] + ["sparse"] * (sizes.layers - 1)
    if len(sparse) != sizes.layers or not {*sparse} <= {"dense", "sparse"}:
        raise UnsupportedConfig(f"{fields.where} has unsupported mlp_layer_types {sparse!r}")
    # The released files contain the same values.
    fields.allow("hybrid_layer_pattern", [int(kind == SLIDING) for kind in kinds])
    fields.allow("moe_layer_freq", [int(kind == "sparse") for kind in sparse])
    fields.allow("layernorm_epsilon", 1e-5)
    fields.allow("add_swa_attention_sink_bias", True)  # noqa: FBT003 - a value of a config
    fields.allow("add_full_attention_sink_bias")
    fields.allow("swa_num_attention_heads", sizes.heads)
    fields.allow("swa_num_key_value_heads", 2 * fields.count("num_key_value_heads", 4))
    fields.allow("swa_head_dim", sizes.head_dim)
    fields.allow("swa_v_head_dim", fields.count("v_head_dim", 128))
    fields.allow("swa_rope_theta", 10_000, 1e4)
    fields.allow("rope_theta", 5_000_000, 5e6)
    fields.allow("partial_rotary_factor", 0.334)
    experts = replace(sigmoid_experts(fields), shared_intermediate_size=0)
    value_dim = fields.count("v_head_dim", 128)
    scale = fields.get("attention_value_scale", 0.707)
    ropes = ropes_by_window(
        fields, sizes, windows, (1e4, 5e6), {"default": "default"}, partial=0.334
    )
    whole = make_architecture(
        fields,
        sizes,
        windows=windows,
        ropes=ropes,
        experts=[experts if kind == "sparse" else None for kind in sparse],
        qkv_bias=fields.flag("attention_bias"),
        value_scale=1.0 if scale is None else fields.number("attention_value_scale", 0.707),
        names=WeightNames(sinks="attention_sink_bias", mtp=("model.mtp.",)),
    )
    blocks = []
    for block in whole.blocks:
        shape = replace(block.attention, value_dim=value_dim)
        if shape.window:
            shape = replace(shape, num_kv_heads=2 * shape.num_kv_heads, has_sinks=True)
        blocks.append(replace(block, attention=shape))
    return replace(whole, blocks=tuple(blocks))


def mtp_layers(fields: ConfigFields, *keys: str) -> int:
    """Return how many multi-token-prediction layers may follow the last layer."""
    counts = [fields.get(key) for key in keys]
    return max(
        [count for count in counts if type(count) is int and 0 < count < MAX_MTP_LAYERS], default=0
    )


_MINIMAX_M2_FIELDS: dict[str, tuple[Any, ...]] = {
    "use_qk_norm": (True,),
    "qk_norm_type": ("per_layer",),
    "scoring_func": ("sigmoid",),
    "use_routing_bias": (True,),
    "shared_intermediate_size": (0,),
    "use_mtp": (True,),
    "mtp_transformer_layers": (1,),
}
_MIMO_WITHOUT_EFFECT = (
    *("attention_chunk_size", "first_k_dense_replace", "n_shared_experts"),
    "num_nextn_predict_layers",
)
_GLM4_MOE = {
    "partial_rotary_factor": 0.5,
    "norm_topk_prob": True,
    "n_shared_experts": 1,
    "num_nextn_predict_layers": 1,
}
_AFMOE_NORMS = NormNames(
    post_attention="post_attention_layernorm",
    pre_feedforward="pre_mlp_layernorm",
    post_feedforward="post_mlp_layernorm",
)
_AFMOE_FIELDS: dict[str, tuple[Any, ...]] = {
    "attention_bias": (),
    "n_group": (1,),
    "norm_topk_prob": (True,),
    "num_expert_groups": (1,),
    "num_limited_groups": (1,),
    "topk_group": (1,),
}
_AFMOE = {
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": True,
    "num_dense_layers": 1,
    "num_experts_per_tok": 6,
}
_HY_V3_FIELDS: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "moe_router_enable_expert_bias": True,
    "moe_router_use_sigmoid": True,
    "norm_topk_prob": True,
    "qk_norm": True,
}
_HY_V3_WITHOUT_EFFECT = (
    *("enable_attention_fp32_softmax", "enable_lm_head_fp32", "enable_moe_fp32_combine"),
    *("eod_token_id", "use_grouped_mm"),
)
_HY_V3 = {
    "moe_intermediate_size": 1536,
    "n_routed_experts": 192,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.826,
}
_SIGMOID_NAMES = {
    "num_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
    "route_norm": "norm_topk_prob",
}
_EXAONE_MOE = {
    "eos_token_id": 53,
    "moe_intermediate_size": 1024,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5,
}
_SOLAR_OPEN = {
    "moe_intermediate_size": 1280,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
}
SIGMOID_MOE = {
    "afmoe": Family(
        "AfmoeForCausalLM",
        _afmoe,
        128,
        _AFMOE,
        {**_SIGMOID_NAMES, "route_scale": "routed_scaling_factor", "score_func": "scoring_func"},
    ),
    "dots1": Family("Dots1ForCausalLM", _dots1),
    "exaone_moe": Family(
        "ExaoneMoeForCausalLM",
        _exaone_moe,
        None,
        _EXAONE_MOE,
        {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"},
    ),
    "glm4_moe": Family("Glm4MoeForCausalLM", _glm4_moe, None, _GLM4_MOE),
    "glm4v_moe_text": Family(
        "Glm4vMoeForConditionalGeneration",
        partial(_glm4_moe, sections="consecutive"),
        None,
        {**_GLM4_MOE, "attention_bias": True},
    ),
    "hy_v3": Family(
        "HYV3ForCausalLM",
        _hy_v3,
        128,
        _HY_V3,
        {
            **_SIGMOID_NAMES,
            "expert_hidden_dim": "moe_intermediate_size",
            "router_scaling_factor": "routed_scaling_factor",
        },
    ),
    "mimo_v2_flash": Family(
        "MiMoV2FlashForCausalLM",
        _mimo_v2_flash,
        192,
        {"norm_topk_prob": True, "rms_norm_eps": 1e-5},
    ),
    "minimax_m2": Family("MiniMaxM2ForCausalLM", _minimax_m2, 128, {"eos_token_id": 200_020}),
    "solar_open": Family("SolarOpenForCausalLM", _solar_open, 128, _SOLAR_OPEN),
}

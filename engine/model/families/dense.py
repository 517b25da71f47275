"""Families of dense models, except Llama's, Qwen's and Gemma's: how each fills the block."""

from __future__ import annotations

from functools import partial
from typing import Any

from ..config.architecture import NO_ROPE, Architecture, NormNames, WeightNames
from ..config.hf_config import ConfigFields, UnsupportedConfig
from ..config.rope import Sections, make_rope, read_rope
from .family import (
    FULL,
    DecoderSizes,
    Family,
    attention_biases,
    make_architecture,
    read_query_scaling,
    ropes_by_window,
    uniform_windows,
    windows_by_layer,
)

POST_NORM = NormNames(
    input="",
    post_attention="post_attention_layernorm",
    pre_feedforward="",
    post_feedforward="post_feedforward_layernorm",
)
# Attention and MLP share one norm.
SHARED_NORM = NormNames(pre_feedforward="input_layernorm")
ANY_ROPE = {"default", "dynamic", "linear", "llama3", "longrope", "yarn"}


def partial_rope(
    fields: ConfigFields,
    sizes: DecoderSizes,
    theta: float = 10_000.0,
    *,
    sections: Sections | None = None,
) -> Any:
    """Return the ropes of layers that rotate a part of each head."""
    rope = read_rope(
        fields, sizes.head_dim, sizes.positions, theta, may_be_partial=True, sections=sections
    )
    return [rope] * sizes.layers


def _glm(
    fields: ConfigFields,
    sizes: DecoderSizes,
    norms: NormNames | None = None,
    sections: Sections | None = None,
) -> Architecture:
    return make_architecture(
        fields,
        sizes,
        ropes=partial_rope(fields, sizes, sections=sections),
        qkv_bias=fields.flag("attention_bias"),
        names=WeightNames(
            norms=norms or NormNames(), gate_up=("gate_up_proj",), has_rope_pairs=True
        ),
    )


def glm4(
    fields: ConfigFields, sizes: DecoderSizes, sections: Sections | None = None
) -> Architecture:
    """Return GLM-4's block, which norms each sublayer's input and output."""
    norms = NormNames(
        post_attention="post_self_attn_layernorm", post_feedforward="post_mlp_layernorm"
    )
    return _glm(fields, sizes, norms, sections)


def _olmo2(fields: ConfigFields, sizes: DecoderSizes, **others: Any) -> Architecture:
    return make_architecture(
        fields,
        sizes,
        key_heads=sizes.heads,
        **attention_biases(fields),
        has_qk_norm=True,
        has_wide_qk_norm=True,
        names=WeightNames(norms=POST_NORM),
        **others,
    )


def _olmo3(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    windows = windows_by_layer(fields, sizes, fields.count("sliding_window"), every=4)
    theta = fields.number("rope_theta", 500_000.0)
    ropes = ropes_by_window(fields, sizes, windows, (theta, theta), {k: k for k in ANY_ROPE})
    return _olmo2(fields, sizes, windows=windows, ropes=ropes)


def _cohere(fields: ConfigFields, sizes: DecoderSizes, **others: Any) -> Architecture:
    fields.allow("use_qk_norm")
    fields.get("model_max_length")
    return make_architecture(
        fields,
        sizes,
        key_heads=sizes.heads,
        tie_word_embeddings=True,
        is_parallel=True,
        **attention_biases(fields),
        logit_scale=fields.number("logit_scale"),
        names=WeightNames(norms=SHARED_NORM, has_rope_pairs=True),
        **{"theta": 500_000.0, "has_layer_norm": True, **others},
    )


def _cohere2(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    every = fields.count("sliding_window_pattern", 4)
    windows = windows_by_layer(fields, sizes, fields.count("sliding_window"), every=every)
    rope = read_rope(fields, sizes.head_dim, sizes.positions, 10_000.0)
    ropes = [rope if window else NO_ROPE for window in windows]
    return cohere2(fields, sizes, windows=windows, ropes=ropes)


def cohere2(fields: ConfigFields, sizes: DecoderSizes, **others: Any) -> Architecture:
    """Return the block of Command A: attention and MLP read one norm."""
    for key, value in _COHERE2_FIELDS.items():
        fields.allow(key, value)
    for key in ("layer_switch", "use_parallel_embedding"):
        fields.get(key)
    return _cohere(fields, sizes, **others)


def granite(fields: ConfigFields, sizes: DecoderSizes, **others: Any) -> Architecture:
    """Return Granite's block, which has four multipliers."""
    return make_architecture(
        fields,
        sizes,
        key_heads=sizes.heads,
        scaling=fields.number("attention_multiplier"),
        **attention_biases(fields),
        mlp_bias=fields.flag("mlp_bias"),
        embedding_scale=fields.number("embedding_multiplier"),
        residual_scale=fields.number("residual_multiplier"),
        logit_scale=1 / fields.number("logits_scaling"),
        **others,
    )


def _seed_oss(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    return make_architecture(
        fields,
        sizes,
        key_heads=8,
        qkv_bias=fields.flag("attention_bias", default=True),
        o_proj_bias=fields.flag("attention_out_bias"),
        mlp_bias=fields.flag("mlp_bias"),
    )


def _smollm3(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    every = fields.count("no_rope_layer_interval", 4)
    turned = fields.get("no_rope_layers")
    if turned is None:
        turned = [int((layer + 1) % every != 0) for layer in range(sizes.layers)]
    if len(turned) != sizes.layers or not {*turned} <= {0, 1}:
        raise UnsupportedConfig(f"{fields.where} has unsupported no_rope_layers {turned!r}")
    is_on, window = fields.flag("use_sliding_window"), fields.get("sliding_window")
    fields.get("max_window_layers")
    kinds = fields.get("layer_types")
    if is_on and window is not None:
        raise UnsupportedConfig(f"{fields.where} has unsupported use_sliding_window")
    if kinds is not None and {*kinds} != {FULL}:
        raise UnsupportedConfig(f"{fields.where} has unsupported layer_types {kinds!r}")
    rope = read_rope(fields, sizes.head_dim, sizes.positions, 2e6)
    return make_architecture(
        fields,
        sizes,
        key_heads=4,
        ropes=[rope if is_turned else NO_ROPE for is_turned in turned],
        tie_word_embeddings=True,
        **attention_biases(fields),
        mlp_bias=fields.flag("mlp_bias"),
    )


def _exaone4(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    return make_architecture(
        fields,
        sizes,
        **exaone_layers(fields, sizes),
        has_qk_norm=True,
        names=WeightNames(norms=POST_NORM),
    )


def exaone_layers(fields: ConfigFields, sizes: DecoderSizes) -> dict[str, Any]:
    """Return the windows and ropes of EXAONE, whose layers without a window have no positions."""
    window, every = fields.get("sliding_window", 4096), fields.get("sliding_window_pattern", 4)
    rope = read_rope(fields, sizes.head_dim, sizes.positions, 10_000.0)
    ropes, windows = [rope] * sizes.layers, [0] * sizes.layers
    if window is None:
        windows_by_layer(fields, sizes, 1, every=1)
    else:
        count = every if type(every) is int and every > 0 else None
        if count is None and fields.get("layer_types") is None:
            raise UnsupportedConfig(
                f"{fields.where} has unsupported sliding_window_pattern {every!r}"
            )
        windows = windows_by_layer(fields, sizes, fields.count("sliding_window"), every=count or 1)
        ropes = [rope if own else NO_ROPE for own in windows]
    return {"windows": windows, "ropes": ropes}


def ernie4_5(fields: ConfigFields, sizes: DecoderSizes, **others: Any) -> Architecture:
    """Return ERNIE's block, which rotates pairs of neighbours."""
    is_biased = fields.flag("use_bias")
    return make_architecture(
        fields,
        sizes,
        theta=500_000.0,
        tie_word_embeddings=True,
        qkv_bias=is_biased,
        o_proj_bias=is_biased,
        mlp_bias=is_biased,
        **{"names": WeightNames(has_rope_pairs=True), **others},
    )


def hunyuan(fields: ConfigFields, sizes: DecoderSizes, **others: Any) -> Architecture:
    """Return Hunyuan's block, which norms queries and keys after the rope."""
    for key in _HUNYUAN_WITHOUT_EFFECT:
        fields.get(key)
    fields.allow("attention_head_dim", sizes.head_dim)
    fields.allow("norm_type", "rms", "hf_rms")
    for key in ("use_qk_norm", "use_rotary_pos_emb"):
        fields.allow(key, True)  # noqa: FBT003 - a value of a config
    parameters = dict(fields.get("rope_scaling") or fields.get("rope_parameters") or {})
    theta = parameters.setdefault("rope_theta", fields.number("rope_theta", 10_000.0))
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "dynamic" and (alpha := parameters.get("alpha")):
        dim = sizes.head_dim
        parameters = {"rope_theta": theta * alpha ** (dim / (dim - 2))}
    rope = make_rope(parameters, sizes.head_dim, sizes.positions, 10_000.0)
    return make_architecture(
        fields,
        sizes,
        key_heads=sizes.heads,
        ropes=[rope] * sizes.layers,
        **attention_biases(fields),
        has_qk_norm=True,
        is_qk_norm_late=True,
        **{"names": WeightNames(q_norm="query_layernorm", k_norm="key_layernorm"), **others},
    )


def _ministral3(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    parameters = dict(
        fields.get("rope_scaling") or fields.get("rope_parameters") or _MINISTRAL3_ROPE
    )
    query_scaling = read_query_scaling(parameters)
    parameters.setdefault("rope_theta", fields.get("rope_theta") or 1e6)
    rope = make_rope(parameters, sizes.head_dim, sizes.positions, 10_000.0)
    return make_architecture(
        fields,
        sizes,
        windows=uniform_windows(fields, sizes),
        ropes=[rope] * sizes.layers,
        query_scaling=query_scaling,
    )


def _ministral(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    window = fields.get("sliding_window")
    if window is None:
        return make_architecture(fields, sizes)
    windows = windows_by_layer(
        fields, sizes, fields.count("sliding_window"), every=sizes.layers + 1
    )
    return make_architecture(fields, sizes, windows=windows)


_COHERE2_FIELDS = {
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "rotary_pct": 1.0,
    "use_embedding_sharing": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
}
_HUNYUAN_WITHOUT_EFFECT = (
    *("cla_share_factor", "eod_token_id", "im_end_id", "im_newline_id", "im_start_id"),
    *("mask_init_id", "org_vocab_size", "pad_id", "sep_token_id", "text_end_id", "text_start_id"),
)
_MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
EPS = {"layer_norm_eps": "rms_norm_eps"}
_GLM_EOS = [151_329, 151_336, 151_338]
_GLM = {"attention_bias": True, "partial_rotary_factor": 0.5, "eos_token_id": _GLM_EOS}
GRANITE = {
    "attention_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "eos_token_id": 2,
}
DENSE = {
    "cohere": Family("CohereForCausalLM", _cohere, None, {"eos_token_id": 255_001}, EPS),
    "cohere2": Family("Cohere2ForCausalLM", _cohere2, None, {"eos_token_id": 255_001}, EPS),
    "ernie4_5": Family("Ernie4_5ForCausalLM", ernie4_5, 128, {"eos_token_id": 2}),
    "exaone4": Family("Exaone4ForCausalLM", _exaone4, None, {"eos_token_id": 2}),
    "glm": Family("GlmForCausalLM", _glm, 128, _GLM),
    "glm4": Family("Glm4ForCausalLM", glm4, 128, _GLM),
    "glm4v_text": Family(
        "Glm4vForConditionalGeneration",
        partial(glm4, sections="consecutive"),
        None,
        _GLM,
    ),
    "granite": Family("GraniteForCausalLM", granite, None, GRANITE),
    "hunyuan_v1_dense": Family("HunYuanDenseV1ForCausalLM", hunyuan, None, {"eos_token_id": 2}),
    "ministral": Family(
        "MinistralForCausalLM", _ministral, None, {"sliding_window": 4096, "eos_token_id": 2}
    ),
    "ministral3": Family("Ministral3ForCausalLM", _ministral3, 128, {"eos_token_id": 2}),
    "olmo2": Family("Olmo2ForCausalLM", _olmo2, None, {"eos_token_id": 50_279}),
    "olmo3": Family(
        "Olmo3ForCausalLM", _olmo3, None, {"eos_token_id": 50_279, "sliding_window": 4096}
    ),
    "seed_oss": Family("SeedOssForCausalLM", _seed_oss, 128, {"eos_token_id": 2}),
    "smollm3": Family("SmolLM3ForCausalLM", _smollm3, None, {"eos_token_id": 128_001}),
}

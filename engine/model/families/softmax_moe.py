"""Families of mixtures of experts with softmax routers, except Mixtral's, Qwen3's and gpt-oss'."""

from __future__ import annotations

from typing import Any

from ...kernels.experts import Scoring
from ..config.architecture import NO_ROPE, Architecture, Experts, WeightNames
from ..config.hf_config import ConfigFields, UnsupportedConfig
from ..config.rope import make_rope, read_rope
from .dense import GRANITE, cohere2, ernie4_5, granite, hunyuan
from .family import (
    FULL,
    SLIDING,
    DecoderSizes,
    Family,
    attention_biases,
    count_experts,
    make_architecture,
    uniform_windows,
    windows_by_layer,
)
from .sigmoid_moe import sparse_layers


def _cohere2_moe(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    dense, width = fields.get("first_k_dense_replace") or 0, fields.count("intermediate_size")
    scoring: dict[str, Scoring] = {"softmax": "softmax_chosen", "sigmoid": "sigmoid"}
    scales = {"average": 0.5, "sum": 1.0}
    chosen = fields.get("expert_selection_fn", "softmax")
    combined = fields.get("shared_expert_combination_strategy", "average")
    if chosen not in scoring or combined not in scales:
        raise UnsupportedConfig(f"{fields.where} has unsupported experts {chosen!r}, {combined!r}")
    experts = Experts(
        num_experts=count_experts(fields),
        num_experts_per_tok=fields.count("num_experts_per_tok"),
        intermediate_size=width,
        scoring=scoring[chosen],
        norm_topk_prob=fields.flag("norm_topk_prob", default=True),
        shared_intermediate_size=(fields.get("num_shared_experts") or 0) * width,
        output_scale=scales[combined],
    )
    sparse = sparse_layers(fields, sizes, experts, dense)
    every = fields.count("sliding_window_pattern", 4)
    dense_every = fields.count("prefix_dense_sliding_window_pattern", 1)
    kinds = fields.get("layer_types") or [
        SLIDING if (layer + 1) % dense_every else FULL for layer in range(dense)
    ] + [SLIDING if (layer + 1) % every else FULL for layer in range(sizes.layers - dense)]
    window = fields.count("sliding_window", 4096)
    windows = [window if kind == SLIDING else 0 for kind in kinds]
    if len(kinds) != sizes.layers or not {*kinds} <= {FULL, SLIDING}:
        raise UnsupportedConfig(f"{fields.where} has unsupported layer_types {kinds!r}")
    rope = read_rope(fields, sizes.head_dim, sizes.positions, 10_000.0)
    turned = [
        own or (dense_every == 1 and not some) for own, some in zip(windows, sparse, strict=True)
    ]
    return cohere2(
        fields,
        sizes,
        windows=windows,
        ropes=[rope if is_turned else NO_ROPE for is_turned in turned],
        experts=sparse,
        intermediate_size=fields.count("prefix_dense_intermediate_size", width),
        has_layer_norm=fields.get("rms_norm_eps") is None,
        eps=fields.number("layer_norm_eps", 1e-5),
    )


def qwen_experts(fields: ConfigFields, sizes: DecoderSizes, **others: Any) -> list[Experts | None]:
    """Return the experts of each layer; layers without have an MLP. `others` are of `Experts`."""
    experts = Experts(
        num_experts=count_experts(fields),
        num_experts_per_tok=fields.count("num_experts_per_tok"),
        intermediate_size=fields.count("moe_intermediate_size"),
        **others,
    )
    dense, every = fields.get("mlp_only_layers") or (), fields.count("decoder_sparse_step", 1)
    return [
        None if layer in dense or (layer + 1) % every else experts for layer in range(sizes.layers)
    ]


def _qwen2_moe(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    if fields.flag("use_sliding_window"):
        raise UnsupportedConfig(f"{fields.where} has unsupported use_sliding_window")
    for key in ("sliding_window", "max_window_layers"):
        fields.get(key)
    windows = windows_by_layer(fields, sizes, -1, every=1)
    if any(windows):
        raise UnsupportedConfig(f"{fields.where} has sliding layers but no window")
    experts = qwen_experts(
        fields,
        sizes,
        norm_topk_prob=fields.flag("norm_topk_prob"),
        shared_intermediate_size=fields.count("shared_expert_intermediate_size"),
        has_shared_gate=True,
    )
    return make_architecture(
        fields,
        sizes,
        experts=experts,
        qkv_bias=fields.flag("qkv_bias", default=True),
        names=WeightNames(shared_experts="shared_expert"),
    )


def _olmoe(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    fields.allow("clip_qkv")
    experts = Experts(
        num_experts=count_experts(fields),
        num_experts_per_tok=fields.count("num_experts_per_tok"),
        intermediate_size=fields.count("intermediate_size"),
        norm_topk_prob=fields.flag("norm_topk_prob"),
    )
    return make_architecture(
        fields,
        sizes,
        key_heads=sizes.heads,
        experts=[experts] * sizes.layers,
        **attention_biases(fields),
        has_qk_norm=True,
        has_wide_qk_norm=True,
    )


def _ernie4_5_moe(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    for key, values in _ERNIE_MOE_FIELDS.items():
        fields.allow(key, *values)
    for key in ("moe_capacity", "num_nextn_predict_layers"):
        fields.get(key)  # for training, and for layers that are left out
    width, shared = fields.count("moe_intermediate_size"), fields.get("moe_num_shared_experts") or 0
    experts = Experts(
        num_experts=count_experts(fields),
        num_experts_per_tok=fields.count("num_experts_per_tok"),
        intermediate_size=width,
        has_correction_bias=True,
        shared_intermediate_size=shared * width,
    )
    first, last = fields.get("moe_layer_start_index"), fields.get("moe_layer_end_index")
    last = sizes.layers - 1 if last == -1 else last
    every = fields.count("moe_layer_interval")
    return ernie4_5(
        fields,
        sizes,
        experts=[
            experts if first <= layer <= last and not (layer + 1) % every else None
            for layer in range(sizes.layers)
        ],
        names=WeightNames(
            has_rope_pairs=True,
            correction_bias="moe_statics.e_score_correction_bias",
            correction_bias_axes=(1,),
            mtp=("model.mtp_",),
        ),
    )


def _hunyuan_moe(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    width = fields.count("intermediate_size")
    for key in _HUNYUAN_MOE_WITHOUT_EFFECT:
        fields.get(key)
    for key, value in {**_HUNYUAN_MOE_FIELDS, "moe_intermediate_size": width}.items():
        fields.allow(key, value, [value] * sizes.layers)
    experts = Experts(
        num_experts=_one_of_all(fields, "num_experts", sizes.layers),
        num_experts_per_tok=_one_of_all(fields, "moe_topk", sizes.layers),
        intermediate_size=width,
        shared_intermediate_size=width,
    )
    return hunyuan(
        fields,
        sizes,
        experts=[experts] * sizes.layers,
        names=WeightNames(
            q_norm="query_layernorm",
            k_norm="key_layernorm",
            router="gate.wg",
            shared_experts="shared_mlp",
        ),
    )


def _granite_moe(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    width, shared = fields.count("intermediate_size"), fields.get("shared_intermediate_size") or 0
    if shared:
        raise UnsupportedConfig(
            f"{fields.where} has unsupported shared_intermediate_size {shared!r}"
        )
    experts = Experts(
        num_experts=count_experts(fields),
        num_experts_per_tok=fields.count("num_experts_per_tok"),
        intermediate_size=width,
        scoring="softmax_chosen",
    )
    return granite(
        fields,
        sizes,
        experts=[experts] * sizes.layers,
        names=WeightNames(
            experts="block_sparse_moe",
            router="router.layer",
            expert=("input_linear.weight", "", "output_linear.weight"),
            stacked_experts="rows",
        ),
    )


def _phi_moe(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    fields.get("input_jitter_noise")  # for training
    parameters = dict(fields.get("rope_scaling") or fields.get("rope_parameters") or {})
    for key in ("rope_theta", "original_max_position_embeddings"):
        if (value := fields.get(key)) is not None:
            parameters.setdefault(key, value)
    scales = {parameters.pop(key, None) for key in ("short_mscale", "long_mscale")}
    if len(scales) > 1:
        raise UnsupportedConfig("its rope scales long and short contexts differently")
    if scales != {None}:
        parameters["attention_factor"] = scales.pop()
    kinds = {"default": "default", "longrope": "longrope"}
    rope = make_rope(parameters, sizes.head_dim, sizes.positions, 1e6, kinds)
    width = fields.count("intermediate_size")
    fields.allow("expert_intermediate_size", width)
    experts = Experts(
        num_experts=count_experts(fields),
        num_experts_per_tok=fields.count("num_experts_per_tok"),
        intermediate_size=width,
        scoring="sparsemixer",
        router_jitter=fields.number("router_jitter_noise"),
    )
    return make_architecture(
        fields,
        sizes,
        key_heads=8,
        windows=uniform_windows(fields, sizes),
        ropes=[rope] * sizes.layers,
        experts=[experts] * sizes.layers,
        **attention_biases(fields),
        head_bias=fields.flag("lm_head_bias"),
        has_layer_norm=True,
        has_norm_bias=True,
        names=WeightNames(experts="block_sparse_moe", expert=("w1", "w3", "w2")),
    )


def _one_of_all(fields: ConfigFields, key: str, layers: int) -> int:
    """Return a count that may be a list over layers, if it is the same for all."""
    value = fields.get(key)
    if isinstance(value, list) and len(value) == layers and len({*value}) == 1:
        value = value[0]
    if type(value) is not int or value < 1:
        raise UnsupportedConfig(f"{fields.where} has unsupported {key} {value!r}")
    return value


_HUNYUAN_MOE_FIELDS: dict[str, Any] = {
    "moe_layer_num_skipped": 0,
    "norm_topk_prob": True,
    "num_shared_expert": 1,
    "routed_scaling_factor": 1.0,
    "use_mixed_mlp_moe": True,
}
# Fields shared with Hunyuan's models for images, classification and latent attention.
_HUNYUAN_MOE_WITHOUT_EFFECT = (
    *("anyres_pooling_size", "anyres_vit_max_image_size", "class_num", "dense_list"),
    *("image_token_id", "kv_lora_rank", "num_media_embeds", "pool_type", "q_lora_rank"),
    *("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "video_end_id", "video_start_id"),
    *("vit_input_resolution", "vit_mapping_type", "vit_norm_type", "vit_patch", "vit_token"),
)
_ERNIE_MOE_FIELDS: dict[str, tuple[Any, ...]] = {
    "moe_use_aux_free": (True,),
    "moe_gate": ("topk",),
    "moe_norm_min": (1e-12,),
    "router_aux_loss_coef": (0.001,),
    "use_rmsnorm": (True,),
}
_ERNIE_MOE = {
    "eos_token_id": 2,
    "moe_num_experts": 64,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
    "moe_num_shared_experts": 2,
}
SOFTMAX_MOE = {
    "cohere2_moe": Family(
        "Cohere2MoeForCausalLM",
        _cohere2_moe,
        128,
        {"eos_token_id": 255_001, "num_experts": 8, "num_experts_per_tok": 2},
    ),
    "ernie4_5_moe": Family(
        "Ernie4_5_MoeForCausalLM",
        _ernie4_5_moe,
        None,
        _ERNIE_MOE,
        {"moe_num_experts": "num_experts", "moe_k": "num_experts_per_tok"},
    ),
    "granitemoe": Family(
        "GraniteMoeForCausalLM",
        _granite_moe,
        None,
        {**GRANITE, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "hunyuan_v1_moe": Family("HunYuanMoEV1ForCausalLM", _hunyuan_moe, None, {"eos_token_id": 2}),
    "olmoe": Family("OlmoeForCausalLM", _olmoe, None, {"eos_token_id": 50_279}),
    "phimoe": Family(
        "PhimoeForCausalLM", _phi_moe, None, {"eos_token_id": 2, "router_jitter_noise": 0.01}
    ),
    "qwen2_moe": Family("Qwen2MoeForCausalLM", _qwen2_moe),
}

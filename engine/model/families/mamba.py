"""Families of Mamba-2 layers, alone or between layers of attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...kernels.recurrence import RecurrentShape, StateSpace
from ..config.architecture import (
    NO_ATTENTION,
    NO_ROPE,
    Architecture,
    Experts,
    Multiplier,
    NormNames,
    Recurrence,
    WeightNames,
)
from ..config.hf_config import ConfigFields, UnsupportedConfig
from ..config.rope import make_rope, read_rope
from .dense import GRANITE, granite
from .family import FULL, DecoderSizes, Family, attention_biases, make_architecture
from .hybrid import LINEAR, with_recurrence

# Kinds of layers by all of their names.
_KINDS = {
    **dict.fromkeys(("attention", FULL, "*"), FULL),
    **dict.fromkeys(("mamba", LINEAR, "M"), LINEAR),
    **dict.fromkeys(("mlp", "-"), "mlp"),
    **dict.fromkeys(("moe", "E"), "moe"),
}


def _mamba(
    fields: ConfigFields,
    sizes: DecoderSizes,
    names: tuple[str, ...],
    *biases: str,
    inner: int | None = None,
) -> Recurrence:
    """Return a Mamba-2 mixer.

    `names` are the fields of its number of heads, their width, groups, state and taps. The first
    of `biases` is set if the convolution has one, the second if the projections have. `inner` is
    the width of all heads, if that is not a multiple of the hidden size.
    """
    heads, width, groups, state, taps = names
    num_heads = fields.count(heads)
    inner = inner or fields.count("mamba_expand", 2) * sizes.hidden
    configured = fields.get(width)
    head_dim = inner // num_heads if configured in (None, "auto") else fields.count(width)
    if num_heads * head_dim != inner:
        raise UnsupportedConfig(f"{num_heads} heads of {head_dim} are not {inner} wide")
    low, high = map(_bound, fields.get("time_step_limit") or (0.0, float("inf")))
    rule = StateSpace(num_heads, head_dim, fields.count(groups), fields.count(state), (low, high))
    if num_heads % rule.num_groups:
        raise UnsupportedConfig(
            f"{num_heads} heads cannot share {rule.num_groups} groups of B and C evenly"
        )
    shape = RecurrentShape(sum(rule.widths), fields.count(taps), rule=rule)
    fields.allow("mamba_hidden_act", "silu", "swish")
    for key in _WITHOUT_EFFECT:
        fields.get(key)
    conv, proj = biases
    return Recurrence(
        shape,
        norm_groups=rule.num_groups,
        has_conv_bias=fields.flag(conv, default=True),
        has_proj_bias=fields.flag(proj),
    )


def _bound(value: Any) -> float:
    """Return a bound, which transformers saves as an object if it is infinite."""
    return float(value["__float__"] if isinstance(value, dict) else value)


def _kinds(fields: ConfigFields, sizes: DecoderSizes, names: Sequence[str]) -> list[str]:
    """Return the kinds of layers by their names."""
    if len(names) != sizes.layers or not {*names} <= _KINDS.keys():
        raise UnsupportedConfig(f"{fields.where} has unsupported layer kinds {list(names)!r}")
    return [_KINDS[name] for name in names]


def _mamba2(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    names = ("num_heads", "head_dim", "n_groups", "state_size", "conv_kernel")
    mixer = _mamba(fields, sizes, names, "use_conv_bias", "use_bias")
    architecture = make_architecture(
        fields,
        sizes,
        ropes=[NO_ROPE] * sizes.layers,
        names=WeightNames(
            embed_tokens="backbone.embeddings",
            norm="backbone.norm_f",
            layers="backbone.layers",
            norms=NormNames(input="norm", pre_feedforward=""),
            recurrence="mixer",
            in_proj=("in_proj",),
        ),
    )
    architecture = with_recurrence(architecture, [LINEAR] * sizes.layers, LINEAR, mixer)
    return replace(
        architecture,
        max_positions=sizes.positions,
        blocks=tuple(replace(block, has_mlp=False) for block in architecture.blocks),
    )


def _bamba(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    attending = set(fields.get("attn_layer_indices") or ())
    kinds = [FULL if layer in attending else LINEAR for layer in range(sizes.layers)]
    for key in ("layer_types", "layers_block_type"):
        if names := fields.get(key):
            kinds = _kinds(fields, sizes, names)
    parameters = dict(fields.get("rope_parameters") or fields.get("rope_scaling") or {})
    parameters.setdefault("rope_theta", fields.get("rope_theta"))
    parameters["partial_rotary_factor"] = 0.5
    rope = make_rope(parameters, sizes.head_dim, sizes.positions, 10_000.0)
    fields.get("attn_rotary_emb")
    architecture = make_architecture(
        fields,
        sizes,
        key_heads=8,
        ropes=[rope] * sizes.layers,
        **attention_biases(fields),
        mlp_bias=fields.flag("mlp_bias"),
        names=WeightNames(
            norm="model.final_layernorm",
            norms=NormNames(pre_feedforward="pre_ff_layernorm"),
            mlp="feed_forward",
            recurrence="mamba",
            in_proj=("in_proj",),
        ),
    )
    mixer = _mamba(fields, sizes, _NAMES, *_BIASES)
    return with_recurrence(architecture, kinds, LINEAR, mixer)


def _granite_hybrid(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    names = fields.get("layer_types") or fields.get("layers_block_type")
    kinds = _kinds(fields, sizes, names or [LINEAR] * sizes.layers)
    shared = fields.count("shared_intermediate_size", 1024)
    names = WeightNames(
        recurrence="mamba",
        in_proj=("in_proj",),
        mlp="shared_mlp",
        gate_up=("input_linear",),
        down_proj="output_linear",
        experts="block_sparse_moe",
        router="router.layer",
        expert=("input_linear.weight", "", "output_linear.weight"),
        stacked_experts="rows",
        shared_experts=".shared_mlp",
    )
    experts = None
    if fields.get("num_local_experts"):
        experts = Experts(
            num_experts=fields.count("num_local_experts"),
            num_experts_per_tok=fields.count("num_experts_per_tok"),
            intermediate_size=fields.count("intermediate_size"),
            scoring="softmax_chosen",
            shared_intermediate_size=shared,
        )
    else:
        fields.get("num_experts_per_tok")
    rope = NO_ROPE
    if fields.get("position_embedding_type") == "rope":
        rope = read_rope(fields, sizes.head_dim, sizes.positions, 10_000.0)
    for key in _GRANITE_WITHOUT_EFFECT:
        fields.get(key)
    architecture = granite(
        fields,
        sizes,
        ropes=[rope] * sizes.layers,
        experts=[experts] * sizes.layers,
        intermediate_size=shared,
        names=names,
    )
    fields.get("intermediate_size")
    mixer = _mamba(fields, sizes, _NAMES, *_BIASES)
    return with_recurrence(architecture, kinds, LINEAR, mixer)


def _falcon_h1(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    """Return Falcon-H1: its layers have attention and Mamba-2 side by side, and multipliers."""
    for key in ("layer_types", "layers_block_type", "mamba_use_mlp", "attn_layer_indices"):
        fields.get(key)
    rope = read_rope(fields, sizes.head_dim, sizes.positions, 10_000.0)
    architecture = make_architecture(
        fields,
        sizes,
        key_heads=8,
        ropes=[rope] * sizes.layers,
        **attention_biases(fields),
        mlp_bias=fields.flag("mlp_bias"),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        logit_scale=fields.number("lm_head_multiplier", 1.0),
        names=WeightNames(
            norm="model.final_layernorm",
            norms=NormNames(pre_feedforward="pre_ff_layernorm"),
            mlp="feed_forward",
            recurrence="mamba",
            in_proj=("in_proj",),
        ),
    )
    inner = fields.get("mamba_d_ssm")
    mixer = _mamba(fields, sizes, _NAMES, *_BIASES, inner=inner)
    fields.allow("projectors_bias")
    if fields.flag("mamba_rms_norm"):
        is_first = fields.flag("mamba_norm_before_gate", default=True)
        mixer = replace(mixer, is_norm_first=is_first)
    else:
        fields.get("mamba_norm_before_gate")
        mixer = replace(mixer, norm_groups=0)
    factors = _multipliers(fields, architecture, mixer)
    blocks = (
        replace(block, recurrence=mixer, multipliers=factors) for block in architecture.blocks
    )
    return replace(architecture, blocks=tuple(blocks))


def _multipliers(
    fields: ConfigFields, architecture: Architecture, mixer: Recurrence
) -> tuple[Multiplier, ...]:
    """Return the factors of a layer's weights (maximal update parametrisation)."""
    shape, inner = architecture.blocks[0].attention, architecture.intermediate_size
    queries, keys = (heads * shape.key_dim for heads in (shape.num_query_heads, shape.num_kv_heads))
    gate, down = _numbers(fields, "mlp_multipliers", 2)
    multipliers = [
        Multiplier("qkv_proj", fields.number("attention_in_multiplier", 1.0)),
        Multiplier("qkv_proj", fields.number("key_multiplier", 1.0), queries, keys),
        Multiplier("o_proj", fields.number("attention_out_multiplier", 1.0)),
        Multiplier("in_proj", fields.number("ssm_in_multiplier", 1.0)),
        Multiplier("out_proj", fields.number("ssm_out_multiplier", 1.0)),
        Multiplier("gate_up_proj", gate, 0, inner),
        Multiplier("down_proj", down),
    ]
    assert isinstance(mixer.shape.rule, StateSpace)
    x, b, c = mixer.shape.rule.widths
    sizes = (mixer.inner_size, x, b, c, mixer.shape.rule.num_heads)
    first = 0
    for size, factor in zip(sizes, _numbers(fields, "ssm_multipliers", 5), strict=True):
        multipliers.append(Multiplier("in_proj", factor, first, size))
        first += size
    return tuple(one for one in multipliers if one.factor != 1)


def _numbers(fields: ConfigFields, key: str, count: int) -> list[float]:
    """Return `count` multipliers, 1 if the config has none."""
    numbers = fields.get(key) or [1.0] * count
    if len(numbers) != count:
        raise UnsupportedConfig(f"{fields.where} has unsupported {key} {numbers!r}")
    return [float(number) for number in numbers]


def _nemotron_h(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    names = fields.get("layers_block_type") or fields.get("layer_types")
    pattern = fields.get("hybrid_override_pattern")
    kinds = _kinds(fields, sizes, names or list(pattern or ""))
    experts = _nemotron_experts(fields) if "moe" in kinds else None
    for key in _NEMOTRON_WITHOUT_EFFECT:
        fields.get(key)
    fields.allow("mlp_hidden_act", "relu2")
    fields.allow("use_bias")
    fields.allow("sliding_window")
    names = ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel")
    wide = fields.count("mamba_num_heads") * fields.count("mamba_head_dim")
    mixer = _mamba(fields, sizes, names, "use_conv_bias", "mamba_proj_bias", inner=wide)
    architecture = make_architecture(
        fields,
        sizes,
        ropes=[NO_ROPE] * sizes.layers,
        gate="relu2",
        **attention_biases(fields),
        mlp_bias=fields.flag("mlp_bias"),
        names=WeightNames(
            embed_tokens="backbone.embeddings",
            norm="backbone.norm_f",
            layers="backbone.layers",
            norms=NormNames(input="norm", pre_feedforward="norm"),
            attention="mixer",
            mlp="mixer",
            gate_up=("up_proj",),
            experts="mixer",
            expert=("", "up_proj", "down_proj"),
            recurrence="mixer",
            in_proj=("in_proj",),
        ),
    )
    architecture = with_recurrence(architecture, kinds, LINEAR, mixer)
    of_kinds: dict[str, dict[str, Any]] = {
        "mlp": {"attention": NO_ATTENTION},
        "moe": {"attention": NO_ATTENTION, "experts": experts},
    }
    blocks = [
        replace(block, **of_kinds.get(kind, {"has_mlp": False}))
        for block, kind in zip(architecture.blocks, kinds, strict=True)
    ]
    return replace(architecture, blocks=tuple(blocks), max_positions=sizes.positions)


def _nemotron_experts(fields: ConfigFields) -> Experts:
    """Return the experts of Nemotron 3, which have no gate."""
    latent = fields.count("moe_latent_size") if fields.get("moe_latent_size") else 0
    return Experts(
        num_experts=fields.count("n_routed_experts"),
        num_experts_per_tok=fields.count("num_experts_per_tok"),
        intermediate_size=fields.count("moe_intermediate_size"),
        scoring="sigmoid",
        norm_topk_prob=fields.flag("norm_topk_prob", default=True),
        has_correction_bias=True,
        num_groups=fields.count("n_group", 1),
        topk_groups=fields.count("topk_group", 1),
        routed_scaling_factor=fields.number("routed_scaling_factor", 1.0),
        shared_intermediate_size=fields.count("moe_shared_expert_intermediate_size"),
        latent_size=latent,
    )


_NAMES = ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")
_BIASES = ("mamba_conv_bias", "mamba_proj_bias")
_GRANITE_WITHOUT_EFFECT = (
    *("rope_theta", "rope_scaling", "rope_parameters"),
    *("init_method", "normalization_function"),
)
_WITHOUT_EFFECT = (
    *("mamba_expand", "mamba_chunk_size", "chunk_size", "expand", "time_step_rank", "mamba_d_ssm"),
    *("time_step_min", "time_step_max", "time_step_floor", "time_step_init_scheme"),
    *("residual_in_fp32", "rescale_prenorm_residual", "num_logits_to_keep", "hidden_act"),
    *("use_mamba_kernels", "z_loss_coefficient", "mamba_dt_rank"),
)
_NEMOTRON_WITHOUT_EFFECT = (
    *("mamba_ssm_cache_dtype", "mtp_layers_block_type", "moe_intermediate_size", "n_group"),
    *("moe_shared_expert_intermediate_size", "moe_latent_size", "moe_shared_expert_overlap"),
    *("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "norm_topk_prob"),
    *("num_nextn_predict_layers", "routed_scaling_factor", "topk_group", "attention_head_dim"),
    *("rope_parameters", "rope_theta", "partial_rotary_factor", "layer_types"),
)
_EPS = {"layer_norm_epsilon": "rms_norm_eps"}
_MIXER = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "eos_token_id": 2,
}
_NEMOTRON = {
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "eos_token_id": 2,
}
_MAMBA2 = {
    "num_heads": 128,
    "head_dim": 64,
    "n_groups": 8,
    "state_size": 128,
    "conv_kernel": 4,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "intermediate_size": 1,
    "max_position_embeddings": 2**18,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
MAMBA: dict[str, Family] = {
    "bamba": Family("BambaForCausalLM", _bamba, None, _MIXER, sorts_rows=True),
    "falcon_h1": Family(
        "FalconH1ForCausalLM", _falcon_h1, None, {**_MIXER, "mamba_d_ssm": 1024}, sorts_rows=True
    ),
    "granitemoehybrid": Family(
        "GraniteMoeHybridForCausalLM",
        _granite_hybrid,
        None,
        {**GRANITE, **_MIXER, "num_local_experts": 8, "num_experts_per_tok": 2},
        sorts_rows=True,
    ),
    "mamba2": Family("Mamba2ForCausalLM", _mamba2, None, _MAMBA2, _EPS, sorts_rows=True),
    "nemotron_h": Family(
        "NemotronHForCausalLM", _nemotron_h, 128, _NEMOTRON, _EPS, sorts_rows=True
    ),
}

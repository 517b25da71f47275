"""Families of latent attention (MLA): DeepSeek V2 to V3.2, Kimi K2, GLM 4.7 and 5, Mistral 4."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ..config.architecture import Architecture, Experts, Indexer, Latent, WeightNames
from ..config.hf_config import ConfigFields, UnsupportedConfig
from ..config.rope import magnitude, make_rope
from .family import DecoderSizes, Family, make_architecture, read_query_scaling
from .sigmoid_moe import mtp_layers, sigmoid_experts


def _deepseek_v3(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    dense, every = fields.get("first_k_dense_replace", 3), fields.count("moe_layer_freq", 1)
    experts = sigmoid_experts(fields)
    mixed = [
        experts if layer >= dense and layer % every == 0 else None for layer in range(sizes.layers)
    ]
    return _mla(fields, sizes, mixed)


def _glm4_moe_lite(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    return _mla(fields, sizes, _experts_by_type(fields, sizes, 1))


def _deepseek_v32(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    return _sparse_mla(fields, sizes, [True] * sizes.layers, has_rope_pairs=False)


def _glm_moe_dsa(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    """Return the architecture of GLM-5: some layers use the selection of the layer before."""
    kinds, pattern = fields.get("indexer_types"), fields.get("index_topk_pattern")
    every, offset = fields.get("index_topk_freq") or 1, fields.get("index_skip_topk_offset", 2)
    if kinds is None and isinstance(pattern, str):
        kinds = [_PATTERN.get(letter, letter) for letter in pattern]
    elif kinds is None:
        kinds = pattern or [
            "shared" if max(layer - offset + 1, 0) % max(every, 1) else "full"
            for layer in range(sizes.layers)
        ]
    if len(kinds) != sizes.layers or not {*kinds} <= {"full", "shared"} or kinds[0] != "full":
        raise UnsupportedConfig(f"{fields.where} has unsupported indexer_types {kinds!r}")
    return _sparse_mla(fields, sizes, [kind == "full" for kind in kinds], has_rope_pairs=True)


def _sparse_mla(
    fields: ConfigFields, sizes: DecoderSizes, has_indexer: list[bool], *, has_rope_pairs: bool
) -> Architecture:
    """Return a decoder with latent attention to selected tokens; some layers have an indexer."""
    kinds = fields.get("layer_types") or ["indexed_attention"]
    if {*kinds} != {"indexed_attention"}:
        raise UnsupportedConfig(f"{fields.where} has unsupported layer_types {kinds!r}")
    fields.count("q_lora_rank")  # index queries are projected from latents
    if fields.get("indexer_rope_interleave", has_rope_pairs) is not has_rope_pairs:
        raise UnsupportedConfig(f"{fields.where} has unsupported indexer_rope_interleave")
    dim = fields.count("index_head_dim", 128)
    indexer = Indexer(fields.count("index_n_heads"), dim, has_rope_pairs)
    experts = _experts_by_type(fields, sizes, 3)
    architecture = _mla(fields, sizes, experts, has_rope_pairs=True)
    num_selected = fields.count("index_topk", 2048)
    blocks = []
    for block, has_own in zip(architecture.blocks, has_indexer, strict=True):
        latent = block.latent
        assert latent is not None
        if dim < latent.rope_dim:
            raise UnsupportedConfig(f"{fields.where} has unsupported index_head_dim {dim}")
        shape = replace(block.attention, num_selected=num_selected, index_dim=dim if has_own else 0)
        blocks.append(replace(block, attention=shape, indexer=indexer if has_own else None))
    return replace(architecture, blocks=tuple(blocks))


def _experts_by_type(
    fields: ConfigFields, sizes: DecoderSizes, num_dense: int
) -> list[Experts | None]:
    """Return the experts of each layer, by its type or after a number of dense layers."""
    kinds = fields.get("mlp_layer_types")
    dense = fields.get("first_k_dense_replace", num_dense)
    if kinds is None:
        kinds = ["dense" if layer < dense else "sparse" for layer in range(sizes.layers)]
    if len(kinds) != sizes.layers or not {*kinds} <= {"dense", "sparse"}:
        raise UnsupportedConfig(f"{fields.where} has unsupported mlp_layer_types {kinds!r}")
    experts = sigmoid_experts(fields)
    return [experts if kind == "sparse" else None for kind in kinds]


def _deepseek_v2(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    method = fields.get("topk_method", "greedy")
    fields.allow("scoring_func", "softmax")
    if method not in {"greedy", "group_limited_greedy"} or fields.flag("norm_topk_prob"):
        raise UnsupportedConfig(f"{fields.where} has unsupported topk_method {method!r}")
    groups, chosen = fields.get("n_group") or 1, fields.get("topk_group") or 1
    is_grouped = method == "group_limited_greedy"
    width = fields.count("moe_intermediate_size", 1407)
    experts = Experts(
        num_experts=fields.count("n_routed_experts", 64),
        num_experts_per_tok=fields.count("num_experts_per_tok"),
        intermediate_size=width,
        norm_topk_prob=False,
        num_groups=groups if is_grouped else 1,
        topk_groups=chosen if is_grouped else 1,
        num_best_of_group=1,
        routed_scaling_factor=fields.number("routed_scaling_factor", 1.0),
        shared_intermediate_size=width * fields.count("n_shared_experts", 2),
    )
    dense, every = fields.get("first_k_dense_replace", 0), fields.count("moe_layer_freq", 1)
    mixed = [
        experts if layer >= dense and layer % every == 0 else None for layer in range(sizes.layers)
    ]
    return _mla(fields, sizes, mixed)


def _mistral4(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    width = fields.count("moe_intermediate_size", 2048)
    experts = Experts(
        num_experts=fields.count("n_routed_experts"),
        num_experts_per_tok=fields.count("num_experts_per_tok"),
        intermediate_size=width,
        norm_topk_prob=fields.flag("norm_topk_prob"),
        num_groups=fields.count("n_group", 1),
        topk_groups=fields.count("topk_group", 1),
        routed_scaling_factor=fields.number("routed_scaling_factor", 1.0),
        shared_intermediate_size=width * fields.count("n_shared_experts", 1),
    )
    dense = fields.get("first_k_dense_replace") or 0
    mixed = [experts if layer >= dense else None for layer in range(sizes.layers)]
    names = WeightNames(
        expert=("experts.gate_up_proj", "", "experts.down_proj"), stacked_experts="rows"
    )
    return replace(_mla(fields, sizes, mixed, _MISTRAL_ROPE), names=names)


def _mla(
    fields: ConfigFields,
    sizes: DecoderSizes,
    experts: list[Experts | None],
    missing_rope: Mapping[str, Any] = MappingProxyType({}),
    *,
    has_rope_pairs: bool | None = None,
) -> Architecture:
    """Return a decoder with latent attention; None leaves rope pairs to the config."""
    for key in _WITHOUT_EFFECT:
        fields.get(key)
    query_rank = fields.get("q_lora_rank")
    latent = Latent(
        query_rank=0 if query_rank is None else fields.count("q_lora_rank"),
        kv_rank=fields.count("kv_lora_rank", 512),
        nope_dim=fields.count("qk_nope_head_dim", 128),
        rope_dim=fields.count("qk_rope_head_dim", 64),
        value_dim=fields.count("v_head_dim", 128),
        has_rope_pairs=fields.flag("rope_interleave", default=True)
        if has_rope_pairs is None
        else has_rope_pairs,
        has_bias=fields.flag("attention_bias"),
    )
    parameters = dict(fields.get("rope_parameters") or fields.get("rope_scaling") or missing_rope)
    query_scaling = read_query_scaling(parameters)
    parameters.setdefault("rope_theta", fields.get("rope_theta"))
    if parameters.get("partial_rotary_factor") is not None:
        parameters.pop("partial_rotary_factor")  # the rotary part is rotated as a whole
    rope = make_rope(parameters, latent.rope_dim, sizes.positions, 10_000.0, _KINDS)
    scaling = (latent.nope_dim + latent.rope_dim) ** -0.5 * _mscale(parameters) ** 2
    architecture = make_architecture(
        fields,
        sizes,
        key_heads=sizes.heads,
        ropes=[rope] * sizes.layers,
        experts=experts,
        o_proj_bias=latent.has_bias,
        query_scaling=query_scaling,
        names=WeightNames(),
        num_mtp_layers=mtp_layers(fields, "num_nextn_predict_layers", "num_mtp_layers"),
    )
    blocks = []
    for block in architecture.blocks:
        shape = replace(
            block.attention,
            num_kv_heads=1,
            key_dim=latent.kv_rank + latent.rope_dim,
            value_dim=latent.kv_rank,
            scaling=scaling,
            has_latent_values=True,
        )
        blocks.append(replace(block, attention=shape, latent=latent))
    return replace(architecture, blocks=tuple(blocks))


def _mscale(parameters: Mapping[str, Any]) -> float:
    """Return the factor of queries and keys of a stretched rope, by its parameters."""
    share = parameters.get("mscale_all_dim") or 0
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default" or not share:
        return 1.0
    return magnitude(float(parameters["factor"]), float(share))


_KINDS = {"default": "default", "yarn": "yarn"}
_UNUSED = {"num_key_value_heads": "num_expanded_heads"}
_WITHOUT_EFFECT = (
    "num_expanded_heads",
    "aux_loss_alpha",
    "seq_aux",
    "ep_size",
    "head_dim",
    "qk_head_dim",
)
_V2 = {"eos_token_id": 2, "q_lora_rank": 1536}
_V3 = {
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "eos_token_id": 1,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 2.5,
    "num_experts_per_tok": 8,
    "n_routed_experts": 256,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "num_nextn_predict_layers": 1,
}
_V32 = {**_V3, "index_n_heads": 64}
_GLM = {
    "norm_topk_prob": True,
    "eos_token_id": 1,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "routed_scaling_factor": 1.8,
    "num_experts_per_tok": 4,
    "n_routed_experts": 64,
    "moe_intermediate_size": 1536,
    "n_shared_experts": 1,
}
_GLM5 = {
    **_GLM,
    "q_lora_rank": 2048,
    "routed_scaling_factor": 2.5,
    "num_experts_per_tok": 8,
    "n_routed_experts": 256,
    "moe_intermediate_size": 2048,
    "index_n_heads": 32,
    "num_nextn_predict_layers": 1,
}
_PATTERN = {"F": "full", "S": "shared"}
_MISTRAL_ROPE = MappingProxyType(
    {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 128.0,
        "original_max_position_embeddings": 8192,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    }
)
_MISTRAL = {
    "eos_token_id": 2,
    "kv_lora_rank": 256,
    "n_routed_experts": 128,
    "norm_topk_prob": True,
    "num_experts_per_tok": 4,
    "q_lora_rank": 1024,
    "qk_nope_head_dim": 64,
}
MLA: dict[str, Family] = {
    "deepseek_v2": Family("DeepseekV2ForCausalLM", _deepseek_v2, 64, _V2, _UNUSED, sorts_rows=True),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", _deepseek_v3, 64, _V3, _UNUSED, sorts_rows=True),
    "deepseek_v32": Family(
        "DeepseekV32ForCausalLM", _deepseek_v32, 64, _V32, _UNUSED, sorts_rows=True
    ),
    "kimi_k2": Family("DeepseekV3ForCausalLM", _deepseek_v3, 64, _V3, _UNUSED, sorts_rows=True),
    "mistral4": Family(
        "Mistral4ForCausalLM",
        _mistral4,
        64,
        _MISTRAL,
        {**_UNUSED, "num_local_experts": "n_routed_experts"},
        sorts_rows=True,
    ),
    "glm4_moe_lite": Family(
        "Glm4MoeLiteForCausalLM",
        _glm4_moe_lite,
        64,
        _GLM,
        _UNUSED,
        sorts_rows=True,
    ),
    "glm_moe_dsa": Family(
        "GlmMoeDsaForCausalLM", _glm_moe_dsa, 64, _GLM5, _UNUSED, sorts_rows=True
    ),
}

"""The families that our decoder computes: a table of `model_type`, and how each fills the block.

An entry takes every field of its config that changes how the model computes. What it takes no
notice of, or does not know the value of, is `NotUnderstood`: the model is left to transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from engine.errors import ModelRefused
from engine.kernels.attention import AttentionShape
from engine.kernels.blocks import Gate
from engine.model.architecture import Architecture, Block, Experts, Names, Rope
from engine.model.description import Description, Fields, NotUnderstood
from engine.model.rope import make_rope, read_rope

FULL, SLIDING = "full_attention", "sliding_attention"
SILU, GELU = Gate("silu"), Gate("gelu_tanh")


class Sizes(NamedTuple):
    """What every family tells alike; `head_dim` is the width of a head."""

    title: str
    layers: int
    hidden: int
    heads: int
    head_dim: int
    positions: int


@dataclass(frozen=True, slots=True)
class Family:
    """How configs of one `model_type` fill the block.

    `title` is how transformers calls the class. `head_dim` is that of a config without one, where
    it is not the hidden size by heads. `defaults` stand in for other fields that are left out.
    """

    title: str
    fill: Callable[[Fields, Sizes], Architecture]
    head_dim: int | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)


def architecture_of(description: Description) -> Architecture:
    """Return what a model is made of; `NotUnderstood` says why our decoder cannot run it."""
    family = FAMILIES.get(description.kind)
    if family is None:
        raise NotUnderstood(f"{description.kind!r} is no family that it knows")
    fields = Fields(description.where, description.fields, family.defaults)
    try:
        architecture = family.fill(fields, _sizes(fields, family))
    except ModelRefused as exc:
        raise ModelRefused(f"{description.name}: {exc}") from exc
    except (TypeError, ValueError, ArithmeticError, RuntimeError) as exc:
        raise NotUnderstood(f"{description.where} says what does not fit together") from exc
    fields.close()
    return architecture


def make(
    fields: Fields,
    sizes: Sizes,
    *,
    key_heads: int | None = None,
    scaling: float | None = None,
    softcap: float = 0.0,
    has_sinks: bool = False,
    windows: Sequence[int] | None = None,
    ropes: Sequence[Rope] | None = None,
    theta: float = 10_000.0,
    experts: Sequence[Experts | None] | None = None,
    gate: Gate | None = None,
    is_tied: bool = False,
    **others: Any,
) -> Architecture:
    """Return an architecture; `windows`, `ropes` and `experts` are told layer by layer.

    What is left out is as most families have it: one rope of base `theta`, full attention, an MLP
    with SiLU. `key_heads` and `is_tied` hold where the config leaves them out; `others` are fields
    of `Architecture`.
    """
    if gate is None:
        fields.only("hidden_act", "silu", "swish")
    key_heads = fields.count("num_key_value_heads", key_heads)
    if sizes.heads % key_heads:
        raise NotUnderstood(f"{sizes.heads} heads do not share {key_heads} key heads evenly")
    if ropes is None:
        ropes = [read_rope(fields, sizes.head_dim, sizes.positions, theta)] * sizes.layers
    shapes = [
        AttentionShape(
            num_query_heads=sizes.heads,
            num_kv_heads=key_heads,
            key_dim=sizes.head_dim,
            value_dim=sizes.head_dim,
            scaling=sizes.head_dim**-0.5 if scaling is None else scaling,
            window=window,
            softcap=softcap,
            has_sinks=has_sinks,
        )
        for window in windows or [0] * sizes.layers
    ]
    blocks = map(Block, shapes, ropes, experts or [None] * sizes.layers)
    return Architecture(
        title=sizes.title,
        vocab_size=fields.count("vocab_size"),
        hidden_size=sizes.hidden,
        inner_size=fields.count("intermediate_size"),
        max_positions=min(rope.reach or sizes.positions for rope in ropes),
        blocks=tuple(blocks),
        eps=fields.number("rms_norm_eps"),
        gate=gate or SILU,
        is_tied=fields.flag("tie_word_embeddings", default=is_tied),
        eos_token_ids=fields.take("eos_token_id"),
        **others,
    )


def _sizes(fields: Fields, family: Family) -> Sizes:
    layers = fields.num_layers()
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    head_dim = fields.count("head_dim", family.head_dim or hidden // heads)
    positions = fields.count("max_position_embeddings")
    return Sizes(family.title, layers, hidden, heads, head_dim, positions)


def _llama(fields: Fields, sizes: Sizes) -> Architecture:
    is_biased = fields.flag("attention_bias")
    return make(
        fields,
        sizes,
        key_heads=sizes.heads,
        qkv_bias=is_biased,
        output_bias=is_biased,
        mlp_bias=fields.flag("mlp_bias"),
    )


def _mistral(fields: Fields, sizes: Sizes) -> Architecture:
    return make(fields, sizes, windows=_everywhere(fields, sizes))


def _qwen2(fields: Fields, sizes: Sizes) -> Architecture:
    return make(fields, sizes, windows=_qwen_windows(fields, sizes), qkv_bias=True)


def _qwen2_5_vl(fields: Fields, sizes: Sizes) -> Architecture:
    for key in ("vision_config", *_QWEN_MARKS):
        fields.take(key)  # of the tower, and of what a prompt is written by
    rope = read_rope(fields, sizes.head_dim, sizes.positions, 1e6, _MROPE, has_axes=True)
    windows = _qwen_windows(fields, sizes)
    return make(fields, sizes, windows=windows, ropes=[rope] * sizes.layers, qkv_bias=True)


def _qwen3(fields: Fields, sizes: Sizes) -> Architecture:
    is_biased = fields.flag("attention_bias")
    return make(
        fields,
        sizes,
        windows=_qwen_windows(fields, sizes),
        qkv_bias=is_biased,
        output_bias=is_biased,
        has_head_norms=True,
    )


def _qwen3_moe(fields: Fields, sizes: Sizes) -> Architecture:
    fields.take("max_window_layers")  # its class has no such field
    is_biased, has_window = fields.flag("attention_bias"), fields.flag("use_sliding_window")
    windows = _everywhere(fields, sizes)
    experts = Experts(
        count=_count_experts(fields),
        chosen=fields.count("num_experts_per_tok"),
        width=fields.count("moe_intermediate_size"),
        is_renormalised=fields.flag("norm_topk_prob"),
    )
    dense, every = fields.take("mlp_only_layers") or (), fields.count("decoder_sparse_step", 1)
    return make(
        fields,
        sizes,
        windows=windows if has_window else None,
        experts=[
            None if layer in dense or (layer + 1) % every else experts
            for layer in range(sizes.layers)
        ],
        qkv_bias=is_biased,
        output_bias=is_biased,
        has_head_norms=True,
    )


def _mixtral(fields: Fields, sizes: Sizes) -> Architecture:
    experts = Experts(
        count=_count_experts(fields),
        chosen=fields.count("num_experts_per_tok"),
        width=fields.count("intermediate_size"),
    )
    return make(
        fields,
        sizes,
        windows=_everywhere(fields, sizes),
        theta=1e6,
        experts=[experts] * sizes.layers,
        names=Names(experts="block_sparse_moe", expert=("w1", "w3", "w2")),
    )


def _gpt_oss(fields: Fields, sizes: Sizes) -> Architecture:
    for key in ("hidden_act", "experts_per_token", "initial_context_length"):
        fields.take(key)  # what the class does not read
    experts = Experts(
        count=_count_experts(fields),
        chosen=fields.count("num_experts_per_tok"),
        width=fields.count("intermediate_size"),
        softmax="chosen",
        has_biases=True,
    )
    is_biased = fields.flag("attention_bias", default=True)
    yarn = {"rope_type": "yarn", "factor": 32.0, "truncate": False}
    yarn["original_max_position_embeddings"] = 4096
    rope = read_rope(fields, sizes.head_dim, sizes.positions, 150_000.0, default=yarn)
    return make(
        fields,
        sizes,
        windows=_by_layer(fields, sizes, fields.count("sliding_window", 128), every=2),
        ropes=[rope] * sizes.layers,
        has_sinks=True,
        experts=[experts] * sizes.layers,
        gate=Gate(
            steepness=fields.number("swiglu_alpha", 1.702),
            limit=fields.number("swiglu_limit", 7.0),
            lift=1.0,
        ),
        qkv_bias=is_biased,
        output_bias=is_biased,
        names=Names(router="router", stacked_experts=True),
    )


def _phi3(fields: Fields, sizes: Sizes) -> Architecture:
    for key in (
        "full_attn_mod",
        "interpolate_factor",
    ):  # of its own code before transformers had it
        fields.only(key, 1)
    kinds = {"default": "default"} | dict.fromkeys(("longrope", "su", "yarn"), "longrope")
    rope = read_rope(fields, sizes.head_dim, sizes.positions, 10_000.0, kinds, may_be_partial=True)
    return make(
        fields,
        sizes,
        key_heads=sizes.heads,
        windows=_everywhere(fields, sizes),
        ropes=[rope] * sizes.layers,
        names=Names(qkv=("qkv_proj",), gate_up=("gate_up_proj",)),
    )


def _gemma(fields: Fields, sizes: Sizes, **others: Any) -> Architecture:
    """Return what all Gemmas share: norms of weight + 1, a scaled embedding, GELU."""
    for key in ("hidden_act", "hidden_activation"):  # what was released says "gelu" and means this
        fields.only(key, "gelu", "gelu_pytorch_tanh")
    fields.only("use_bidirectional_attention")
    is_biased = fields.flag("attention_bias")
    return make(
        fields,
        sizes,
        gate=GELU,
        is_tied=True,
        qkv_bias=is_biased,
        output_bias=is_biased,
        norm_offset=1.0,
        embedding_scale=sizes.hidden**0.5,
        **others,
    )


def _gemma2(fields: Fields, sizes: Sizes) -> Architecture:
    return _gemma(
        fields,
        sizes,
        scaling=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        softcap=_cap(fields, "attn_logit_softcapping", 50.0) or 0.0,
        logit_softcap=_cap(fields, "final_logit_softcapping", 30.0),
        windows=_by_layer(fields, sizes, fields.count("sliding_window", 4096), every=2),
        has_sandwich_norms=True,
    )


def _gemma3(fields: Fields, sizes: Sizes) -> Architecture:
    fields.only("attn_logit_softcapping")
    every = fields.count("sliding_window_pattern", fields.count("_sliding_window_pattern", 6))
    windows = _by_layer(fields, sizes, fields.count("sliding_window", 4096), every=every)
    near, far = _gemma3_ropes(fields, sizes)
    return _gemma(
        fields,
        sizes,
        scaling=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        logit_softcap=_cap(fields, "final_logit_softcapping", None),
        windows=windows,
        ropes=[near if window else far for window in windows],
        has_head_norms=True,
        has_sandwich_norms=True,
    )


def _gemma3_ropes(fields: Fields, sizes: Sizes) -> tuple[Rope, Rope]:
    """Return how the layers with a window turn and how those without: only these are stretched."""
    nested = dict(fields.take("rope_parameters") or {})
    near = dict(nested.pop(SLIDING, None) or {})
    far = {**(nested.pop(FULL, None) or {}), **(fields.take("rope_scaling") or {})}
    if nested:
        raise NotUnderstood("its ropes are told in another way than by kind of layer")
    kinds = {"default": "default", "linear": "linear"}
    thetas = fields.number("rope_local_base_freq", 1e4), fields.number("rope_theta", 1e6)
    first, second = (
        make_rope(said, sizes.head_dim, sizes.positions, theta, kinds)
        for said, theta in zip((near, far), thetas, strict=True)
    )
    return first, second


def _everywhere(fields: Fields, sizes: Sizes) -> list[int]:
    """Return one window for all layers; 0 is none."""
    window = fields.take("sliding_window")
    return [0 if window is None else fields.count("sliding_window")] * sizes.layers


def _by_layer(fields: Fields, sizes: Sizes, window: int, *, every: int) -> list[int]:
    """Return the windows by `layer_types`; without them all slide but one of `every`."""
    kinds = fields.take("layer_types")
    if kinds is None:
        kinds = [SLIDING if (layer + 1) % every else FULL for layer in range(sizes.layers)]
    if len(kinds) != sizes.layers or not {*kinds} <= {FULL, SLIDING}:
        raise NotUnderstood(f"{fields.where} says layer_types {kinds!r}")
    return [window if kind == SLIDING else 0 for kind in kinds]


def _qwen_windows(fields: Fields, sizes: Sizes) -> list[int]:
    """Return the windows of Qwen: none unless told to use them, and then above some layer."""
    is_on, first = fields.flag("use_sliding_window"), fields.take("max_window_layers", 28)
    window = fields.take("sliding_window", 4096)
    if not is_on or window is None:
        windows = _by_layer(fields, sizes, -1, every=1)
        if any(windows):
            raise NotUnderstood(f"{fields.where} has sliding layers but no window")
        return windows
    window = fields.count("sliding_window", 4096)
    if fields.take("layer_types") is not None:
        return _by_layer(fields, sizes, window, every=1)
    return [window if layer >= first else 0 for layer in range(sizes.layers)]


def _count_experts(fields: Fields) -> int:
    """Return how many experts there are, by either of the two names of that field."""
    told = {fields.take(key) for key in ("num_experts", "num_local_experts")} - {None}
    if len(told) != 1:
        raise NotUnderstood(f"{fields.where} says not how many experts there are")
    return fields.count("num_experts", fields.take("num_local_experts"))


def _cap(fields: Fields, key: str, default: float | None) -> float | None:
    """Return where numbers are capped; null says nowhere."""
    return None if fields.take(key, default) is None else fields.number(key, default)


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
_LLAMA = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 2,
}
_QWEN_MARKS = (
    *("image_token_id", "video_token_id", "vision_token_id"),
    *("vision_start_token_id", "vision_end_token_id"),
)
_MROPE = {"mrope": "default", "default": "default", "yarn": "yarn", "linear": "linear"}
_PHI3 = {"original_max_position_embeddings": 4096, "eos_token_id": 32_000}
FAMILIES = {
    "gemma": Family("GemmaForCausalLM", _gemma, 256, {"eos_token_id": 1}),
    "gemma2": Family("Gemma2ForCausalLM", _gemma2, 256, {"eos_token_id": 1}),
    "gemma3_text": Family("Gemma3ForCausalLM", _gemma3, 256, _GEMMA3),
    "gpt_oss": Family("GptOssForCausalLM", _gpt_oss, 64),
    "llama": Family("LlamaForCausalLM", _llama, None, _LLAMA),
    "mistral": Family(
        "MistralForCausalLM", _mistral, None, {"sliding_window": 4096, "eos_token_id": 2}
    ),
    "mixtral": Family("MixtralForCausalLM", _mixtral, None, {"eos_token_id": 2}),
    "phi3": Family("Phi3ForCausalLM", _phi3, None, _PHI3),
    "qwen2": Family("Qwen2ForCausalLM", _qwen2),
    "qwen2_5_vl": Family("Qwen2_5_VLForConditionalGeneration", _qwen2_5_vl),
    "qwen2_5_vl_text": Family("Qwen2_5_VLForConditionalGeneration", _qwen2_5_vl),
    "qwen3": Family("Qwen3ForCausalLM", _qwen3, 128),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", _qwen3_moe, None, {"sliding_window": 4096}),
}

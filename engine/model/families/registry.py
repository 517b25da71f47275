"""The families that our decoder computes: a table of `model_type`, and how each fills the block.

An entry takes every field of its config that changes how the model computes. A field that it does
not take but transformers' class may read, or a value that it does not know, is `UnsupportedConfig`:
the model is left to transformers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...errors import ModelRefused
from ...kernels.elementwise import Gate
from ..config.architecture import Architecture, Experts, WeightNames
from ..config.hf_config import MISFITS, ConfigFields, HFConfig, UnsupportedConfig
from ..config.rope import read_rope
from .dense import DENSE
from .document_readers import DOCUMENT_READERS
from .family import (
    DecoderSizes,
    Family,
    attention_biases,
    count_experts,
    make_architecture,
    uniform_windows,
    windows_by_layer,
)
from .gemma import GEMMA
from .gpt import GPT
from .hybrid import HYBRID
from .llama4 import LLAMA4
from .mamba import MAMBA
from .mla import MLA
from .sigmoid_moe import SIGMOID_MOE
from .softmax_moe import SOFTMAX_MOE, qwen_experts


def architecture_of(hf_config: HFConfig) -> Architecture:
    """Return a model's architecture; `UnsupportedConfig` if our decoder cannot run it."""
    family = FAMILIES.get(hf_config.model_type)
    if family is None:
        raise UnsupportedConfig(
            f"the engine's decoder does not implement model type {hf_config.model_type!r}"
        )
    hf_config.check_class(family.class_name for family in FAMILIES.values())
    fields = ConfigFields(
        hf_config.where,
        hf_config.fields,
        family.defaults,
        family.renamed,
        model_type=hf_config.model_type,
    )
    if fields.get("is_causal", default=True) is not True:
        raise UnsupportedConfig(
            f"{hf_config.where} has unsupported is_causal {fields.get('is_causal')!r}"
        )
    try:
        architecture = family.fill(fields, _sizes(fields, family))
    except ModelRefused as exc:
        raise ModelRefused(f"{hf_config.name}: {exc}") from exc
    except MISFITS as exc:
        raise UnsupportedConfig(f"{hf_config.where} has values that contradict each other") from exc
    return replace(architecture, ignored_fields=fields.check_all_read())


def _sizes(fields: ConfigFields, family: Family) -> DecoderSizes:
    layers = fields.num_layers()
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    head_dim = hidden // heads  # also if it is null
    if fields.get("head_dim", family.head_dim) is not None:
        head_dim = fields.count("head_dim", family.head_dim)
    positions = fields.count("max_position_embeddings")
    return DecoderSizes(family.class_name, layers, hidden, heads, head_dim, positions)


def _llama(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    return make_architecture(
        fields,
        sizes,
        key_heads=sizes.heads,
        **attention_biases(fields),
        mlp_bias=fields.flag("mlp_bias"),
    )


def _mistral(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    return make_architecture(fields, sizes, windows=uniform_windows(fields, sizes))


def _qwen2(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    return make_architecture(fields, sizes, windows=_qwen_windows(fields, sizes), qkv_bias=True)


def _qwen2_5_vl(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    for key in ("vision_config", *_QWEN_MARKS):
        fields.get(key)  # for the vision tower, and for prompts
    rope = read_rope(fields, sizes.head_dim, sizes.positions, 1e6, _MROPE, sections="consecutive")
    windows = _qwen_windows(fields, sizes)
    return make_architecture(
        fields, sizes, windows=windows, ropes=[rope] * sizes.layers, qkv_bias=True
    )


def _qwen3(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    return make_architecture(
        fields,
        sizes,
        windows=_qwen_windows(fields, sizes),
        **attention_biases(fields),
        has_qk_norm=True,
    )


def _qwen3_vl_moe(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    fields.get("norm_topk_prob")  # transformers' class ignores it: it always does
    return _qwen3_vl(
        fields,
        sizes,
        key_heads=16,
        experts=qwen_experts(fields, sizes, norm_topk_prob=True),
        names=WeightNames(stacked_experts="halves"),
    )


def _qwen3_vl(fields: ConfigFields, sizes: DecoderSizes, **others: Any) -> Architecture:
    rope = read_rope(fields, sizes.head_dim, sizes.positions, 5e5, _MROPE, sections="interleaved")
    return make_architecture(
        fields,
        sizes,
        ropes=[rope] * sizes.layers,
        **attention_biases(fields),
        has_qk_norm=True,
        **others,
    )


def _qwen3_moe(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    fields.get("max_window_layers")  # its class does not have it
    is_biased, has_window = fields.flag("attention_bias"), fields.flag("use_sliding_window")
    windows = uniform_windows(fields, sizes)
    return make_architecture(
        fields,
        sizes,
        windows=windows if has_window else None,
        experts=qwen_experts(fields, sizes, norm_topk_prob=fields.flag("norm_topk_prob")),
        qkv_bias=is_biased,
        o_proj_bias=is_biased,
        has_qk_norm=True,
    )


def _mixtral(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    experts = Experts(
        num_experts=count_experts(fields),
        num_experts_per_tok=fields.count("num_experts_per_tok"),
        intermediate_size=fields.count("intermediate_size"),
    )
    return make_architecture(
        fields,
        sizes,
        windows=uniform_windows(fields, sizes),
        theta=1e6,
        experts=[experts] * sizes.layers,
        names=WeightNames(experts="block_sparse_moe", expert=("w1", "w3", "w2")),
    )


def _gpt_oss(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    for key in ("hidden_act", "experts_per_token", "initial_context_length"):
        fields.get(key)  # the class does not read it
    experts = Experts(
        num_experts=count_experts(fields),
        num_experts_per_tok=fields.count("num_experts_per_tok"),
        intermediate_size=fields.count("intermediate_size"),
        scoring="softmax_chosen",
        has_biases=True,
    )
    yarn = {"rope_type": "yarn", "factor": 32.0, "truncate": False}
    yarn["original_max_position_embeddings"] = 4096
    rope = read_rope(fields, sizes.head_dim, sizes.positions, 150_000.0, default=yarn)
    return make_architecture(
        fields,
        sizes,
        windows=windows_by_layer(fields, sizes, fields.count("sliding_window", 128), every=2),
        ropes=[rope] * sizes.layers,
        has_sinks=True,
        experts=[experts] * sizes.layers,
        gate=Gate(
            alpha=fields.number("swiglu_alpha", 1.702),
            limit=fields.number("swiglu_limit", 7.0),
            beta=1.0,
        ),
        **attention_biases(fields, default=True),
        names=WeightNames(router="router", stacked_experts="interleaved"),
    )


def _phi3(fields: ConfigFields, sizes: DecoderSizes) -> Architecture:
    for key in (
        "full_attn_mod",
        "interpolate_factor",
    ):  # from its own code before transformers supported it
        fields.allow(key, 1)
    kinds = {"default": "default"} | dict.fromkeys(("longrope", "yarn"), "longrope")
    rope = read_rope(fields, sizes.head_dim, sizes.positions, 10_000.0, kinds, may_be_partial=True)
    return make_architecture(
        fields,
        sizes,
        key_heads=sizes.heads,
        windows=uniform_windows(fields, sizes),
        ropes=[rope] * sizes.layers,
        names=WeightNames(qkv=("qkv_proj",), gate_up=("gate_up_proj",)),
    )


def _qwen_windows(fields: ConfigFields, sizes: DecoderSizes) -> list[int]:
    """Return the windows of Qwen: none unless enabled, and then only above some layer."""
    is_on, first = fields.flag("use_sliding_window"), fields.get("max_window_layers", 28)
    window = fields.get("sliding_window", 4096)
    if not is_on or window is None:
        windows = windows_by_layer(fields, sizes, -1, every=1)
        if any(windows):
            raise UnsupportedConfig(f"{fields.where} has sliding layers but no window")
        return windows
    window = fields.count("sliding_window", 4096)
    if fields.get("layer_types") is not None:
        return windows_by_layer(fields, sizes, window, every=1)
    return [window if layer >= first else 0 for layer in range(sizes.layers)]


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
FAMILIES: dict[str, Family] = {
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
    "qwen2_vl": Family("Qwen2VLForConditionalGeneration", _qwen2_5_vl),
    "qwen2_vl_text": Family("Qwen2VLForConditionalGeneration", _qwen2_5_vl),
    "qwen3_vl_text": Family("Qwen3VLForConditionalGeneration", _qwen3_vl, 128),
    "qwen3_vl_moe_text": Family("Qwen3VLMoeForConditionalGeneration", _qwen3_vl_moe),
    "qwen3": Family("Qwen3ForCausalLM", _qwen3, 128),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", _qwen3_moe, None, {"sliding_window": 4096}),
    **DENSE,
    **DOCUMENT_READERS,
    **GEMMA,
    **GPT,
    **HYBRID,
    **LLAMA4,
    **MAMBA,
    **MLA,
    **SIGMOID_MOE,
    **SOFTMAX_MOE,
}

"""Supported architectures of GGUF files: their config.json and the names of their weights.

Names, defaults and changed weights follow llama.cpp's converter and models: rows of queries and
keys of `llama` are permuted, norms of Gemma contain their weight plus one, and defaults are
llama.cpp's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ...errors import ModelRefused
from .header import GGUFHeader
from .tensors import check_is_f32, read_floats

_BLOCK: Final = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")
_TOP: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORM: Final = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_SANDWICH: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_FUSED: Final = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_EXPERTS: Final = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
# These tensors are part of the config.
_ROPE_FREQS: Final = "rope_freqs.weight"
_ROPE_LONG: Final = "rope_factors_long.weight"
_ROPE_SHORT: Final = "rope_factors_short.weight"
_OF_CONFIG: Final = frozenset({_ROPE_FREQS, _ROPE_LONG, _ROPE_SHORT})
# Rotary frequencies that old converters stored, which follow from the config.
_DERIVED: Final = ("attn_rot_embd", "rope_freqs")
_FULL, _SLIDING = "full_attention", "sliding_attention"
_GEMMA2_27B_LAYERS: Final = 46
_GEMMA3_27B_LAYERS: Final = 62


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight of transformers' class, and its source in the tensors of a GGUF file.

    `expert` is its index in stacked experts. Rows of `permuted_heads` heads are permuted for
    llama.cpp's rope. `offset` is an addend in the file's values.
    """

    name: str
    tensor: str
    shape: tuple[int, ...]
    expert: int | None = None
    permuted_heads: int = 0
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class _Family:
    """An architecture: transformers' type and class, its own fields, and names of layers."""

    model_type: str
    class_name: str
    fields: Callable[[GGUFHeader], dict[str, Any]]
    layer: Mapping[str, str]
    is_permuted: bool = False
    norm_offset: float = 0.0


def make_config(header: GGUFHeader) -> dict[str, Any]:
    """Return the config.json of a file; raise `ModelRefused` for an unsupported one."""
    family = _family_of(header)
    hidden, heads = _count(header, "embedding_length"), _count(header, "attention.head_count")
    return {
        "architectures": [family.class_name],
        "model_type": family.model_type,
        "dtype": "bfloat16",
        "hidden_size": hidden,
        "intermediate_size": _count(header, "feed_forward_length"),
        "num_hidden_layers": _count(header, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _count(header, "attention.head_count_kv", heads),
        "head_dim": _head_dim(header),
        "max_position_embeddings": _count(header, "context_length"),
        "rms_norm_eps": _number(header, "attention.layer_norm_rms_epsilon"),
        "vocab_size": _vocab_size(header),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        **family.fields(header),
    }


def list_weights(header: GGUFHeader) -> list[StoredWeight]:
    """Return the weights of transformers' class in the tensors of a file, in the file's order.

    Raises `ModelRefused` for an unknown tensor.
    """
    family = _family_of(header)
    heads = _count(header, "attention.head_count")
    permuted = {
        "attn_q": heads,
        "attn_k": _count(header, "attention.head_count_kv", heads),
    }
    weights = []
    for tensor in sorted(header.tensors.values(), key=lambda tensor: tensor.start):
        match = _BLOCK.fullmatch(tensor.name)
        if tensor.name in _OF_CONFIG or (match and match[2] in _DERIVED):
            continue
        if tensor.name in _TOP:
            own, name = tensor.name.removesuffix(".weight"), _TOP[tensor.name]
        elif match and match[2] in family.layer:
            own = match[2]
            name = f"model.layers.{match[1]}.{family.layer[own]}.{match[3]}"
        else:
            raise ModelRefused(
                f"{header.path}: tensor {tensor.name} is not supported for the architecture "
                f"{header.architecture!r}."
            )
        offset = family.norm_offset if name.endswith("norm.weight") else 0.0
        if offset:
            check_is_f32(header, tensor)
        num_permuted = permuted.get(own, 0) if family.is_permuted else 0
        if "{}" not in name:
            weight = StoredWeight(
                name, tensor.name, tensor.shape, permuted_heads=num_permuted, offset=offset
            )
            weights.append(weight)
            continue
        for expert in range(tensor.shape[0]):
            one = StoredWeight(name.format(expert), tensor.name, tensor.shape[1:], expert)
            weights.append(one)
    return weights


def _family_of(header: GGUFHeader) -> _Family:
    family = _FAMILIES.get(header.architecture)
    if family is None:
        known = ", ".join(_FAMILIES)
        raise ModelRefused(
            f"{header.path}: the GGUF architecture {header.architecture!r} is not supported "
            f"(supported: {known}): use the model in transformers' format."
        )
    return family


def _head_dim(header: GGUFHeader) -> int:
    heads = _count(header, "attention.head_count")
    return _count(header, "attention.key_length", _count(header, "embedding_length") // heads)


def _vocab_size(header: GGUFHeader) -> int:
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelRefused(f"{header.path} has no tensor token_embd.weight: it is not a model.")
    return embedding.shape[0]


def _count(header: GGUFHeader, key: str, default: int | None = None) -> int:
    value = header.get(key, default)
    if isinstance(value, list) and value and value.count(value[0]) == len(value):
        value = value[0]  # the same for each layer
    if type(value) is not int or value < 1:
        state = "lacks" if value is None else f"has {value!r} as"
        raise ModelRefused(
            f"{header.path} {state} {header.architecture}.{key}, which must be a positive number."
        )
    return value


def _window(header: GGUFHeader) -> int | None:
    """Return the sliding window; None for 0, which converters write if there is none."""
    key = "attention.sliding_window"
    return _count(header, key) if header.get(key) else None


def _number(header: GGUFHeader, key: str, default: float | None = None) -> float:
    value = header.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool):
        state = "lacks" if value is None else f"has {value!r} as"
        raise ModelRefused(
            f"{header.path} {state} {header.architecture}.{key}, which must be a number."
        )
    return _shortest(value)


def _shortest(value: float) -> float:
    """Return the shortest number of this fp32 value: 1e-05 for 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _floats(header: GGUFHeader, name: str) -> list[float]:
    values: NDArray[np.float32] = read_floats(header, header.tensors[name])
    return [_shortest(value) for value in values.tolist()]


def _rope(header: GGUFHeader, theta: float = 10_000.0) -> dict[str, Any]:
    """Return the rope's parameters: plain, scaled, or with a factor for each frequency."""
    parameters: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": _number(header, "rope.freq_base", theta),
    }
    kind = header.get("rope.scaling.type", "none")
    if _ROPE_FREQS in header.tensors:
        factors = _floats(header, _ROPE_FREQS)
        longest = _count(header, "context_length")
        return parameters | {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": longest,
        }
    if _ROPE_LONG in header.tensors and _ROPE_SHORT in header.tensors:
        return parameters | {
            "rope_type": "longrope",
            "short_factor": _floats(header, _ROPE_SHORT),
            "long_factor": _floats(header, _ROPE_LONG),
            "attention_factor": _number(header, "rope.scaling.attn_factor", 1.0),
            "original_max_position_embeddings": _count(
                header, "rope.scaling.original_context_length"
            ),
        }
    if kind == "none" or (kind in {"linear", "yarn"} and _scale(header) == 1.0):
        return parameters
    if kind == "linear":
        return parameters | {"rope_type": "linear", "factor": _scale(header)}
    if kind == "yarn" and header.get("rope.scaling.attn_factor", 1.0) == 1.0:
        return parameters | {
            "rope_type": "yarn",
            "factor": _scale(header),
            "original_max_position_embeddings": _count(
                header, "rope.scaling.original_context_length"
            ),
        }
    raise ModelRefused(f"{header.path}: rope scaling {kind!r} is not supported.")


def _scale(header: GGUFHeader) -> float:
    return _number(header, "rope.scaling.factor", header.get("rope.scale_linear", 1.0))


def _check_whole_rope(header: GGUFHeader) -> None:
    rotated, width = header.get("rope.dimension_count"), _head_dim(header)
    if rotated not in (None, width):
        raise ModelRefused(
            f"{header.path}: a rope of {rotated} of the {width} dimensions of a head is "
            f"not supported for the architecture {header.architecture!r}."
        )


def _llama(header: GGUFHeader) -> dict[str, Any]:
    if header.get("expert_count", 0):
        raise ModelRefused(
            f"{header.path}: GGUF files of Mixtral (llama with experts) are not supported: use the "
            "model in transformers' format."
        )
    _check_whole_rope(header)
    return {
        "hidden_act": "silu",
        "rope_parameters": _rope(header),
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
    }


def _qwen2(header: GGUFHeader) -> dict[str, Any]:
    _check_whole_rope(header)
    return {"hidden_act": "silu", "rope_parameters": _rope(header)}


def _qwen3(header: GGUFHeader) -> dict[str, Any]:
    return _qwen2(header) | {"attention_bias": False}


def _qwen3_moe(header: GGUFHeader) -> dict[str, Any]:
    return _qwen3(header) | {
        "num_experts": _count(header, "expert_count"),
        "num_experts_per_tok": _count(header, "expert_used_count"),
        "moe_intermediate_size": _count(header, "expert_feed_forward_length"),
        "norm_topk_prob": bool(header.get("expert_weights_norm", True)),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _phi3(header: GGUFHeader) -> dict[str, Any]:
    width, rope = _head_dim(header), _rope(header)
    share = _count(header, "rope.dimension_count", width) / width
    if rope["rope_type"] == "longrope":
        rope.pop("original_max_position_embeddings")
    return {
        "hidden_act": "silu",
        "rope_parameters": rope | {"partial_rotary_factor": share},
        "sliding_window": _window(header),
        "original_max_position_embeddings": _count(
            header, "rope.scaling.original_context_length", _count(header, "context_length")
        ),
    }


def _gemma(header: GGUFHeader, layers_of_27b: int) -> dict[str, Any]:
    width = _head_dim(header)
    if _count(header, "block_count") == layers_of_27b:
        heads = _count(header, "attention.head_count")
        width = _count(header, "embedding_length") // heads
    _check_whole_rope(header)
    return {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": width}


def _gemma2(header: GGUFHeader) -> dict[str, Any]:
    return _gemma(header, _GEMMA2_27B_LAYERS) | {
        "rope_parameters": _rope(header),
        "sliding_window": _count(header, "attention.sliding_window", 4096),
        "attn_logit_softcapping": _number(header, "attn_logit_softcapping", 50.0),
        "final_logit_softcapping": _number(header, "final_logit_softcapping", 30.0),
    }


def _gemma3(header: GGUFHeader) -> dict[str, Any]:
    layers = _count(header, "block_count")
    window = _window(header)
    pattern = header.get("attention.sliding_window_pattern")
    if window is None:
        kinds = [_FULL] * layers
    elif isinstance(pattern, list):
        kinds = [_SLIDING if is_sliding else _FULL for is_sliding in pattern]
    else:
        every = _count(header, "attention.sliding_window_pattern", 6)
        kinds = [_SLIDING if (layer + 1) % every else _FULL for layer in range(layers)]
    rope = _rope(header, 1e6)
    local = _number(header, "rope.freq_base_swa", 10_000.0)
    softcap = _number(header, "final_logit_softcapping", 0.0)
    return _gemma(header, _GEMMA3_27B_LAYERS) | {
        "rope_parameters": {
            _FULL: rope,
            _SLIDING: {"rope_type": "default", "rope_theta": local},
        },
        "sliding_window": window or _count(header, "context_length"),
        "layer_types": kinds,
        "final_logit_softcapping": softcap or None,
    }


_FAMILIES: Final[Mapping[str, _Family]] = {
    "llama": _Family("llama", "LlamaForCausalLM", _llama, _LAYER, is_permuted=True),
    "qwen2": _Family("qwen2", "Qwen2ForCausalLM", _qwen2, _LAYER),
    "qwen3": _Family("qwen3", "Qwen3ForCausalLM", _qwen3, _LAYER | _QK_NORM),
    "qwen3moe": _Family(
        "qwen3_moe", "Qwen3MoeForCausalLM", _qwen3_moe, _LAYER | _QK_NORM | _EXPERTS
    ),
    "gemma2": _Family("gemma2", "Gemma2ForCausalLM", _gemma2, _LAYER | _SANDWICH, norm_offset=1.0),
    "gemma3": _Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        _gemma3,
        _LAYER | _SANDWICH | _QK_NORM,
        norm_offset=1.0,
    ),
    "phi3": _Family("phi3", "Phi3ForCausalLM", _phi3, _LAYER | _FUSED),
}

"""Weight map of an encoder: its weights by role, and the stored tensors that fill them."""

from __future__ import annotations

from collections.abc import Iterator

from ...kernels.elementwise import Gate
from ..weights.weight_parts import Weight, rows, stacked, whole
from .architecture import EncoderArchitecture, HeadLinear, HeadPart


def weights_of(model: EncoderArchitecture) -> Iterator[Weight]:
    """Yield all weights but a head's; those of layer i have roles that begin with `i.`."""
    names, hidden = model.names, model.hidden_size
    base = f"{names.base_model_prefix}."
    yield whole(
        "word_embeddings", f"{base}{names.word_embeddings}.weight", model.vocab_size, hidden
    )
    if model.num_positions:
        yield whole(
            "position_embeddings",
            f"{base}{names.position_embeddings}.weight",
            model.num_positions,
            hidden,
        )
    if model.num_types:
        yield whole(
            "token_type_embeddings",
            f"{base}{names.token_type_embeddings}.weight",
            model.num_types,
            hidden,
        )
    if model.num_buckets:
        heads = model.blocks[0].attention.num_query_heads
        key = f"{base}{names.position_bias}.weight"
        yield whole("position_bias", key, model.num_buckets, heads)
    yield from norm_weights(model, "embedding_norm", base + names.embedding_norm)
    yield from layer_weights(model)


def layer_weights(model: EncoderArchitecture) -> Iterator[Weight]:
    """Yield the weights of all layers."""
    for index in range(len(model.blocks)):
        yield from _layer(model, index)


def head_weights(head: tuple[HeadPart, ...], prefix: str = "") -> Iterator[Weight]:
    """Yield the weights of a head: part i has the roles `head.i` and `head.i_bias`."""
    for index, part in enumerate(head):
        role, key = f"head.{index}", f"{prefix}{part.name}." if part.name else prefix
        if isinstance(part, HeadLinear):
            width = part.outputs
            yield whole(role, f"{key}weight", part.outputs, part.inputs)
        else:
            width = part.width
            yield whole(role, f"{key}weight", width)
        if part.has_bias:
            bias = isinstance(part, HeadLinear) and part.bias_name
            yield whole(f"{role}_bias", bias or f"{key}bias", width)


def _layer(model: EncoderArchitecture, index: int) -> Iterator[Weight]:
    names, hidden, inner = model.names, model.hidden_size, model.intermediate_size
    role, prefix = f"{index}.", f"{names.base_model_prefix}.{names.layer.format(index)}."
    shape = model.blocks[index].attention
    width = shape.num_query_heads * shape.key_dim
    is_gated = isinstance(model.activation, Gate)
    qkv = rows(names.qkv, (width, width, width))
    up = rows(names.up_proj, (inner, inner) if is_gated else (inner,))
    yield stacked(f"{role}qkv_proj", prefix, "weight", qkv, hidden)
    yield whole(f"{role}o_proj", f"{prefix}{names.o_proj}.weight", hidden, width)
    yield stacked(f"{role}up_proj", prefix, "weight", up, hidden)
    yield whole(f"{role}down_proj", f"{prefix}{names.down_proj}.weight", hidden, inner)
    if model.qkv_bias:
        yield stacked(f"{role}qkv_proj_bias", prefix, "bias", qkv)
    if model.o_proj_bias:
        yield whole(f"{role}o_proj_bias", f"{prefix}{names.o_proj}.bias", hidden)
    if model.mlp_bias:
        yield stacked(f"{role}up_proj_bias", prefix, "bias", up)
        yield whole(f"{role}down_proj_bias", f"{prefix}{names.down_proj}.bias", hidden)
    yield from norm_weights(model, f"{role}post_attention_norm", prefix + names.post_attention_norm)
    if model.is_pre_norm:
        is_last = index + 1 == len(model.blocks)
        following = f"{names.layer.format(index + 1)}.{names.post_mlp_norm}"
        after = f"{names.base_model_prefix}.{names.final_norm if is_last else following}"
    else:
        after = prefix + names.post_mlp_norm
    yield from norm_weights(model, f"{role}post_mlp_norm", after)


def norm_weights(model: EncoderArchitecture, role: str, key: str) -> Iterator[Weight]:
    """Yield the weight of a norm, and its bias if it has one."""
    yield whole(role, f"{key}.weight", model.hidden_size)
    if model.norm_bias:
        yield whole(f"{role}_bias", f"{key}.bias", model.hidden_size)

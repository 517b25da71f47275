"""Where an encoder's weights come from: which stored tensors fill which of them."""

from __future__ import annotations

from collections.abc import Iterator

from engine.kernels.blocks import Gate
from engine.model.encoders.architecture import EncoderArchitecture, HeadLinear, HeadPart
from engine.model.layout import Weight, rows, stacked, whole


def weights_of(model: EncoderArchitecture) -> Iterator[Weight]:
    """Yield all weights but a head's; those of layer i have roles that begin with `i.`."""
    names, hidden = model.names, model.hidden_size
    base = f"{names.base}."
    yield whole("words", f"{base}{names.words}.weight", model.vocab_size, hidden)
    if model.num_positions:
        yield whole("positions", f"{base}{names.positions}.weight", model.num_positions, hidden)
    if model.num_types:
        yield whole("types", f"{base}{names.types}.weight", model.num_types, hidden)
    yield from _norm(model, "embedding_norm", base + names.embedding_norm)
    for index in range(len(model.blocks)):
        yield from _layer(model, index)


def head_weights(head: tuple[HeadPart, ...], prefix: str = "") -> Iterator[Weight]:
    """Yield the weights of a head: of part i by the roles `head.i` and `head.i_bias`."""
    for index, part in enumerate(head):
        role, key = f"head.{index}", f"{prefix}{part.name}"
        if isinstance(part, HeadLinear):
            width = part.outputs
            yield whole(role, f"{key}.weight", part.outputs, part.inputs)
        else:
            width = part.width
            yield whole(role, f"{key}.weight", width)
        if part.has_bias:
            yield whole(f"{role}_bias", f"{key}.bias", width)


def _layer(model: EncoderArchitecture, index: int) -> Iterator[Weight]:
    names, hidden, inner = model.names, model.hidden_size, model.inner_size
    role, prefix = f"{index}.", f"{names.base}.{names.layer.format(index)}."
    shape = model.blocks[index].attention
    width = shape.num_query_heads * shape.key_dim
    is_gated = isinstance(model.end, Gate)
    qkv = rows(names.qkv, (width, width, width))
    up = rows(names.up, (inner, inner) if is_gated else (inner,))
    yield stacked(f"{role}qkv", prefix, "weight", qkv, hidden)
    yield whole(f"{role}output", f"{prefix}{names.output}.weight", hidden, width)
    yield stacked(f"{role}up", prefix, "weight", up, hidden)
    yield whole(f"{role}down", f"{prefix}{names.down}.weight", hidden, inner)
    if model.qkv_bias:
        yield stacked(f"{role}qkv_bias", prefix, "bias", qkv)
    if model.output_bias:
        yield whole(f"{role}output_bias", f"{prefix}{names.output}.bias", hidden)
    if model.mlp_bias:
        yield stacked(f"{role}up_bias", prefix, "bias", up)
        yield whole(f"{role}down_bias", f"{prefix}{names.down}.bias", hidden)
    yield from _norm(model, f"{role}attended_norm", prefix + names.attended_norm)
    if model.is_pre_norm:
        is_last = index + 1 == len(model.blocks)
        following = f"{names.layer.format(index + 1)}.{names.mixed_norm}"
        after = f"{names.base}.{names.final_norm if is_last else following}"
    else:
        after = prefix + names.mixed_norm
    yield from _norm(model, f"{role}mixed_norm", after)


def _norm(model: EncoderArchitecture, role: str, key: str) -> Iterator[Weight]:
    yield whole(role, f"{key}.weight", model.hidden_size)
    if model.norm_bias:
        yield whole(f"{role}_bias", f"{key}.bias", model.hidden_size)

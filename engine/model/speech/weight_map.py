"""Weight map of a Whisper model: its weights by role, and the stored tensors of each."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from ..weights.weight_parts import Part, Weight, stacked, whole
from .architecture import KERNEL, SpeechArchitecture

HEAD = "proj_out.weight"


def weights_of(model: SpeechArchitecture) -> Iterator[Weight]:
    """Yield all weights; roles begin with `encoder.` or `decoder.`, and then `i.` for layer i."""
    hidden = model.hidden_size
    yield from _convolution("encoder.conv1", model.num_mels, hidden)
    yield from _convolution("encoder.conv2", hidden, hidden)
    yield whole(
        "encoder.embed_positions",
        "model.encoder.embed_positions.weight",
        model.max_source_positions,
        hidden,
    )
    yield whole(
        "decoder.embed_tokens", "model.decoder.embed_tokens.weight", model.vocab_size, hidden
    )
    yield whole(
        "decoder.embed_positions",
        "model.decoder.embed_positions.weight",
        model.max_target_positions,
        hidden,
    )
    if not model.tie_word_embeddings:
        yield whole("decoder.proj_out", HEAD, model.vocab_size, hidden)
    for side, count, inner in (
        ("encoder", model.encoder_layers, model.encoder_ffn_dim),
        ("decoder", model.decoder_layers, model.decoder_ffn_dim),
    ):
        yield from _norm(f"{side}.layer_norm", f"model.{side}.layer_norm", hidden)
        for index in range(count):
            role, prefix = f"{side}.{index}.", f"model.{side}.layers.{index}."
            yield from _norm(f"{role}self_attn_layer_norm", f"{prefix}self_attn_layer_norm", hidden)
            yield from _attention(role, f"{prefix}self_attn.", "qkv", hidden)
            if side == "decoder":
                yield from _norm(
                    f"{role}cross_attn_layer_norm", f"{prefix}encoder_attn_layer_norm", hidden
                )
                yield from _attention(f"{role}cross_", f"{prefix}encoder_attn.", "kv", hidden)
                yield from _linear(
                    f"{role}cross_q_proj", f"{prefix}encoder_attn.q_proj", hidden, hidden
                )
            yield from _norm(f"{role}final_layer_norm", f"{prefix}final_layer_norm", hidden)
            yield from _linear(f"{role}fc1", f"{prefix}fc1", inner, hidden)
            yield from _linear(f"{role}fc2", f"{prefix}fc2", hidden, inner)


def _attention(role: str, prefix: str, letters: str, hidden: int) -> Iterator[Weight]:
    """Yield the products of some of queries, keys and values as one, and what joins the heads.

    Keys have no bias; where they have a place in one it stays zero.
    """
    rows = [(f"{letter}_proj", hidden) for letter in letters]
    yield stacked(f"{role}{letters}_proj", prefix, "weight", rows, hidden)
    bias = stacked(f"{role}{letters}_proj_bias", prefix, "bias", rows)
    own = tuple(part for part in bias.parts if part.key != f"{prefix}k_proj.bias")
    yield Weight(bias.role, bias.shape, own)
    yield from _linear(f"{role}o_proj", f"{prefix}out_proj", hidden, hidden)


def _linear(role: str, prefix: str, outputs: int, inputs: int) -> Iterator[Weight]:
    yield whole(role, f"{prefix}.weight", outputs, inputs)
    yield whole(f"{role}_bias", f"{prefix}.bias", outputs)


def _norm(role: str, prefix: str, hidden: int) -> Iterator[Weight]:
    yield whole(role, f"{prefix}.weight", hidden)
    yield whole(f"{role}_bias", f"{prefix}.bias", hidden)


def _convolution(role: str, inputs: int, outputs: int) -> Iterator[Weight]:
    """Yield a convolution as a product with what its frames hold, one after the other."""
    key = f"model.{role}"
    shape = (outputs, KERNEL * inputs)
    part = Part(f"{key}.weight", (outputs, inputs, KERNEL), lambda own: _by_inputs(own, inputs))
    yield Weight(role, shape, (part,))
    yield whole(f"{role}_bias", f"{key}.bias", outputs)


def _by_inputs(weight: Tensor, inputs: int) -> Tensor:
    """Return `[O, 3·I]`, frame by frame, as `[O, I, 3]`."""
    return weight.view(len(weight), KERNEL, inputs).transpose(1, 2)

"""Models of random weights, generated in place: a shape needs no file."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bench.gpu.choose import FORMS, quantised
from tidemill.engine.kernels.attention import AttentionBackendType
from tidemill.engine.kernels.backends import choose_backend
from tidemill.engine.kernels.quantised import Quantised, quantise_fp8
from tidemill.engine.model.config.architecture import Architecture
from tidemill.engine.model.network.decoder import Decoder
from tidemill.engine.model.network.loaded_model import LoadedModel
from tidemill.engine.model.weights.quantised.loading import MADE
from tidemill.engine.model.weights.weight_map import weights_of

STD = 0.02


def random_weights(
    model: Architecture, dtype: torch.dtype, device: torch.device, form: str = ""
) -> dict[str, Tensor | Quantised]:
    """Return weights by role: normal numbers, and ones for norms.

    Layers' products are in a form of `FORMS`, such as fp8 with row scales.
    """
    quantise = FORMS[form]
    generator = torch.Generator(device).manual_seed(0)
    weights: dict[str, Tensor | Quantised] = {}
    for weight in weights_of(model):
        tensor = torch.empty(weight.shape, dtype=dtype, device=device)
        is_norm = weight.role.endswith("norm")
        weights[weight.role] = (
            tensor.fill_(1 - model.norm_offset)
            if is_norm
            else tensor.normal_(0, STD, generator=generator)
        )
        if form == "fp8" and weight.role.partition(".")[2] in MADE:
            weights[weight.role] = quantise_fp8(tensor)
        elif quantise is not None and form != "fp8" and weight.role.endswith("_proj"):
            weights[weight.role] = quantised(tensor, quantise)
    return weights


def filled_from(
    model: Architecture, stored: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor | Quantised]:
    """Return weights by role, from tensors by their names in checkpoints."""
    weights: dict[str, Tensor | Quantised] = {}
    for weight in weights_of(model):
        tensor = torch.zeros(weight.shape, dtype=dtype, device=device)
        for part in weight.parts:
            taken = tuple(slice(own.start, own.stop) for own in part.taken)
            own_place = part.place(tensor)
            own_place.copy_(stored[part.key][taken].reshape(own_place.shape))
        weights[weight.role] = tensor
    return weights


def loaded(
    model: Architecture,
    weights: dict[str, Tensor | Quantised],
    *,
    max_model_len: int = 4096,
    backend: AttentionBackendType | None = None,
) -> LoadedModel:
    """Return a decoder over these weights, like one loaded from files."""
    embedding = weights["embed_tokens"]
    assert isinstance(embedding, Tensor)
    dtype, device = embedding.dtype, embedding.device
    shapes = model.attention_shapes
    return LoadedModel(
        network=Decoder(model, weights),
        shapes=shapes,
        backend=backend or choose_backend(shapes, dtype, device),
        dtype=dtype,
        device=device,
        vocab_size=model.vocab_size,
        max_model_len=min(model.max_positions, max_model_len),
        hidden_size=model.hidden_size,
        max_intermediate_size=model.max_intermediate_size,
        recurrent_shapes=model.recurrent_shapes,
    )

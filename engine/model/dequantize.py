"""Dequantised weights in fp32, by the names of an unquantised checkpoint."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..kernels.quantised import as_tensor
from .checkpoint import Checkpoint
from .families import architecture_of
from .hf_config import HFConfig
from .weight_map import weights_of
from .weights import read_weights


def dequantised_copy(
    checkpoint: Checkpoint, hf_config: HFConfig, device: torch.device, num_layers: int | None
) -> dict[str, Tensor]:
    """Return a decoder's weights in fp32, or those of so many first layers, by stored names."""
    architecture = architecture_of(hf_config)
    weights = read_weights(
        checkpoint,
        architecture,
        torch.float32,
        device,
        is_multimodal=hf_config.is_multimodal,
        num_layers=num_layers,
    )
    architecture = replace(architecture, blocks=architecture.blocks[:num_layers])
    copied: dict[str, Tensor] = {}
    for weight in weights_of(architecture):
        for part in weight.parts:
            own = part.place(as_tensor(weights[weight.role])).reshape(part.read_shape)
            if part.read_shape != part.shape:
                whole = copied.setdefault(part.key, own.new_empty(part.shape))
                whole[tuple(slice(taken.start, taken.stop) for taken in part.taken)] = own
            else:
                copied[part.key] = own
    if architecture.tie_word_embeddings:
        head, embedding = (
            f"{name}.weight"
            for name in (architecture.names.lm_head, architecture.names.embed_tokens)
        )
        copied[head] = as_tensor(weights.get("lm_head", copied[embedding]))
    return copied

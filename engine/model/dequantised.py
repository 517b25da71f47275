"""What quantised weights stand for, under the names that an unquantised checkpoint has for them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from engine.kernels.quantised import as_tensor
from engine.model.checkpoint import Checkpoint
from engine.model.description import Description
from engine.model.families import architecture_of
from engine.model.layout import EMBEDDING, HEAD, weights_of
from engine.model.weights import read_weights


def dequantised_copy(
    checkpoint: Checkpoint, description: Description, device: torch.device, num_layers: int | None
) -> dict[str, Tensor]:
    """Return a decoder's weights in fp32, or those of so many first layers, by stored names."""
    architecture = architecture_of(description)
    weights = read_weights(
        checkpoint,
        architecture,
        torch.float32,
        device,
        is_part=description.is_part,
        num_layers=num_layers,
    )
    architecture = replace(architecture, blocks=architecture.blocks[:num_layers])
    copied = {}
    for weight in weights_of(architecture):
        for part in weight.parts:
            copied[part.key] = part.place(as_tensor(weights[weight.role]))
    if architecture.is_tied:
        copied[HEAD] = as_tensor(weights.get("head", copied[EMBEDDING]))
    return copied

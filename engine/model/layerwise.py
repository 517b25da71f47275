"""Decoder layer by layer, for its parity check: the weights of one layer are in memory at a time.

Its vocabulary is cut to the first tokens, of which the check is: embedding and head are rows that
do not depend on each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Self

import torch
from torch import Tensor

from ..kernels.backends import choose_backend
from ..kernels.quantised import Matrix
from .architecture import Architecture
from .checkpoint import Checkpoint
from .decoder import Decoder
from .hf_config import HFConfig
from .loaded_model import LoadedModel
from .parity import chunked_logits
from .parity_inputs import PARITY_VOCAB
from .weight_map import Weight, table, weights_of
from .weights import StoredTensor, find_layout, read_stored

OUTER = -1


@dataclass(frozen=True, slots=True)
class LayerReader:
    """Reader of the weights of one layer, or of those outside of layers, after another.

    `architecture` is that of the cut model; `weights[i]` are those of layer i, `weights[OUTER]`
    the others.
    """

    checkpoint: Checkpoint
    architecture: Architecture
    device: torch.device
    weights: Mapping[int, Sequence[Weight]]
    stored: Mapping[str, StoredTensor]

    @classmethod
    def open(
        cls,
        checkpoint: Checkpoint,
        hf_config: HFConfig,
        architecture: Architecture,
        device: torch.device,
        *,
        num_layers: int | None,
    ) -> Self:
        """Return the reader of a model, or of its first layers, with the first tokens."""
        stored = find_layout(
            checkpoint,
            architecture,
            list(weights_of(architecture)),
            is_multimodal=hf_config.is_multimodal,
        )
        vocab_size = architecture.vocab_size
        if checkpoint.quantization is None or checkpoint.quantization.weight_format is None:
            vocab_size = min(vocab_size, PARITY_VOCAB)  # else the head may be quantised
        cut = replace(architecture, blocks=architecture.blocks[:num_layers], vocab_size=vocab_size)
        weights: dict[int, list[Weight]] = {}
        for weight in weights_of(cut):
            layer = weight.role.partition(".")[0]
            weights.setdefault(int(layer) if layer.isdecimal() else OUTER, []).append(weight)
        if cut.tie_word_embeddings and f"{cut.names.lm_head}.weight" in stored:
            weights[OUTER].append(table("lm_head", cut.names.lm_head, cut))
        return cls(checkpoint, cut, device, weights, stored)

    def read(self, layer: int, dtype: torch.dtype) -> dict[str, Matrix]:
        """Return the weights of a layer, or of `OUTER`, by their roles."""
        return read_stored(self.checkpoint, self.weights[layer], self.stored, dtype, self.device)

    def num_bytes(self, layer: int) -> int:
        """Return the bytes of a layer in fp32."""
        return sum(prod(weight.shape) for weight in self.weights[layer]) * torch.float32.itemsize


def layerwise_logits(
    reader: LayerReader, loaded: LoadedModel, dtype: torch.dtype, token_ids: Tensor
) -> Tensor:
    """Return `chunked_logits` of a model that is loaded, computed in another dtype."""
    network = Decoder(
        reader.architecture,
        reader.read(OUTER, dtype),
        layer_weights=partial(reader.read, dtype=dtype),
    )
    shapes = tuple(block.attention for block in reader.architecture.blocks)
    model = replace(
        loaded,
        network=network,
        shapes=shapes,
        backend=choose_backend(shapes, dtype, loaded.device),
        dtype=dtype,
        vocab_size=reader.architecture.vocab_size,
        vision_encoder=None,
    )
    return chunked_logits(model, token_ids, run=network.forward_layerwise)

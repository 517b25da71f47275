"""Decoder layer by layer, for its parity check: one layer's weights are in memory at a time.

Its vocabulary is cut to the first and the last tokens, which the check uses: rows of embedding and
head do not depend on each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import torch
from torch import Tensor

from ...kernels.backends import choose_backend
from ...kernels.quantised import Matrix
from ...scheduling.images import PromptImage
from ..config.architecture import Architecture
from ..config.hf_config import HFConfig
from ..network.decoder import Decoder
from ..network.loaded_model import LoadedModel
from ..weights.checkpoint import FLOATS, Checkpoint
from ..weights.weight_map import weights_of
from ..weights.weight_parts import Weight, table, table_ends
from ..weights.weights import StoredTensor, as_stored, find_layout, read_stored
from .logits import chunked_logits
from .parity_inputs import PARITY_VOCAB, num_bytes

OUTER = -1
# Weights with one row per token of the vocabulary.
TABLES = frozenset({"embed_tokens", "lm_head", "lm_head_bias"})


@dataclass(frozen=True, slots=True)
class LayerReader:
    """Reads a model's weights one layer at a time.

    `architecture` is that of the cut model, whose vocabulary is the tokens `vocabulary [V]` of the
    whole one; `weights[i]` are those of layer i, `weights[OUTER]` the others.
    """

    checkpoint: Checkpoint
    architecture: Architecture
    device: torch.device
    vocabulary: Tensor
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
        is_cut: bool = True,
    ) -> Self:
        """Return the reader of a model, or of its first layers, with a cut or a whole vocabulary.

        A vocabulary whose embedding or head is quantised is not cut.
        """
        architecture = as_stored(checkpoint, architecture)
        stored = find_layout(
            checkpoint,
            architecture,
            list(weights_of(architecture)),
            is_multimodal=hf_config.is_multimodal,
        )
        first = replace(architecture, blocks=architecture.blocks[:num_layers])
        weights: dict[int, list[Weight]] = {}
        for weight in weights_of(first):
            layer = weight.role.partition(".")[0]
            weights.setdefault(int(layer) if layer.isdecimal() else OUTER, []).append(weight)
        if first.tie_word_embeddings and f"{first.names.lm_head}.weight" in stored:
            weights[OUTER].append(table("lm_head", first.names.lm_head, first))
        tables = {one.parts[0].key for one in weights[OUTER] if one.role in TABLES}
        are_floats = all(key in stored and stored[key].kind in FLOATS for key in tables)
        vocabulary, count = torch.arange(first.vocab_size), PARITY_VOCAB // 2
        if is_cut and are_floats and first.vocab_size > PARITY_VOCAB:
            vocabulary = torch.cat([vocabulary[:count], vocabulary[-count:]])
            weights[OUTER] = [
                table_ends(one, count) if one.role in TABLES else one for one in weights[OUTER]
            ]
        cut = replace(first, vocab_size=len(vocabulary))
        return cls(checkpoint, cut, device, vocabulary, weights, stored)

    def read(self, layer: int, dtype: torch.dtype) -> dict[str, Matrix]:
        """Return the weights of a layer, or of `OUTER`, by their roles."""
        return read_stored(self.checkpoint, self.weights[layer], self.stored, dtype, self.device)

    def num_bytes(self, layer: int) -> int:
        """Return the bytes of a layer in fp32."""
        return num_bytes(self.weights[layer])


def layerwise_logits(
    reader: LayerReader,
    loaded: LoadedModel,
    dtype: torch.dtype,
    token_ids: Tensor,
    prompt_images: Sequence[PromptImage] = (),
) -> Tensor:
    """Return `chunked_logits` of a loaded model, computed in another dtype.

    Images are for the loaded dtype only: its vision encoder reads them.
    """
    assert not prompt_images or dtype == loaded.dtype
    network = Decoder(
        reader.architecture,
        reader.read(OUTER, dtype),
        layer_weights=partial(reader.read, dtype=dtype),
    )
    shapes = reader.architecture.attention_shapes
    model = replace(
        loaded,
        network=network,
        shapes=shapes,
        recurrent_shapes=reader.architecture.recurrent_shapes,
        backend=choose_backend(shapes, dtype, loaded.device),
        dtype=dtype,
        vocab_size=reader.architecture.vocab_size,
        vision_encoder=loaded.vision_encoder if prompt_images else None,
    )
    return chunked_logits(model, token_ids, prompt_images, run=network.forward_layerwise)

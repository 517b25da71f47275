"""Encoders of transformers' own classes: for every family that neither of our networks computes.

They run sequence by sequence, without padding and with their own attention: slowly, and right
whatever they do with masks and positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.errors import ModelRefused
from engine.kernels.attention import AttentionBackend
from engine.kernels.reference import ReferenceAttention
from engine.kernels.step import Step
from engine.model.checkpoint import Checkpoint
from engine.model.description import CONFIG
from engine.model.encoders.eager import inputs_of, read_config, read_module
from engine.model.encoders.heads import Head
from engine.model.encoders.network import LoadedEncoder
from engine.model.encoders.running import TokenSequence
from engine.model.fallback import positions_of

# Families whose tables of positions begin behind the row of padding.
_OFFSET = frozenset(
    """
    data2vec-text esm ibert longformer luke mpnet roberta-prelayernorm xlm-roberta-xl xmod
    """.split()
)


class ForeignTokens:
    """A `TokenNetwork` over a module of transformers.

    What a classifier gives for a sequence stands in for the hidden state of its one row.
    """

    needs_torch = True

    def __init__(self, module: Any, *, is_classifier: bool, num_types: int) -> None:
        self.num_layers_begun = 0
        self._module = module
        self._is_classifier = is_classifier
        self._num_types = num_types

    def encode(self, step: Step, type_ids: Tensor | None, attention: AttentionBackend) -> Tensor:
        """Run whole sequences, one after the other; see `TokenNetwork.encode`."""
        del attention  # the module has its own
        starts = step.host.query_starts.tolist()
        ids = step.host.token_ids.numpy()
        types = None if type_ids is None else type_ids.cpu().numpy()
        outputs = []
        for start, stop in pairwise(starts):
            self.num_layers_begun += 1
            own_types = np.zeros(stop - start, np.int32) if self._num_types > 1 else None
            if types is not None:
                own_types = types[start:stop]
            inputs = inputs_of(TokenSequence(ids[start:stop], own_types), step.token_ids.device)
            output = self._module(**inputs)
            outputs.append(output.logits if self._is_classifier else output.last_hidden_state[0])
        together = torch.cat(outputs)
        return together if self._is_classifier else together[step.logit_rows]


def load(
    checkpoint: Checkpoint,
    said: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    *,
    is_classifier: bool,
) -> LoadedEncoder:
    """Return the model in a dtype on a device; `ModelRefused` says why it cannot be served."""
    config = read_config(checkpoint.name, said)
    if getattr(config, "is_encoder_decoder", False):
        raise ModelRefused(
            f"{checkpoint.name}: model type {config.model_type!r} is an encoder-decoder: neither "
            "vectors nor scores are made of its two halves."
        )
    kind = {"is_classifier": is_classifier, "is_part": "text_config" in said}
    module = read_module(checkpoint, config, dtype, device, None, **kind)
    num_types = getattr(config, "type_vocab_size", None) or 0
    hidden = config.num_labels if is_classifier else getattr(config, "hidden_size", None)
    vocab_size = getattr(config, "vocab_size", None)
    if not hidden or not vocab_size:
        raise ModelRefused(
            f"{checkpoint.name}: {CONFIG} says neither of hidden_size and vocab_size: what is "
            "served reads tokens and gives a vector for each."
        )
    return LoadedEncoder(
        network=ForeignTokens(module, is_classifier=is_classifier, num_types=num_types),
        head=Head(("lasttoken",)),
        shapes=(),
        backend=ReferenceAttention,
        dtype=dtype,
        device=device,
        vocab_size=vocab_size,
        num_types=num_types,
        max_model_len=_positions(config),
        hidden_size=hidden,
    )


def _positions(config: Any) -> int:
    """Return how many tokens a sequence may have, less what a family's table has for padding."""
    positions = positions_of(config) or 512
    padding = getattr(config, "pad_token_id", None)
    is_offset = config.model_type in _OFFSET
    return positions - padding - 1 if is_offset and isinstance(padding, int) else positions

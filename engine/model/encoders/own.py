"""A model run by our encoder: loaded from its files with its own head, if it has one."""

from __future__ import annotations

import re

import torch

from engine.kernels.backends import choose_backend
from engine.model.checkpoint import Checkpoint
from engine.model.encoders.architecture import EncoderArchitecture
from engine.model.encoders.encoder import Encoder
from engine.model.encoders.heads import Head, parts_of
from engine.model.encoders.layout import head_weights, weights_of
from engine.model.encoders.network import LoadedEncoder
from engine.model.weights import check_stored, filled, stored_in

# What checkpoints hold that no hidden state comes of: what follows from the config, and what was
# trained on top of the first token.
_IGNORED = re.compile(r"(^|\.)(position_ids$|inv_freq$|pooler\.)")
_RENAMED = {r"LayerNorm\.gamma$": "LayerNorm.weight", r"LayerNorm\.beta$": "LayerNorm.bias"}


def load(
    checkpoint: Checkpoint,
    architecture: EncoderArchitecture,
    dtype: torch.dtype,
    device: torch.device,
) -> LoadedEncoder:
    """Return the model in a dtype on a device; `ModelRefused` says what is wrong with its weights.

    Without a head of its own it gives what its first token's hidden state is.
    """
    wanted = [*weights_of(architecture), *head_weights(architecture.head)]
    base = architecture.names.base
    stored = stored_in(checkpoint.files, wanted, base=base, renamed=_RENAMED)
    check_stored(checkpoint, architecture.title, wanted, stored, base=base, ignored=_IGNORED)
    weights = filled(checkpoint.name, wanted, stored, dtype, device)
    head = Head((architecture.head_pooling,), parts_of(architecture.head, weights))
    shapes = tuple(block.attention for block in architecture.blocks)
    return LoadedEncoder(
        network=Encoder(architecture, weights),
        head=head,
        shapes=shapes,
        backend=choose_backend(shapes, dtype, device),
        dtype=dtype,
        device=device,
        vocab_size=architecture.vocab_size,
        num_types=architecture.num_types,
        max_model_len=architecture.max_positions,
        hidden_size=architecture.hidden_size,
    )

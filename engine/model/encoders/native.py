"""A model run by our encoder: loaded from its files with its own head, if it has one."""

from __future__ import annotations

import re
from dataclasses import replace

import torch

from ...kernels.backends import choose_backend, choose_elementwise, choose_linear
from ..weights.checkpoint import Checkpoint, check_token_head
from ..weights.weights import check_stored, fill_weights, find_stored
from .architecture import EncoderArchitecture
from .encoder import Encoder
from .loaded_encoder import LoadedEncoder
from .pooler import Pooler, parts_of, sparse_pooler
from .position_bias import position_bias
from .weight_map import head_weights, weights_of

# Tensors in checkpoints that do not affect hidden states: those that follow from the config, and
# heads that were trained on the first token.
_IGNORED = re.compile(r"(^|\.)(position_ids$|inv_freq$|pooler\.)")
_RENAMED = {r"LayerNorm\.gamma$": "LayerNorm.weight", r"LayerNorm\.beta$": "LayerNorm.bias"}


def load(
    checkpoint: Checkpoint,
    architecture: EncoderArchitecture,
    dtype: torch.dtype,
    device: torch.device,
) -> LoadedEncoder:
    """Return the model in a dtype on a device; `ModelRefused` names problems with its weights.

    Without its own head its output is the hidden state of its first token.
    """
    wanted = [*weights_of(architecture), *head_weights(architecture.head)]
    base = architecture.names.base_model_prefix
    renamed = _RENAMED
    if checkpoint.prefix:
        renamed = {**renamed, f"^{re.escape(checkpoint.prefix)}": f"{base}."}
    stored = find_stored(checkpoint.files, wanted, base=base, renamed=renamed)
    check_stored(checkpoint, architecture.class_name, wanted, stored, base=base, ignored=_IGNORED)
    is_language = bool(architecture.head) and architecture.head == architecture.language_head
    if architecture.head_pooling == "tokens" and not is_language:
        used = {part.key for weight in wanted for part in weight.parts}
        unused = [
            tensor.name
            for key, tensor in stored.items()
            if not (key in used or _IGNORED.search(key))
        ]
        check_token_head(checkpoint.name, architecture.class_name, base, unused)
    weights = fill_weights(checkpoint.name, wanted, stored, dtype, device)
    modes = () if architecture.head_pooling == "tokens" else (architecture.head_pooling,)
    if is_language:
        linears = choose_linear(choose_elementwise(dtype, device), device)
        pooler: Pooler = sparse_pooler(architecture.head, weights, linears)
    else:
        pooler = Pooler(modes, parts_of(architecture.head, weights))
    shapes = tuple(block.attention for block in architecture.blocks)
    if (table := weights.pop("position_bias", None)) is not None:
        bias = position_bias(table, architecture.max_positions)
        shapes = tuple(replace(shape, position_bias=bias) for shape in shapes)
    return LoadedEncoder(
        network=Encoder(architecture, weights),
        pooler=pooler,
        shapes=shapes,
        backend=choose_backend(shapes, dtype, device),
        dtype=dtype,
        device=device,
        vocab_size=architecture.vocab_size,
        num_types=architecture.num_types,
        max_model_len=architecture.max_positions,
        hidden_size=architecture.hidden_size,
        max_intermediate_size=architecture.intermediate_size,
    )

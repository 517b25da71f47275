"""Batch invariance: a model whose rows are the same bits whatever runs next to them, or none."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..config import EngineConfig
from ..errors import ModelRefused
from ..kernels.backends import choose_recurrence, is_batch_invariant
from ..kernels.cpu.linear import supports as has_own_linear
from ..kernels.paged_step import Span, paged_step
from .network.decoder import Decoder
from .network.loaded_model import LoadedModel
from .parity.logits import parity_tokens

# How many copies of a prompt run side by side, and where each is cut into chunks.
WAYS: tuple[tuple[int, tuple[int, ...]], ...] = ((1, ()), (1, (39,)), (3, (1, 2)), (3, (17, 39)))


def check_batch_invariance(settings: EngineConfig, loaded: LoadedModel) -> None:
    """Refuse a model or device with sums whose order depends on other rows, naming the reason.

    The rest is tested on a prompt that is computed in several ways, by all bits of its logits.
    """
    if loaded.device.type != "cpu":
        why = "matrix products on GPUs choose their tiles by the number of rows: add --device cpu"
    elif not isinstance(loaded.network, Decoder):
        why = "transformers runs this model, in products of any number of rows"
    elif not _has_invariant_state(loaded):
        why = "its attention runs in torch, whose sums depend on the number of tokens"
    elif settings.lora_modules and not has_own_linear(loaded.dtype):
        why = "adapters run in torch on this processor: merge the adapter into the model"
    elif not _has_equal_bits(loaded):
        why = "its logits depend on other rows on this machine"
    else:
        return
    raise ModelRefused(f"{settings.model}: --batch-invariant is not supported: {why}.")


def _has_invariant_state(loaded: LoadedModel) -> bool:
    shapes = loaded.recurrent_shapes
    recurrence = choose_recurrence(shapes, loaded.dtype, loaded.device) if shapes else None
    return is_batch_invariant(loaded.backend, recurrence)


@torch.inference_mode()
def _has_equal_bits(loaded: LoadedModel) -> bool:
    tokens = parity_tokens(loaded.vocab_size, (shape.window or 0 for shape in loaded.shapes))
    alone, *others = (_last_logits(loaded, tokens, *way) for way in WAYS)
    return all(torch.equal(row, alone[0]) for logits in others for row in logits)


def _last_logits(
    loaded: LoadedModel, token_ids: Tensor, copies: int, cuts: Sequence[int]
) -> Tensor:
    """Return the last token's logits `[copies, V]` of a prompt that is computed in chunks."""
    tokens, size = token_ids.numpy(), loaded.backend.page_size
    pages = np.arange(copies * -(-len(tokens) // size)).reshape(copies, -1)
    attention = loaded.attention(pages.size, copies)
    logits = torch.empty(0)
    for start, stop in zip((0, *cuts), (*cuts, len(tokens)), strict=True):
        step = paged_step(
            [Span(start, stop, own) for own in pages],
            size,
            loaded.device,
            token_ids=np.tile(tokens[start:stop], copies),
            adapters=np.zeros(copies, np.int64),
            state_sources=np.arange(copies) if start else np.full(copies, -1),
            state_rows=np.arange(copies),
        )
        attention.prepare(step)
        logits = loaded.network.forward(step, attention)
    return logits

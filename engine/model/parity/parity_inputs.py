"""Inputs of a decoder's parity check: tokens, and the number of layers that they run through.

A few tokens run through all layers, if these fit and take less than minutes. Enough tokens to move
a window run through as many layers as are affordable: all, else the first, with one of each kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.attention import AttentionShape
from ..config.architecture import Architecture, Block
from ..network.kv_cache_size import free_bytes
from ..weights.weight_map import weights_of
from ..weights.weight_parts import Weight
from .logits import PARITY_TOKENS, parity_tokens

# Tokens of a cut vocabulary, half of them its first and half its last.
PARITY_VOCAB = 4096
# Weights in fp32 that are read layer by layer within a minute: three times, at 2 GB/s.
MOST_BYTES = 40e9
# Longer windows are compared by their masks only.
LONGEST_WINDOW = 4096
# Memory of a network in fp32 while it is built, as a multiple of its weights.
ROOM = 1.25
# Passes over the tokens: two copies in fp32 and as served, and one each with eager attention.
PASSES = 6
# Tensors of all scores of a layer that eager attention has at a time.
SCORES = 3


class Budget(NamedTuple):
    """Limit of the cost of a window's tokens: some ten seconds, and eager's scores."""

    flops: float
    scores_bytes: int


BUDGETS = {"cpu": Budget(1e12, 2**28), "cuda": Budget(4e14, 2**33)}


class ParityInput(NamedTuple):
    """Tokens `[t]`, and the number of first layers that they run through, None being all.

    Tokens are ids of the cut vocabulary if it is cut.
    """

    num_layers: int | None
    token_ids: Tensor


def parity_inputs(
    architecture: Architecture, device: torch.device, *, is_layerwise: bool = False
) -> list[ParityInput]:
    """Return the inputs of a check: first through all layers, then past longer windows.

    Only the first layers are compared if all would not fit, or take more than a minute.
    """
    weights = list(weights_of(architecture))
    is_whole = num_bytes(weights) <= MOST_BYTES if is_layerwise else fits(weights, device)
    first = num_layers_with_all_kinds(architecture)
    inputs: list[ParityInput] = []
    longest = 0
    for num_layers in dict.fromkeys((None if is_whole else first, first)):
        blocks = architecture.blocks[:num_layers]
        windows = [
            window
            for window in {_most_seen(block.attention) for block in blocks}
            if longest
            < window
            <= min(LONGEST_WINDOW, _short_positions(architecture) - PARITY_TOKENS)
            and is_affordable(blocks, architecture, window, device)
        ]
        if windows or not inputs:
            longest = max(windows, default=0)
            vocab_size = architecture.vocab_size
            vocab_size = min(vocab_size, PARITY_VOCAB) if is_layerwise else vocab_size
            tokens = parity_tokens(vocab_size, windows, LONGEST_WINDOW)
            inputs.append(ParityInput(num_layers, tokens))
    return inputs


def is_affordable(
    blocks: Sequence[Block], architecture: Architecture, num_tokens: int, device: torch.device
) -> bool:
    """Return whether tokens are few enough for blocks; eager attention scores all pairs."""
    budget = BUDGETS.get(device.type, BUDGETS["cpu"])
    heads = [block.attention.num_query_heads for block in blocks]
    scores = SCORES * max(heads) * num_tokens**2 * torch.float32.itemsize
    per_token = sum(2 * _num_active(block, architecture) for block in blocks)
    per_pair = sum(
        4 * block.attention.num_query_heads * block.attention.key_dim for block in blocks
    )
    flops = PASSES * num_tokens * (per_token + per_pair * num_tokens)
    return scores <= budget.scores_bytes and flops <= budget.flops


def fits(weights: Iterable[Weight], device: torch.device) -> bool:
    """Return whether a network of these weights fits in fp32 on the host and the device."""
    free = min(free_bytes(device), free_bytes(torch.device("cpu")))
    return ROOM * num_bytes(weights) <= free


def num_bytes(weights: Iterable[Weight]) -> int:
    """Return the bytes of weights in fp32."""
    return sum(prod(weight.shape) for weight in weights) * torch.float32.itemsize


def _most_seen(shape: AttentionShape) -> int:
    """Return the most tokens that a query sees, by its window or by a selection; 0: all."""
    return shape.most_visible or shape.num_selected


def _short_positions(architecture: Architecture) -> int:
    """Return the number of tokens for which transformers' frequencies do not change."""
    return architecture.original_positions or architecture.max_positions


def num_layers_with_all_kinds(architecture: Architecture) -> int:
    """Return how many layers include one of each kind, and at least two."""
    first = [architecture.blocks.index(block) for block in set(architecture.blocks)]
    return min(max(*first, 1) + 1, len(architecture.blocks))


def _num_active(block: Block, architecture: Architecture) -> int:
    """Return about how many weights a token is multiplied with in a block."""
    shape, hidden = block.attention, architecture.hidden_size
    inner = architecture.intermediate_size
    if block.experts is not None:
        inner = block.experts.num_experts_per_tok * block.experts.intermediate_size
    heads = 2 * (shape.num_query_heads + shape.num_kv_heads) * shape.key_dim
    return hidden * (heads + 3 * inner)

"""Inputs of a decoder's parity check: tokens, and how many layers they run through.

Few tokens run through all layers, where that fits and takes no minutes. So many that a window
slides run through as many layers as can be afforded: all, else the first ones, of each kind one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ..config.architecture import Architecture, Block
from ..network.kv_cache_size import free_bytes
from ..weights.weight_map import weights_of
from ..weights.weight_parts import Weight
from .logits import PARITY_TOKENS, parity_tokens

# Tokens of a cut vocabulary, half of them its first and half its last.
PARITY_VOCAB = 4096
# Weights in fp32 that are read layer by layer within a minute: three times, at 2 GB/s.
MOST_BYTES = 40e9
# Longer windows are compared by masks alone.
LONGEST_WINDOW = 4096
# What a network in fp32 takes while it is made, as a multiple of its weights.
ROOM = 1.25
# Passes over the tokens: of two copies in fp32 and as served, of eager attention once each.
PASSES = 6
# Tensors of all scores of a layer that eager attention has at a time.
SCORES = 3


class Budget(NamedTuple):
    """The most that the tokens of a window may cost: some ten seconds, and eager's scores."""

    flops: float
    scores_bytes: int


BUDGETS = {"cpu": Budget(1e12, 2**28), "cuda": Budget(4e14, 2**33)}


class ParityInput(NamedTuple):
    """Tokens `[t]`, and through how many first layers they run, None being all.

    Tokens are those of a vocabulary that is cut, where that is.
    """

    num_layers: int | None
    token_ids: Tensor


def parity_inputs(
    architecture: Architecture, device: torch.device, *, is_layerwise: bool = False
) -> list[ParityInput]:
    """Return what is compared: first through all layers, then past longer windows.

    The first layers alone where all would not fit, or layer by layer take more than a minute.
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
            for window in {block.attention.most_visible for block in blocks}
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
    """Say whether so many tokens may run through blocks; eager attention scores all pairs."""
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
    """Say whether a network of these weights does in fp32: transformers makes it on the host."""
    free = min(free_bytes(device), free_bytes(torch.device("cpu")))
    return ROOM * num_bytes(weights) <= free


def num_bytes(weights: Iterable[Weight]) -> int:
    """Return the bytes of weights in fp32."""
    return sum(prod(weight.shape) for weight in weights) * torch.float32.itemsize


def _short_positions(architecture: Architecture) -> int:
    """Return up to where transformers turns by the same frequencies, whatever it runs."""
    return architecture.original_positions or architecture.max_positions


def num_layers_with_all_kinds(architecture: Architecture) -> int:
    """Return how many layers come before there is one of each kind, and two at least."""
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

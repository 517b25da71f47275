"""A mixture of experts: each token through the MLPs that its router chose for it, in torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.blocks import Blocks, Gate
from engine.kernels.quantised import Matrix, as_tensor

# What torch's grouped product wants rows to be a multiple of.
ALIGNED_BYTES = 16


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The MLPs of `E` experts, gate and up as one, and their biases."""

    gate_up: Matrix  # [E, 2·I, H]
    down: Matrix  # [E, H, I]
    gate_up_bias: Tensor | None  # [E, 2·I]
    down_bias: Tensor | None  # [E, H]


class MixesExperts(Protocol):
    """These functions for one kind of device."""

    def choose(
        self, scores: Tensor, count: int, *, among_chosen: bool, is_renormalised: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the experts of each token and their shares: `scores [T, E]` → `[T, count]` twice.

        Shares (fp32) are a softmax of the scores, over all or `among_chosen`; renormalised they sum
        to one.
        """

    def mix(
        self,
        x: Tensor,
        experts: Tensor,
        shares: Tensor,
        weights: ExpertWeights,
        gate: Gate,
        blocks: Blocks,
    ) -> Tensor:
        """Return the sum of what each token's experts give, by their shares: `x [T, H]` → `[T, H]`.

        Tokens are sorted by expert, so that all of one expert are one product.
        """


def choose(
    scores: Tensor, count: int, *, among_chosen: bool, is_renormalised: bool
) -> tuple[Tensor, Tensor]:
    """See `MixesExperts.choose`."""
    if among_chosen:
        best, experts = scores.float().topk(count, dim=-1)
        return experts, best.softmax(dim=-1)
    shares, experts = scores.float().softmax(dim=-1).topk(count, dim=-1)
    return experts, shares / shares.sum(dim=-1, keepdim=True) if is_renormalised else shares


def mix(
    x: Tensor, experts: Tensor, shares: Tensor, weights: ExpertWeights, gate: Gate, blocks: Blocks
) -> Tensor:
    """See `MixesExperts.mix`."""
    count = experts.shape[1]
    order = experts.flatten().argsort(stable=True)  # [T · count]
    sorted_experts = experts.flatten()[order]
    stops = torch.searchsorted(
        sorted_experts, torch.arange(weights.down.shape[0], device=x.device), right=True
    ).int()
    tokens = order // count
    both = _grouped(x[tokens], as_tensor(weights.gate_up), stops)
    if weights.gate_up_bias is not None:
        both += weights.gate_up_bias[sorted_experts]
    out = _grouped(blocks.gated(both, gate), as_tensor(weights.down), stops)
    if weights.down_bias is not None:
        out += weights.down_bias[sorted_experts]
    weighted = torch.empty_like(out, dtype=torch.float32)
    weighted[order] = out * shares.flatten()[order, None]
    return weighted.view(len(x), count, -1).sum(dim=1).to(x.dtype)


def _grouped(x: Tensor, weight: Tensor, stops: Tensor) -> Tensor:
    """Multiply rows up to each stop by that weight: `x [S, I]`, `[E, O, I]`, `[E]` → `[S, O]`."""
    if all(width * weight.itemsize % ALIGNED_BYTES == 0 for width in weight.shape[1:]):
        return functional.grouped_mm(x, weight.transpose(1, 2), offs=stops)
    parts = x.tensor_split(stops[:-1].cpu().long())
    return torch.cat([part @ own.T for part, own in zip(parts, weight, strict=True)])

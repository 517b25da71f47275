"""Mixture of experts (MoE) in torch: routing, and each token's MLPs; the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from .elementwise import Activation, ElementwiseOps, Gate, activate, sigmoid
from .quantised import Matrix, Quantised, as_tensor

# torch.grouped_mm requires rows to be a multiple of it.
ALIGNED_BYTES = 16


# "softmax_chosen" is a softmax over the chosen experts' logits alone; for "sparsemixer" see there.
Scoring = Literal["softmax", "softmax_chosen", "sigmoid", "sparsemixer"]


# Returns the weighted sum of each token's experts' outputs, see `ExpertOps.apply_experts`.
ApplyExperts = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Routing:
    """How tokens choose `count` experts each, and what share of the sum these have.

    Scores are the `scoring` of the router's logits. Experts are chosen by score plus `bias [E]`;
    with groups only in the `topk_groups` of `num_groups` whose `num_best` best sum highest. Shares
    are the scores, to sum to one if `is_renormalised`, times `scale`.
    """

    count: int
    scoring: Scoring = "softmax"
    is_renormalised: bool = True
    bias: Tensor | None = None
    num_groups: int = 1
    topk_groups: int = 1
    scale: float = 1.0
    jitter: float = 0.0
    num_best: int = 2

    @property
    def is_plain(self) -> bool:
        """Return whether it is a softmax and nothing else."""
        is_softmax = self.scoring in {"softmax", "softmax_chosen"} and self.bias is None
        return is_softmax and self.num_groups == 1 and self.scale == 1


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Weights of the MLPs of `E` experts, gate and up merged or up alone, and their biases."""

    gate_up: Matrix  # [E, 2·I, H], without a gate [E, I, H]
    down: Matrix  # [E, H, I]
    gate_up_bias: Tensor | None  # as gate_up without the last axis
    down_bias: Tensor | None  # [E, H]

    def first(self, count: int) -> ExpertWeights:
        """Return the weights of the first experts."""
        gate_up_bias, down_bias = (
            None if bias is None else bias[:count] for bias in (self.gate_up_bias, self.down_bias)
        )
        gate_up, down = (
            matrix.first(count) if isinstance(matrix, Quantised) else matrix[:count]
            for matrix in (self.gate_up, self.down)
        )
        return ExpertWeights(gate_up, down, gate_up_bias, down_bias)


class ExpertOps(Protocol):
    """MoE functions of one kind of device."""

    def select_experts(
        self, scores: Tensor, count: int, *, among_chosen: bool, is_renormalised: bool
    ) -> tuple[Tensor, Tensor]:
        """Return each token's top-k experts and routing weights: `[T, E]` → `[T, count]` twice.

        Routing weights (fp32), the `shares`, are a softmax of the router's `scores`, over all or
        `among_chosen`; renormalised they sum to one.
        """

    def apply_experts(
        self,
        x: Tensor,
        experts: Tensor,
        shares: Tensor,
        weights: ExpertWeights,
        gate: Gate | Activation,
        ops: ElementwiseOps,
    ) -> Tensor:
        """Return the weighted sum of each token's experts' outputs: `x [T, H]` → `[T, H]`.

        Experts without a gate have an activation instead. Tokens are sorted by expert, so that
        those of one expert are one matrix product.
        """


def select_experts(
    scores: Tensor, count: int, *, among_chosen: bool, is_renormalised: bool
) -> tuple[Tensor, Tensor]:
    """See `ExpertOps.select_experts`."""
    if among_chosen:
        best, experts = scores.float().topk(count, dim=-1)
        return experts, best.softmax(dim=-1)
    shares, experts = scores.float().softmax(dim=-1).topk(count, dim=-1)
    return experts, shares / shares.sum(dim=-1, keepdim=True) if is_renormalised else shares


def route(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """Return each token's experts and their shares: `[T, E]` → `[T, count]` twice."""
    if routing.scoring == "sparsemixer":
        return _sparsemixer(logits.float(), routing)
    is_sigmoid = routing.scoring == "sigmoid"
    scores = sigmoid(logits.float()) if is_sigmoid else logits.float().softmax(dim=-1)
    choice = scores if routing.bias is None else scores + routing.bias
    if routing.topk_groups < routing.num_groups:
        groups = choice.view(len(choice), routing.num_groups, -1)  # [T, G, E / G]
        best = groups.topk(routing.num_best, dim=-1).values.sum(dim=-1)
        best = best.topk(routing.topk_groups, dim=-1).indices
        is_out = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter(1, best, False)  # noqa: FBT003 - a number
        choice = groups.masked_fill(is_out[..., None], -torch.inf).flatten(1)
    experts = choice.topk(routing.count, dim=-1).indices
    shares = scores.gather(1, experts)
    if routing.is_renormalised:
        shares = shares / (shares.sum(dim=-1, keepdim=True) + 1e-20)
    return experts, shares * routing.scale


def _sparsemixer(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """Return each token's experts one by one, their shares those among logits that come close.

    Phi-MoE was trained with it: a logit counts if it is less than 2 · `jitter` below the best,
    relative to its size.
    """
    left, experts, shares = logits, [], []
    for _ in range(routing.count):
        best, expert = left.max(dim=-1, keepdim=True)
        is_far = (best - logits) / logits.abs().clamp(min=best) > 2 * routing.jitter
        experts.append(expert)
        shares.append(left.masked_fill(is_far, -torch.inf).softmax(dim=-1).gather(-1, expert))
        left = left.scatter(-1, expert, -torch.inf)
    return torch.cat(experts, dim=-1), torch.cat(shares, dim=-1)


def apply_experts(
    x: Tensor,
    experts: Tensor,
    shares: Tensor,
    weights: ExpertWeights,
    gate: Gate | Activation,
    ops: ElementwiseOps,
    round_activations: Callable[[Tensor, Matrix], Tensor] = lambda x, _: x,
) -> Tensor:
    """See `ExpertOps.apply_experts`; `round_activations` of each product, to emulate kernels."""
    count = experts.shape[1]
    order = experts.flatten().argsort(stable=True)  # [T · count]
    sorted_experts = experts.flatten()[order]
    stops = torch.searchsorted(
        sorted_experts, torch.arange(weights.down.shape[0], device=x.device), right=True
    ).int()
    tokens = order // count
    both = _grouped(
        round_activations(x, weights.gate_up)[tokens], as_tensor(weights.gate_up), stops
    )
    if weights.gate_up_bias is not None:
        both += weights.gate_up_bias[sorted_experts]
    inner = ops.act_and_mul(both, gate) if isinstance(gate, Gate) else activate(both, gate)
    inner = round_activations(inner, weights.down)
    out = _grouped(inner, as_tensor(weights.down), stops)
    if weights.down_bias is not None:
        out += weights.down_bias[sorted_experts]
    return combine_experts(out, order, shares)


def combine_experts(out: Tensor, order: Tensor, shares: Tensor) -> Tensor:
    """Return the weighted sum of each token's experts' outputs: sorted `[T · count, H]` → `[T, H]`.

    Row i is of the choice `order[i]`; `shares [T, count]`.
    """
    weighted = torch.empty_like(out, dtype=torch.float32)
    weighted[order] = out * shares.flatten()[order, None]
    return weighted.view(*shares.shape, -1).sum(dim=1).to(out.dtype)


def _grouped(x: Tensor, weight: Tensor, stops: Tensor) -> Tensor:
    """Multiply rows up to each stop by its weight: `[S, I]`, `[E, O, I]`, `[E]` → `[S, O]`."""
    if all(width * weight.itemsize % ALIGNED_BYTES == 0 for width in weight.shape[1:]):
        return functional.grouped_mm(x, weight.transpose(1, 2), offs=stops)
    parts = x.tensor_split(stops[:-1].cpu().long())
    return torch.cat([part @ own.T for part, own in zip(parts, weight, strict=True)])

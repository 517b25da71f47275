"""Mixture of experts on the CPU: each expert's MLP is two linear layers with prepacked weights."""

from __future__ import annotations

import torch
from torch import Tensor

from ..elementwise import Activation, Gate
from ..experts import ExpertWeights, combine_experts
from ..linear import LinearFactory
from ..quantised import as_tensor


class PackedExperts:
    """The MLPs of `E` experts; the original weights are not kept."""

    def __init__(
        self, factory: LinearFactory, weights: ExpertWeights, gate: Gate | Activation
    ) -> None:
        gate_up, down = as_tensor(weights.gate_up), as_tensor(weights.down)
        biases = _each(weights.gate_up_bias, len(down))
        self._gate_up = [
            factory.make_gated(weight, bias, gate)
            if isinstance(gate, Gate)
            else factory.make_activated(weight, bias, gate)
            for weight, bias in zip(gate_up, biases, strict=True)
        ]
        biases = _each(weights.down_bias, len(down))
        self._down = [factory.make(weight, bias) for weight, bias in zip(down, biases, strict=True)]

    def apply(self, x: Tensor, experts: Tensor, shares: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts' outputs: `x [T, H]` → `[T, H]`."""
        count = experts.shape[1]
        order = experts.flatten().argsort(stable=True)  # [T · count]
        rows = x[order // count]
        ends = experts.flatten().bincount(minlength=len(self._down)).cumsum(0).tolist()
        out = torch.empty_like(rows)
        start = 0
        for gate_up, down, end in zip(self._gate_up, self._down, ends, strict=True):
            if end > start:
                out[start:end] = down(gate_up(rows[start:end]))
            start = end
        return combine_experts(out, order, shares)


def _each(biases: Tensor | None, count: int) -> list[Tensor] | list[None]:
    return [None] * count if biases is None else list(biases)

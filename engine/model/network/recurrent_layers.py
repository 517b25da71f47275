"""Recurrent mixers of a decoder: gated DeltaNet, Mamba-2 and short convolutions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.elementwise import Norm
from ...kernels.linear import NormedLinear
from ...kernels.recurrence import GatedDelta, RecurrentBackend, RuleWeights
from ..config.architecture import Recurrence


@dataclass(frozen=True, slots=True)
class RecurrentMixer:
    """A mixer with its weights except for the out-projection; `layer` counts recurrent layers.

    `in_proj` norms its input by `norm`. `Recurrence` describes the projected parts and their use.
    """

    layer: int
    recurrence: Recurrence
    norm: Norm | None
    in_proj: NormedLinear
    conv_weight: Tensor  # [C, K]
    conv_bias: Tensor | None
    rule_weights: RuleWeights | None
    gate_norm: Tensor | None
    norm_eps: float

    def mix(
        self,
        backend: RecurrentBackend,
        x: Tensor | None,
        residual: Tensor,
        norm_over_ranks: Callable[[Tensor, Tensor, float], Tensor],
    ) -> Tensor:
        """Return the rule's gated output for a step's tokens: `[T, inner]`.

        `norm_over_ranks` is the RMS norm of numbers that are spread over the ranks.
        """
        projected = self.in_proj(x, residual)
        parts = torch.split(projected, list(self.recurrence.proj_sizes), dim=1)
        rule = self.recurrence.shape.rule
        if rule is None:
            before, behind, inputs = parts
            return self._convolve(backend, before * inputs) * behind
        assert self.rule_weights is not None
        if isinstance(rule, GatedDelta):
            channels, gate, b, a = parts
            qkv = self._convolve(backend, channels)
            out = backend.apply_delta_rule(self.layer, qkv, a, b, self.rule_weights)
        else:
            gate, channels, dt = parts
            xbc = self._convolve(backend, channels)
            out = backend.scan(self.layer, xbc, dt, self.rule_weights)
        gated = backend.gate_and_norm(
            out.flatten(1),
            gate,
            self.gate_norm,
            self.recurrence.norm_groups,
            self.norm_eps,
            is_norm_first=self.recurrence.is_norm_first,
        )
        if not self.recurrence.is_norm_shared:
            return gated
        assert self.gate_norm is not None
        return norm_over_ranks(gated, self.gate_norm, self.norm_eps)

    def _convolve(self, backend: RecurrentBackend, x: Tensor) -> Tensor:
        return backend.convolve(self.layer, x, self.conv_weight, self.conv_bias)

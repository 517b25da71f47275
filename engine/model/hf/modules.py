"""Faster modules that replace a model's own, each checked against the one it replaces.

A swap matches by pattern, runs random input through both modules, and stays only if they agree.
There is one check per kind of module, by class, shape and epsilon. A family whose norm or gate
differs keeps its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy

import torch
from torch import Tensor, nn

from ...kernels.backends import choose_elementwise
from ...kernels.elementwise import Gate

# Largest difference as a share of the largest number. A norm must also be as close to itself in
# fp32 as the one it replaces: a weight that is rounded once too often is well within the first.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
MORE_ERROR = 1.1
CHECKED_ROWS = 7
SILU = Gate()


class FusedRMSNorm(nn.Module):
    """RMSNorm in one pass: x / rms(x) · (weight + offset), fp32 inside, rounded once."""

    def __init__(self, weight: Tensor, eps: float, *, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.eps = eps
        self._ops = choose_elementwise(weight.dtype, weight.device)
        self._factor = self._ops.norm_weight(weight.detach(), offset)

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise the last axis: `[…, H]` → `[…, H]`."""
        return self._ops.rms_norm(hidden, self._factor, self.eps)


class FusedGatedMLP(nn.Module):
    """down(silu(gate(x)) · up(x)): both projections in one product, the activation in one pass."""

    def __init__(self, gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.cat([gate.weight, up.weight]), requires_grad=False)
        self.bias: nn.Parameter | None = None
        if gate.bias is not None:
            self.bias = nn.Parameter(torch.cat([gate.bias, up.bias]), requires_grad=False)
        self.down_proj = down
        self._ops = choose_elementwise(self.weight.dtype, self.weight.device)

    def forward(self, hidden: Tensor) -> Tensor:
        """Apply the block: `[…, H]` → `[…, H]`."""
        both = nn.functional.linear(hidden, self.weight, self.bias)  # […, 2·I]
        projected: Tensor = self.down_proj(self._ops.act_and_mul(both, SILU))
        return projected


def apply(network: nn.Module) -> int:
    """Swap modules that match and agree; return how many were swapped."""
    swapped = 0
    verdicts: dict[object, bool] = {}
    for parent in list(network.modules()):
        for name, child in list(parent.named_children()):
            for index, candidate in enumerate(_candidates(child)):
                # The layers of a model differ in their weights only: one check per kind is enough.
                kind = (type(child), index, repr(child))
                if kind not in verdicts:
                    verdicts[kind] = _agrees(child, candidate)
                if verdicts[kind]:
                    setattr(parent, name, candidate)
                    swapped += 1
                    break
    return swapped


def _candidates(module: nn.Module) -> Iterator[nn.Module]:
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    is_norm = type(module).__name__.endswith("RMSNorm") and isinstance(weight, Tensor)
    if is_norm and isinstance(eps, float) and weight is not None and weight.ndim == 1:
        yield FusedRMSNorm(weight, eps)
        yield FusedRMSNorm(weight, eps, offset=1.0)  # Gemma stores weight - 1
    parts = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    linears = [part for part in parts if isinstance(part, nn.Linear)]
    if len(linears) == 3 and (linears[0].bias is None) == (linears[1].bias is None):
        yield FusedGatedMLP(*linears)


def _agrees(module: nn.Module, candidate: nn.Module) -> bool:
    """Return whether both agree on random `[7, H]` rows within the dtype's rounding error."""
    weight = next(module.parameters())
    hidden = torch.randn(
        CHECKED_ROWS, weight.shape[-1], generator=torch.Generator().manual_seed(0)
    ).to(weight.device, weight.dtype)
    expected, got = module(hidden), candidate(hidden)
    if not isinstance(expected, Tensor) or expected.shape != got.shape:
        return False
    scale = expected.abs().amax().clamp(min=1e-6)
    if not (expected - got).abs().amax() <= TOLERANCE[weight.dtype] * scale:
        return False
    if not isinstance(candidate, FusedRMSNorm):
        return True
    exact = deepcopy(module).float()(hidden.float())
    own, new = ((output.float() - exact).norm() for output in (expected, got))
    return bool(new <= MORE_ERROR * own + TOLERANCE[torch.float32] * exact.norm())

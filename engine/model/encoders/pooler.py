"""Pooler: reduces hidden states to one vector or score per sequence, in fp32."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...kernels.backends import choose_pooling
from ...kernels.pooling import Segments
from .architecture import HeadLinear, HeadPart

# The rows that pooling needs: all tokens, or the first or the last of each sequence.
TokenSelection = Literal["all", "first", "last"]
HeadFunction = Callable[[Tensor], Tensor]
_SELECTIONS: dict[str, TokenSelection] = {"cls": "first", "lasttoken": "last"}


@dataclass(frozen=True, slots=True)
class Pooler:
    """Pooling by `modes`, joined, then `parts` in their order."""

    modes: tuple[str, ...]
    parts: tuple[HeadFunction, ...] = ()

    @property
    def wanted(self) -> TokenSelection:
        """Return which tokens' hidden states it needs."""
        wanted = {_SELECTIONS.get(mode, "all") for mode in self.modes}
        return wanted.pop() if len(wanted) == 1 else "all"

    def width(self, hidden_size: int, device: torch.device) -> int:
        """Return the width of a sequence's output."""
        starts = torch.tensor([0, 1], device=device)
        one = Segments(starts, starts[:1])
        return self(torch.zeros(1, hidden_size, device=device), one).shape[1]

    def __call__(self, hidden: Tensor, segments: Segments) -> Tensor:
        """Return the output for each sequence, fp32: `hidden [N, H]` → `[S, D]`."""
        x = choose_pooling(hidden.device).pool(hidden, segments, self.modes)
        for part in self.parts:
            x = part(x)
        return x


def parts_of(head: Sequence[HeadPart], weights: Mapping[str, Tensor]) -> tuple[HeadFunction, ...]:
    """Return the parts of a head with their weights, by the role names of `head_weights`."""
    return tuple(
        _part(part, weights[f"head.{index}"], weights.get(f"head.{index}_bias"))
        for index, part in enumerate(head)
    )


def unit(x: Tensor) -> Tensor:
    """Return the vectors, normalised to length 1."""
    return choose_pooling(x.device).normalise(x)


def _part(part: HeadPart, weight: Tensor, bias: Tensor | None) -> HeadFunction:
    weight, bias = weight.float(), None if bias is None else bias.float()
    if not isinstance(part, HeadLinear):
        return lambda x: functional.layer_norm(x, weight.shape, weight, bias, part.eps)
    activation: nn.Module = getattr(nn, part.activation)()
    return lambda x: activation(functional.linear(x, weight, bias))

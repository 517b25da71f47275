"""Pooler: reduces hidden states to one vector or score per sequence, or per token, in fp32."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...kernels.backends import choose_pooling, torch_on_all_threads
from ...kernels.pooling import Segments
from .architecture import HeadLinear, HeadPart

# The rows that pooling needs: all tokens, or the first or the last of each sequence.
TokenSelection = Literal["all", "first", "last"]
HeadFunction = Callable[[Tensor], Tensor]
_SELECTIONS: dict[str, TokenSelection] = {"cls": "first", "lasttoken": "last"}


@dataclass(frozen=True, slots=True)
class Pooler:
    """Pooling by `modes`, joined, then `parts` in their order; without modes, of each token."""

    modes: tuple[str, ...]
    parts: tuple[HeadFunction, ...] = ()

    @property
    def is_per_token(self) -> bool:
        """Return whether each token has an output."""
        return not self.modes

    @property
    def of_tokens(self) -> Pooler:
        """Return the pooler that applies the parts to each token."""
        return replace(self, modes=())

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
        """Return the outputs, fp32: `hidden [N, H]` → `[S, D]`, or `[N, D]` per token."""
        if self.is_per_token:
            with torch_on_all_threads(hidden.device):
                return self._through_parts(hidden.float())
        return self._through_parts(choose_pooling(hidden.device).pool(hidden, segments, self.modes))

    def _through_parts(self, x: Tensor) -> Tensor:
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

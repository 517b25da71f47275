"""Pooler: reduces hidden states to one vector or score per sequence, or per token, in fp32."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...kernels.backends import choose_pooling, torch_on_all_threads
from ...kernels.linear import Linear, LinearFactory
from ...kernels.pooling import Segments
from .architecture import HeadLinear, HeadPart
from .sentence_transformers import Splade

# The rows that pooling needs: all tokens, or the first or the last of each sequence.
TokenSelection = Literal["all", "first", "last"]
HeadFunction = Callable[[Tensor], Tensor]
# Words of the vocabulary whose logits are computed at once.
_BAND = 2048
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
    def is_sparse(self) -> bool:
        """Return whether most numbers of an output are 0."""
        return False

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


@dataclass(frozen=True, slots=True)
class SparsePooler(Pooler):
    """Pooling of SPLADE: the last part of a masked language model gives the logits of all words.

    It is computed in `bands` of the vocabulary, because the logits of all tokens of a step would
    not fit into memory. `parts` come before it.
    """

    splade: Splade = field(default_factory=Splade)
    bands: tuple[Linear, ...] = ()
    vocab_size: int = 0
    dtype: torch.dtype = torch.float32

    @property
    def is_per_token(self) -> bool:
        """See `Pooler.is_per_token`."""
        return False

    @property
    def is_sparse(self) -> bool:
        """See `Pooler.is_sparse`."""
        return True

    @property
    def of_tokens(self) -> Pooler:
        """Return the pooler that gives the logits of each token."""
        return Pooler((), (*self.parts, self._logits))

    def width(self, hidden_size: int, device: torch.device) -> int:
        """Return the size of the vocabulary."""
        del hidden_size, device
        return self.vocab_size

    def __call__(self, hidden: Tensor, segments: Segments) -> Tensor:
        """Return the weights of all words, fp32: `hidden [N, H]` → `[S, V]`."""
        ops = choose_pooling(hidden.device)
        with torch_on_all_threads(hidden.device):
            x = self._through_parts(hidden.float()).to(self.dtype)
        pooled = []
        for band in self.bands:
            logits = band(x)
            if self.splade.strategy == "max":
                # The logarithm grows with the logit: that of the largest is the largest.
                pooled.append(self._weights(ops.pool(logits, segments, ("max",))))
            else:
                means = ops.pool(self._weights(logits.float()), segments, ("mean",))
                pooled.append(means * segments.lengths[:, None])
        return torch.cat(pooled, dim=1)

    def _logits(self, x: Tensor) -> Tensor:
        return torch.cat([band(x.to(self.dtype)).float() for band in self.bands], dim=1)

    def _weights(self, logits: Tensor) -> Tensor:
        weights = logits.relu()
        for _ in range(self.splade.num_logs):
            weights = weights.log1p()
        return weights


def sparse_pooler(
    head: Sequence[HeadPart],
    weights: Mapping[str, Tensor],
    linears: LinearFactory,
) -> SparsePooler:
    """Return the pooler of a masked language model's head, with the weights of `head_weights`."""
    parts = head[:-1]
    weight, bias = weights[f"head.{len(parts)}"], weights.get(f"head.{len(parts)}_bias")
    starts = range(0, len(weight), _BAND)
    bands = tuple(
        linears.make(
            weight[start : start + _BAND].contiguous(),
            None if bias is None else bias[start : start + _BAND].contiguous(),
        )
        for start in starts
    )
    return SparsePooler(*((), parts_of(parts, weights), Splade()), bands, len(weight), weight.dtype)


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

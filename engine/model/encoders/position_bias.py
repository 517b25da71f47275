"""Relative position bias of encoders: a learned logit per head and bucket of distances."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...kernels.attention import PositionBias

# All distances from here on share a bucket.
FARTHEST = 128


def position_bias(table: Tensor, max_positions: int) -> PositionBias:
    """Return the bias of a table `[buckets, Hq]` for sequences of up to `max_positions` tokens."""
    distances = torch.arange(1 - max_positions, max_positions, device=table.device)
    logits = table.float()[buckets_of(distances, len(table))]  # [2·R + 1, Hq]
    return PositionBias(logits.T.contiguous())


def buckets_of(distances: Tensor, num_buckets: int) -> Tensor:
    """Return the buckets of distances from a query to keys, by T5 (Raffel et al., 2020).

    The upper half of the buckets is for keys after the query. Within each half, half of the
    buckets have one distance each; the others widen with the logarithm up to `FARTHEST`.
    """
    half = num_buckets // 2
    exact = half // 2
    lengths = distances.abs()
    scale = math.log(FARTHEST / exact)
    wide = exact + (torch.log(lengths.float() / exact) / scale * (half - exact)).long()
    return torch.where(lengths < exact, lengths, wide.clamp(max=half - 1)) + half * (distances > 0)

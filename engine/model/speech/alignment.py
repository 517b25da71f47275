"""Word timestamps: cross-attention of alignment heads, aligned by dynamic time warping.

The steps are those of openai-whisper's word timestamps, as in transformers.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional


def align_tokens(looks: Tensor, median_filter_width: int) -> NDArray[np.int64]:
    """Return the position in the window at which each token begins: `[A, T, S]` → `[T]`.

    Attention weights are normalised over tokens, smoothed over the window per head, and averaged.
    """
    if not looks.shape[1]:
        return np.zeros(0, np.int64)
    spread, mean = torch.std_mean(looks, dim=-2, keepdim=True, unbiased=False)
    matrix = median_filter((looks - mean) / spread, median_filter_width).mean(dim=0)  # [T, S]
    tokens, places = dynamic_time_warping(-matrix.double().cpu().numpy())
    begins = np.diff(tokens, prepend=-1) > 0
    return np.maximum(places[begins], 0)


def median_filter(x: Tensor, width: int) -> Tensor:
    """Return the medians of `width` neighbours over the last axis, mirrored at its ends."""
    half = width // 2
    if x.shape[-1] <= half:
        return x
    padded = functional.pad(x, (half, half, 0, 0), mode="reflect")
    medians: Tensor = padded.unfold(-1, 2 * half + 1, 1).sort().values[..., half]
    return medians


def dynamic_time_warping(cost: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the cheapest monotonic path through `cost [T, S]`: its tokens and its positions.

    It is computed by diagonals, whose cells need only earlier ones. If two paths cost the same, the
    window advances.
    """
    tokens, places = cost.shape
    total = np.full((tokens + 1, places + 1), np.inf, np.float32)
    total[0, 0] = 0
    came = np.zeros((tokens + 1, places + 1), np.int8)
    for diagonal in range(2, tokens + places + 1):
        i = np.arange(max(1, diagonal - places), min(tokens, diagonal - 1) + 1)
        j = diagonal - i
        both, token, place = total[i - 1, j - 1], total[i - 1, j], total[i, j - 1]
        way = np.where(
            (both < token) & (both < place), 0, np.where((token < both) & (token < place), 1, 2)
        )
        least = np.choose(way, (both, token, place))
        total[i, j] = cost[i - 1, j - 1] + least
        came[i, j] = way
    came[0, :], came[:, 0] = 2, 1
    i, j = tokens, places
    way_back = []
    while i > 0 or j > 0:
        way_back.append((i - 1, j - 1))
        step = came[i, j]
        i, j = i - (step != 2), j - (step != 1)
    path = np.array(way_back[::-1])
    return path[:, 0], path[:, 1]

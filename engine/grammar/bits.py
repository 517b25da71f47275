"""Masks of tokens: bit `i % 32` of word `i // 32` is that of token `i`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_BITS = 32


def allow(mask: NDArray[np.uint32], token_ids: NDArray[np.int64]) -> None:
    """Let these tokens come, too."""
    np.bitwise_or.at(mask, token_ids // _BITS, _bits(token_ids))


def bar(mask: NDArray[np.uint32], token_ids: NDArray[np.int64]) -> None:
    """Let none of these tokens come."""
    np.bitwise_and.at(mask, token_ids // _BITS, ~_bits(token_ids))


def _bits(token_ids: NDArray[np.int64]) -> NDArray[np.uint32]:
    return np.uint32(1) << (token_ids % _BITS).astype(np.uint32)

"""Sparse attention to latents on a GPU, interpreted: its tiles, and its selections in torch."""

from __future__ import annotations

import torch

from tests.engine.kernels.selecting import SELECTED, Selecting
from tidemill.engine.kernels.triton.sparse_latent import TritonSparseLatentAttention


def test_steps_with_and_without_a_selection_follow_the_definition() -> None:
    """Short sequences, in the first step alone, run by tiles; nothing is written between slots."""
    selecting = Selecting(backend=TritonSparseLatentAttention)
    assert not selecting.check([(1, 0, 1), (5, 0, SELECTED)])
    assert selecting.check([(1, 1, 2), (0, 0, 24), (2, 0, 3)])
    assert selecting.check([(0, 24, 25), (1, 2, 3)])
    keys = selecting.backend._index_keys[0]
    num_stored = torch.count_nonzero(keys.abs().sum(dim=2))
    assert num_stored == 3 + SELECTED + 25 + 3

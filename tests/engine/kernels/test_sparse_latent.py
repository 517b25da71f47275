"""Sparse attention to latents in torch: whole steps against its definition in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.engine.kernels.paged import Piece
from tests.engine.kernels.selecting import (
    INDEX_DIM,
    RANK,
    ROTARY,
    SELECTED,
    SHAPE,
    Selecting,
)
from tidemill.engine.kernels.quantised import FP8
from tidemill.engine.kernels.sparse_latent import SparseLatentAttention

STEPS: list[list[Piece]] = [
    [(2, 0, 1), (0, 0, 36), (1, 0, 16), (4, 0, 44), (5, 0, 21)],
    [(0, 36, 37), (1, 16, 17), (2, 1, 2), (3, 23, 70)],
    [(3, 70, 71), (4, 44, 45), (5, 21, 22), (0, 37, 70), (2, 2, 24)],
]


@pytest.mark.parametrize(
    ("kept", "is_cut"),
    [(torch.float32, False), (torch.float32, True), (FP8, False)],
    ids=str,
)
def test_tokens_attend_to_the_best_ones(
    monkeypatch: pytest.MonkeyPatch, kept: torch.dtype, *, is_cut: bool
) -> None:
    """Long and short sequences share steps; one copies its beginning; products may be cut."""
    if is_cut:
        monkeypatch.setattr("tidemill.engine.kernels.sparse_latent.MOST_SCORES", 4096)
        monkeypatch.setattr("tidemill.engine.kernels.sparse_latent.MOST_BYTES", 20_000)
    selecting = Selecting(kept)
    for pieces in STEPS:
        assert selecting.check(pieces)


def test_a_step_of_short_sequences_runs_as_without_a_selection() -> None:
    """One more token, and the step selects."""
    selecting = Selecting()
    assert not selecting.check([(0, 0, SELECTED), (1, 0, 17)])
    assert selecting.check([(0, SELECTED, SELECTED + 1)])


def test_a_first_chunk_reads_only_what_is_stored() -> None:
    """Its first tokens see fewer than a selection; a reused page may contain anything behind it."""
    selecting = Selecting()
    for pages in (*selecting.backend._latents.keys, *selecting.backend._index_keys.values()):
        pages.fill_(torch.nan)
    assert selecting.check([(0, 0, 36)])


def test_index_keys_count_as_memory_of_a_page() -> None:
    """In fp8 they keep 16 bits, with which they select the same tokens as the model."""
    latents, dims = 2 * (RANK + ROTARY), INDEX_DIM
    shapes = [SHAPE, replace(SHAPE, index_dim=0)]
    size, page_bytes = SparseLatentAttention.page_size, SparseLatentAttention.page_bytes
    assert page_bytes(shapes, torch.float32) == size * 4 * (latents + dims)
    assert page_bytes(shapes, FP8) == size * (latents + 2 * dims)

"""Latent attention in torch: whole steps against plain attention in float64."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.engine.kernels.paged import CPU, Paged, Piece, Sequences, num_pages, scattered
from tidemill.engine.kernels.attention import AttentionShape
from tidemill.engine.kernels.latent import LatentAttention, UpProjections
from tidemill.engine.kernels.quantised import FP8

SHAPE = AttentionShape(4, 1, 48, 32, 0.2, has_latent_values=True)
NOPE, VALUE = 8, 12


def paged(
    lengths: Sequence[int], beginnings: Sequence[int] = (), kept: torch.dtype = torch.float32
) -> Paged:
    """Return sequences over a backend's pages; their values are their keys' latents."""
    sequences = Sequences.random(SHAPE, lengths, beginnings=beginnings)
    for key, value in zip(sequences.keys, sequences.values, strict=True):
        key.copy_(key.to(kept))
        value.copy_(key[..., : SHAPE.value_dim])
    count = num_pages(sequences, LatentAttention.page_size)
    backend = LatentAttention([SHAPE], count, kept, CPU)
    return Paged(backend, sequences, scattered(sequences, backend.page_size))


def check(over: Paged, outs: Sequence[Tensor], pieces: Sequence[Piece]) -> None:
    """Compare the output of pieces, `[t, H, R]` each, with plain attention."""
    for (index, start, stop), out in zip(pieces, outs, strict=True):
        wanted = over.sequences.expected(index)[start:stop]
        torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kept", [torch.float32, FP8], ids=str)
def test_steps_give_plain_attention(kept: torch.dtype) -> None:
    """Chunks with a past and without, a copied beginning, decodes of many lengths among them."""
    over = paged([40, 17, 18, 71], [0, 0, 0, 21], kept=kept)
    for pieces in (
        [(2, 0, 1), (0, 0, 36), (1, 0, 16)],
        [(0, 36, 37), (2, 1, 2), (1, 16, 17), (3, 21, 70)],
        [(3, 70, 71), (0, 37, 40), (2, 2, 18)],
    ):
        copying = {index for index, start, _ in pieces if start == 21}
        num_decodes = sum(stop - start == 1 for _, start, stop in pieces)
        check(over, over.run(pieces, num_decodes, copying), pieces)


def test_shared_prefixes_of_decodes_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some sequences share all of it, others less, one nothing; its pages are read once."""
    lengths, beginnings = [331, 331, 96, 41, 341, 330], [0, 320, 80, 0, 320, 320]
    over = paged(lengths, beginnings)
    over.run([(index, 0, length - 1) for index, length in enumerate(lengths)])
    read: list[int] = []
    backend = over.backend
    assert isinstance(backend, LatentAttention)
    read_pages = backend._read

    def noted(layer: int, pages: Tensor, dtype: torch.dtype) -> Tensor:
        read.extend(pages.tolist())
        return read_pages(layer, pages, dtype)

    monkeypatch.setattr(backend, "_read", noted)
    pieces = [(index, length - 1, length) for index, length in enumerate(lengths)]
    check(over, over.run(pieces, len(pieces)), pieces)
    for page in over.pages[0][:20].tolist():
        assert read.count(page) == 1


def test_many_decodes_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are more than fit into one product."""
    monkeypatch.setattr("tidemill.engine.kernels.latent.DECODES_AT_ONCE", 3)
    lengths = [70 + index for index in range(8)]
    over = paged(lengths, [0] + [64] * 7)
    outs = over.decode_all()
    check(
        over, outs.split(1), [(index, length - 1, length) for index, length in enumerate(lengths)]
    )


def test_expanded_chunks_agree_with_absorbed_ones() -> None:
    """A chunk after a context, with a decode, has the same output with keys and values."""
    over = paged([60, 50])
    backend, sequences = over.backend, over.sequences
    assert isinstance(backend, LatentAttention)
    over.run([(0, 0, 20), (1, 0, 49)])
    rank = SHAPE.value_dim
    projections = UpProjections(torch.randn(4, NOPE, rank) / 5, torch.randn(4, VALUE, rank) / 5)
    assert projections.expands(40)
    assert not projections.expands(1)
    pieces = [(1, 49, 50), (0, 20, 60)]
    over.run(pieces, 1)
    rotary = torch.cat([sequences.queries[i][start:stop, :, rank:] for i, start, stop in pieces])
    query = torch.randn(41, 4, NOPE)
    out = backend.attend_latents(0, query, rotary, projections)
    absorbed = torch.einsum("thn,hnr->thr", query, projections.key)
    mixed = backend.attend(0, torch.cat([absorbed, rotary], dim=2))
    wanted = torch.einsum("thr,hvr->thv", mixed, projections.value)
    torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-4)

"""Sequences over a backend of sparse attention to latents, and its definition in float64."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tests.engine.kernels.paged import CPU, Paged, Piece, Sequences, num_pages, scattered
from tidemill.engine.kernels.attention import AttentionShape
from tidemill.engine.kernels.latent import UpProjections
from tidemill.engine.kernels.sparse_latent import (
    IndexQueries,
    SparseLatentAttention,
    index_dtype,
)

HEADS, RANK, ROTARY, NOPE, VALUE = 4, 32, 16, 8, 12
INDEX_HEADS, INDEX_DIM, SELECTED = 16, 8, 20
SCALING = 0.2
SHAPE = AttentionShape(
    HEADS,
    1,
    RANK + ROTARY,
    RANK,
    SCALING,
    has_latent_values=True,
    num_selected=SELECTED,
    index_dim=INDEX_DIM,
)
LENGTHS, BEGINNINGS = [70, 17, 24, 71, 45, 22], [0, 0, 0, 23, 0, 0]


class Selecting:
    """Sequences over a backend of two layers, of which the second lacks index keys."""

    def __init__(
        self,
        kept: torch.dtype = torch.float32,
        backend: type[SparseLatentAttention] = SparseLatentAttention,
    ) -> None:
        self.sequences = Sequences.random(SHAPE, LENGTHS, beginnings=BEGINNINGS)
        generator = torch.Generator().manual_seed(0)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=generator)

        self.index_keys = [normal(length, INDEX_DIM) for length in LENGTHS]
        for own, common in zip(self.index_keys, BEGINNINGS, strict=True):
            own[:common] = self.index_keys[0][:common]
        for key in (*self.sequences.keys, *self.index_keys):
            key.copy_(key.to(kept if key.ndim == 3 else index_dtype(kept)))
        self.index_queries = [normal(length, INDEX_HEADS, INDEX_DIM) for length in LENGTHS]
        self.weights = [normal(length, INDEX_HEADS) for length in LENGTHS]
        self.queries = [normal(length, HEADS, NOPE) for length in LENGTHS]
        self.projections = UpProjections(normal(HEADS, NOPE, RANK), normal(HEADS, VALUE, RANK))
        count = num_pages(self.sequences, backend.page_size)
        shapes = [SHAPE, replace(SHAPE, index_dim=0)]
        self.backend = backend(shapes, count, kept, CPU)
        self.paged = Paged(
            self.backend, self.sequences, scattered(self.sequences, self.backend.page_size)
        )

    def run(self, pieces: list[Piece]) -> tuple[list[Tensor], bool]:
        """Run a step through both layers → each piece's `[2, t, H, Dv]`, whether it selects."""
        copying = {index for index, start, _ in pieces if start and start == BEGINNINGS[index]}
        num_decodes = sum(stop - start == 1 for _, start, stop in pieces)
        self.backend.prepare(self.paged.step(pieces, num_decodes, copying))

        def packed(tensors: list[Tensor]) -> Tensor:
            return torch.cat([tensors[index][start:stop] for index, start, stop in pieces])

        stored = packed([key[0] for key in self.sequences.keys])[:, None]
        query = packed(self.queries)
        rotary = packed([query[..., RANK:] for query in self.sequences.queries])
        index_queries = IndexQueries(packed(self.index_queries), packed(self.weights))
        selection, outs = None, []
        for layer in range(2):
            self.backend.store(layer, stored, stored)
            if layer == 0:
                self.backend.store_index_keys(layer, packed(self.index_keys))
                if self.backend.has_selection:
                    selection = self.backend.select(layer, index_queries)
            parts = layer, query, rotary, self.projections
            if selection is None:
                outs.append(self.backend.attend_latents(*parts))
            else:
                outs.append(self.backend.attend_selected(*parts, selection))
        sizes = [stop - start for _, start, stop in pieces]
        return list(torch.stack(outs).split(sizes, dim=1)), selection is not None

    def expected(self, index: int, start: int, stop: int) -> Tensor:
        """Return the attention of some of a sequence's tokens, `[t, H, Dv]`."""
        latents = self.sequences.keys[index][0].double()
        keys = latents[:, :RANK] @ self.projections.key.double().mT  # [H, L, Dn]
        values = latents[:, :RANK] @ self.projections.value.double().mT
        outs = []
        for place in range(start, stop):
            seen = slice(place + 1)
            index_keys = self.index_keys[index][seen].double()
            scores = (self.index_queries[index][place].double() @ index_keys.T).relu()
            scores = self.weights[index][place].double() @ scores
            chosen = scores.topk(min(SELECTED, place + 1)).indices
            query = self.queries[index][place].double()
            rotary = self.sequences.queries[index][place, :, RANK:].double()
            logits = (keys[:, chosen] @ query[:, :, None]).squeeze(2)
            logits += rotary @ latents[chosen, RANK:].T
            weights = (logits * SCALING).softmax(dim=1)
            outs.append((weights[:, None] @ values[:, chosen]).squeeze(1))
        return torch.stack(outs)

    def check(self, pieces: list[Piece]) -> bool:
        """Compare a step with the definition; return whether it selects."""
        outs, selects = self.run(pieces)
        for piece, of_layers in zip(pieces, outs, strict=True):
            for out in of_layers:
                wanted = self.expected(*piece)
                torch.testing.assert_close(out.double(), wanted, atol=1e-4, rtol=1e-4)
        return selects

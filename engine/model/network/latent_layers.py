"""Mixers of layers with latent attention (MLA), with and without a selection of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from ...kernels.elementwise import Norm, apply_rotary
from ...kernels.latent import LatentBackend, UpProjections
from ...kernels.linear import Linear, NormedLinear
from ...kernels.sparse_latent import IndexQueries, Selection, SparseLatentBackend
from ..config.architecture import Indexer, Latent

# Norms of latents use it whatever the config contains.
LATENT_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class LatentMixer:
    """Projections of a layer with latent attention, except for the out-projection.

    `down_proj` norms its input, and gives queries, or their latents for `query_up`, and the latent
    and rotary key of each token. `index` counts attention layers.
    """

    index: int
    latent: Latent
    num_heads: int
    down_proj: NormedLinear
    query_norm: Norm | None
    query_up: Linear | None
    norm: Norm
    projections: UpProjections

    def attend(
        self,
        backend: LatentBackend,
        x: Tensor | None,
        residual: Tensor,
        cos_sin: Tensor,
        growth: Tensor | None = None,
    ) -> Tensor:
        """Store a step's latents and return its attention output: `[T, H · Dv]`.

        Queries are multiplied by `growth [T, 1]`.
        """
        query, key = self.project(x, residual)
        plain, rotary = self.store(backend, query, key, cos_sin, growth)
        return backend.attend_latents(self.index, plain, rotary, self.projections).flatten(1)

    def project(self, x: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return a step's queries or their latents, and its latents next to rotary keys."""
        width = self.latent.kv_rank + self.latent.rope_dim
        down = self.down_proj(x, residual)
        query, key = down[:, :-width], down[:, -width:]
        return query if self.query_norm is None else self.query_norm(query.contiguous()), key

    def store(
        self,
        backend: LatentBackend,
        query: Tensor,
        key: Tensor,
        cos_sin: Tensor,
        growth: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Store a step's latents; return its queries `[T, H, Dn]` and rotary parts `[T, H, Dr]`."""
        sizes, rank = self.latent, self.latent.kv_rank
        if self.query_up is not None:
            query = self.query_up(query)
        if growth is not None:
            query = query * growth.to(query.dtype)
        query = query.view(len(query), self.num_heads, -1)  # [T, H, Dn + Dr]
        latents = self.norm(key[:, :rank].contiguous())
        plain, rotary = torch.split(query, [sizes.nope_dim, sizes.rope_dim], dim=2)
        rotary, turned = (
            self._turned(part.contiguous(), cos_sin) for part in (rotary, key[:, None, rank:])
        )
        stored = torch.cat([latents[:, None], turned], dim=2)
        backend.store(self.index, stored, stored)
        return plain, rotary

    def _turned(self, x: Tensor, cos_sin: Tensor) -> Tensor:
        """Return rotary parts `[T, H, Dr]` rotated, of pairs of neighbours if configured."""
        return apply_rotary(_unpaired(x) if self.latent.has_rope_pairs else x, cos_sin)


@dataclass(frozen=True, slots=True)
class IndexProjections:
    """Projections to index keys and queries; `norm` is that of the layer's input."""

    indexer: Indexer
    norm: Norm
    query_up: Linear
    key_proj: Linear
    key_norm: Norm
    weights_proj: Linear  # in fp32

    def keys(self, x: Tensor, cos_sin: Tensor) -> Tensor:
        """Return the index keys `[T, D]` of normed inputs `[T, H]`."""
        key = self.key_norm(self.key_proj(x))
        return self._turned(key[:, None], cos_sin)[:, 0]

    def queries(self, x: Tensor, latents: Tensor, cos_sin: Tensor) -> IndexQueries:
        """Return the index queries of normed inputs `[T, H]`, and of their latents of queries."""
        heads, dim = self.indexer.num_heads, self.indexer.head_dim
        query = self.query_up(latents).view(len(x), heads, dim)
        weights = self.weights_proj(x.float()) * (heads * dim) ** -0.5
        return IndexQueries(self._turned(query, cos_sin), weights)

    def _turned(self, heads: Tensor, cos_sin: Tensor) -> Tensor:
        """Return index heads `[T, H, D]`, the first elements of each of them rotated."""
        if self.indexer.has_rope_pairs:
            width = cos_sin.shape[1]
            first = _unpaired(heads[..., :width].contiguous())
            heads = torch.cat([first, heads[..., width:]], dim=2)
        return apply_rotary(heads, cos_sin)


@dataclass(frozen=True, slots=True)
class SparseMixer:
    """A layer with sparse attention; without `projections` it uses an earlier layer's selection."""

    latent: LatentMixer
    projections: IndexProjections | None

    def attend(
        self,
        backend: LatentBackend,
        x: Tensor | None,
        residual: Tensor,
        cos_sin: Tensor,
        selection: Selection | None,
    ) -> tuple[Tensor, Selection | None]:
        """Store a step's state; return its attention output `[T, H · Dv]`, and the selection.

        There is no selection in a step whose tokens see too few.
        """
        sparse, mixer = cast("SparseLatentBackend", backend), self.latent
        latents, key = mixer.project(x, residual)  # adds x to the residual
        if self.projections is not None:
            normed = self.projections.norm(residual)
            sparse.store_index_keys(mixer.index, self.projections.keys(normed, cos_sin))
            if sparse.has_selection:
                queries = self.projections.queries(normed, latents, cos_sin)
                selection = sparse.select(mixer.index, queries)
        plain, rotary = mixer.store(backend, latents, key, cos_sin)
        if selection is None:
            out = backend.attend_latents(mixer.index, plain, rotary, mixer.projections)
        else:
            parts = (plain, rotary, mixer.projections, selection)
            out = sparse.attend_selected(mixer.index, *parts)
        return out.flatten(1), selection


def _unpaired(heads: Tensor) -> Tensor:
    """Return elements `[T, H, R]` of pairs of neighbours in halves, for `apply_rotary`."""
    return heads.view(*heads.shape[:2], -1, 2).mT.flatten(2)

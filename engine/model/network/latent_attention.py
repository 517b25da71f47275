"""Latent attention of a layer (MLA): its projections, and what a step's tokens attend to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.elementwise import Norm, apply_rotary
from ...kernels.latent import LatentBackend, UpProjections
from ...kernels.linear import Linear, NormedLinear
from ..config.architecture import Latent


@dataclass(frozen=True, slots=True)
class LatentMixer:
    """Projections of a layer whose keys and values are latents, but for the out-projection.

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
        self, backend: LatentBackend, x: Tensor | None, residual: Tensor, cos_sin: Tensor
    ) -> Tensor:
        """Store a step's latents and return what its tokens attend to: `[T, H · Dv]`."""
        sizes, rank = self.latent, self.latent.kv_rank
        down = self.down_proj(x, residual)
        query, key = down[:, : -rank - sizes.rope_dim], down[:, -rank - sizes.rope_dim :]
        if self.query_up is not None and self.query_norm is not None:
            query = self.query_up(self.query_norm(query.contiguous()))
        query = query.view(len(query), self.num_heads, -1)  # [T, H, Dn + Dr]
        latents = self.norm(key[:, :rank].contiguous())
        plain, rotary = torch.split(query, [sizes.nope_dim, sizes.rope_dim], dim=2)
        rotary, turned = (
            self._turned(part.contiguous(), cos_sin) for part in (rotary, key[:, None, rank:])
        )
        stored = torch.cat([latents[:, None], turned], dim=2)
        backend.store(self.index, stored, stored)
        out = backend.attend_latents(self.index, plain, rotary, self.projections)
        return out.flatten(1)

    def _turned(self, x: Tensor, cos_sin: Tensor) -> Tensor:
        """Return rotary parts `[T, H, Dr]` turned, whose neighbours may be pairs."""
        if self.latent.has_rope_pairs:
            x = x.view(*x.shape[:2], -1, 2).mT.flatten(2)
        return apply_rotary(x, cos_sin)

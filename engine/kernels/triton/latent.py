"""Paged attention backend of latents (MLA) on GPUs; its reference is `engine.kernels.latent`.

One layer's pages are `[pages, page_size, R + Dr]`. Decodes and short chunks are absorbed, by tiles
(`latent_flash`); the latents of long chunks are expanded and attended as separate heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..attention import AttentionShape, HeadNorms
from ..latent import UpProjections
from ..step import Step
from . import qkv as qkv_kernels
from .attention import DTYPES
from .combine import combine
from .latent_flash import attend_latent_tiles, head_blocks, latent_config
from .latent_prefills import ExpandedSpans, batches, of_spans
from .launch import arch_of, cdiv
from .tile_buffers import TileBuffers
from .tiled import TiledAttention, multiprocessors
from .tiles import TileSpec

# The widest latents and rotary parts whose tiles fit in shared memory.
MOST_RANK, MOST_ROTARY = 512, 64
# Programs for each multiprocessor, which has registers for one or two at a time.
PROGRAMS = 2


class _Absorbed(NamedTuple):
    """Tokens that are absorbed, as slices of the step's, and their tiles."""

    tokens: list[slice]
    tiles: TileBuffers


class _Division(NamedTuple):
    """Division of a step between absorbed and expanded spans."""

    absorbed: _Absorbed | None
    expanded: list[ExpandedSpans]


class TritonLatentAttention(TiledAttention):
    """Latents of each token in pages on a GPU, with a trash page after the last."""

    def __init__(
        self,
        shapes: Sequence[AttentionShape],
        num_pages: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        assert self.supports(shapes, dtype)
        self.trash_slot = num_pages * self.page_size
        rows = (num_pages + 1, self.page_size)
        self.keys = [
            torch.zeros(*rows, shape.key_dim, dtype=dtype, device=device) for shape in shapes
        ]
        self._set_layers(shapes, dtype, device)

    @staticmethod
    def supports(shapes: Sequence[AttentionShape], dtype: torch.dtype) -> bool:
        """Return whether the kernels support all these layers in this dtype."""
        return dtype in DTYPES and all(
            shape.has_latent_values
            and shape.is_causal
            and shape.value_dim <= MOST_RANK
            and 0 < shape.key_dim - shape.value_dim <= MOST_ROTARY
            for shape in shapes
        )

    def prepare(self, step: Step) -> None:
        """Plan the tiles of the next forward pass; valid until the next call."""
        super().prepare(step)
        self._host = step.host
        self._divisions: dict[tuple[AttentionShape | int, ...], _Division] = {}

    def store_qkv(
        self, layer: int, qkv: Tensor, cos_sin: Tensor, norms: HeadNorms | None
    ) -> Tensor:
        """Raise: a latent's queries and keys are not heads of one product."""
        raise NotImplementedError

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write the step's latents and rotary keys `key [T, 1, W]` to their slots."""
        del value  # the latents
        qkv_kernels.store_latents(key, self._slots, self.keys[layer])

    def attend(self, layer: int, query: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Attend absorbed queries to latents: `[T, H, W]` → `[T, H, R]`."""
        del sinks
        rank = self.shapes[layer].value_dim
        return self._attend(layer, query[..., :rank], query[..., rank:], self._tile_buffers)

    def attend_latents(
        self, layer: int, query: Tensor, rotary: Tensor, projections: UpProjections
    ) -> Tensor:
        """Attend queries `[T, H, Dn]` and their rotary parts `[T, H, Dr]` → `[T, H, Dv]`.

        A captured step is absorbed as a whole: which spans are expanded differs from step to step.
        """
        if self._captured is not None:
            return self._absorb(layer, query, rotary, projections, self._tile_buffers)
        absorbed, expanded = self._divided(self.shapes[layer], projections)
        if not expanded:
            return self._absorb(layer, query, rotary, projections, self._tile_buffers)
        out = query.new_zeros(*query.shape[:2], projections.value.shape[1])
        for spans in expanded:
            spans.attend(self.keys[layer], query, rotary, projections, out)
        if absorbed is not None:
            own, turned = (
                torch.cat([part[at] for at in absorbed.tokens]) for part in (query, rotary)
            )
            mixed = self._absorb(layer, own, turned, projections, absorbed.tiles)
            start = 0
            for at in absorbed.tokens:
                out[at] = mixed[start : start + at.stop - at.start]
                start += at.stop - at.start
        return out

    def _absorb(
        self,
        layer: int,
        query: Tensor,
        rotary: Tensor,
        projections: UpProjections,
        tiles: TileBuffers,
    ) -> Tensor:
        """Project queries of some tiles' tokens to latents, attend, and project to values."""
        absorbed = torch.einsum("thn,hnr->thr", query, projections.key)
        mixed = self._attend(layer, absorbed, rotary, tiles)
        return torch.einsum("thr,hvr->thv", mixed, projections.value)

    def _attend(self, layer: int, absorbed: Tensor, rotary: Tensor, tiles: TileBuffers) -> Tensor:
        """Attend absorbed queries `[T, H, R]` and `[T, H, Dr]` of tiles to latents → `[T, H, R]`.

        Each block of heads of a tile moves its places' latents once; queries and outputs are moved
        once, and for each split-KV part twice H · (R + 2) fp32 numbers.
        """
        shape, spec, parts = self.shapes[layer], self._specs[layer], self._parts
        counts = (self._captured or tiles.counts)[spec]
        out = absorbed.new_empty(absorbed.shape[0], shape.num_query_heads, shape.value_dim)
        lists = (tiles.numbers, tiles.header(spec))
        arrays = (shape, (absorbed, rotary), (self._pages, self.keys[layer]), out, parts)
        attend_latent_tiles(lists, counts.wide, *arrays, is_wide=True)
        attend_latent_tiles(lists, counts.narrow, *arrays, is_wide=False)
        combine(lists, counts.joins, parts, None, out)
        return out

    def _divided(self, shape: AttentionShape, projections: UpProjections) -> _Division:
        """Divide the step's spans by cost, once for all layers of the same widths."""
        kind = (shape, *projections.key.shape, projections.value.shape[1])
        if kind not in self._divisions:
            self._divisions[kind] = self._divide(shape, projections)
        return self._divisions[kind]

    def _divide(self, shape: AttentionShape, projections: UpProjections) -> _Division:
        host, device = self._host, self.keys[0].device
        starts = host.query_starts.numpy().astype(np.int64)
        counts = np.diff(starts)
        # The number of tokens that makes expanding cheaper depends only on the widths.
        is_expanded = np.isin(counts, [n for n in np.unique(counts) if projections.expands(int(n))])
        if not is_expanded.any():
            return _Division(None, [])
        expanded = [
            ExpandedSpans(host, spans, self.page_size, shape, projections, device)
            for spans in batches(host, np.flatnonzero(is_expanded))
        ]
        others = np.flatnonzero(~is_expanded)
        if not len(others):
            return _Division(None, expanded)
        tiles = TileBuffers(self._specs, self.page_size, device)
        tiles.fill(of_spans(host, others))
        self._grow_parts(tiles.counts)
        return _Division(_Absorbed(_merged(starts[others], starts[others + 1]), tiles), expanded)

    @staticmethod
    def _tile_spec(shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> TileSpec:
        arch = arch_of(device)
        wide, narrow = (
            latent_config(shape, dtype, arch, is_wide=is_wide).sizes["ROWS"]
            for is_wide in (True, False)
        )
        blocks = head_blocks(shape, dtype, arch)
        at_once = max(1, PROGRAMS * multiprocessors(device) // blocks)
        group = cdiv(shape.num_query_heads, blocks)
        return TileSpec(group, shape.window, shape.is_causal, wide, narrow, at_once, shape.chunk)


def _merged(starts: NDArray[np.int64], stops: NDArray[np.int64]) -> list[slice]:
    """Return ranges as slices, merging neighbours."""
    firsts = np.flatnonzero(np.append(True, starts[1:] != stops[:-1]))
    lasts = np.append(firsts[1:], len(starts)) - 1
    return [
        slice(start, stop)
        for start, stop in zip(starts[firsts].tolist(), stops[lasts].tolist(), strict=True)
    ]

"""Long chunks over latents (MLA): latents are expanded to keys and values of heads, and attended.

Memory is bounded: spans are batched by their places, and heads are processed in blocks.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..attention import AttentionShape
from ..latent import UpProjections
from ..quantised import FP8
from ..step import Step, to_device
from .combine import PartialOutputs, combine
from .flash import attend_tiles, attention_config
from .launch import arch_of, cdiv
from .tile_buffers import TileBuffers
from .tiled import multiprocessors
from .tiles import TileSpec

Ints = NDArray[np.int64]
# Limit of expanded keys and values at once; one head of the longest span may exceed it.
MOST_BYTES = 2**28
# Tokens of the spans that are expanded together; a longer span is expanded alone.
MOST_PLACES = 2**15
# Programs for each multiprocessor: enough that a long one overlaps with others.
PROGRAMS = 4
# A place of expanded keys and values is a page, so that products can write them directly.
PAGE_SIZE = 1


def batches(host: Step, spans: Ints) -> Iterator[Ints]:
    """Divide spans into runs of few enough places; the step is on the host."""
    places = _lengths(host, spans).cumsum()
    start = 0
    while start < len(spans):
        before = places[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(places, before + MOST_PLACES, "right")))
        yield spans[start:stop]
        start = stop


def of_spans(host: Step, spans: Ints, *, page_starts: Ints | None = None) -> Step:
    """Return the step of some spans alone, in order; it is on the host.

    Their page lists begin where they did, or at `page_starts`.
    """
    starts = host.query_starts.numpy().astype(np.int64)
    counts = (starts[1:] - starts[:-1])[spans]
    tokens = np.concatenate([np.arange(starts[span], starts[span + 1]) for span in spans])
    if page_starts is None:
        page_starts = np.append(host.page_starts.numpy()[spans], host.page_starts.numpy()[-1])
    arrays = {
        "token_ids": host.token_ids.numpy()[tokens],
        "positions": host.positions.numpy()[tokens],
        "slots": host.slots.numpy()[tokens],
        "query_starts": np.append(0, counts.cumsum()),
        "context_lengths": host.context_lengths.numpy()[spans],
        "page_starts": page_starts,
        "pages": host.pages.numpy(),
        "logit_rows": np.zeros(0, np.int32),
    }
    if host.ends is not None:
        arrays["ends"] = host.ends.numpy()[tokens]
    num_decodes = int((spans < host.num_decodes).sum())
    return Step.pack(num_decodes, torch.device("cpu"), **arrays)


class ExpandedSpans:
    """Spans of a step whose latents are expanded together: their tokens, places and tiles."""

    def __init__(
        self,
        host: Step,
        spans: Ints,
        page_size: int,
        shape: AttentionShape,
        projections: UpProjections,
        device: torch.device,
    ) -> None:
        starts = host.query_starts.numpy()
        self._tokens = [slice(int(starts[span]), int(starts[span + 1])) for span in spans]
        lengths = _lengths(host, spans)
        places = np.concatenate(
            [
                _slots(host, int(span), int(n), page_size)
                for span, n in zip(spans, lengths, strict=True)
            ]
        )
        self._places = to_device(places, device)  # [L]
        self._pages = to_device(np.arange(len(places), dtype=np.int32), device)
        heads, nope, rank = projections.key.shape
        width, value_width = nope + shape.key_dim - rank, projections.value.shape[1]
        dtype = projections.key.dtype
        bytes_a_head = len(places) * (width + value_width) * dtype.itemsize
        blocks = cdiv(heads, max(1, min(heads, MOST_BYTES // bytes_a_head)))
        self._heads = cdiv(heads, blocks)
        self._shape = AttentionShape(self._heads, self._heads, width, value_width, shape.scaling)
        wide, narrow = (
            attention_config(self._shape, dtype, arch_of(device), is_wide=is_wide).sizes["ROWS"]
            for is_wide in (True, False)
        )
        at_once = max(1, PROGRAMS * multiprocessors(device) // self._heads)
        self._spec = TileSpec(
            1, window=0, is_causal=True, wide=wide, narrow=narrow, at_once=at_once
        )
        self._tiles = TileBuffers([self._spec], PAGE_SIZE, device)
        page_starts = np.append(0, lengths.cumsum())
        self._tiles.fill(of_spans(host, spans, page_starts=page_starts))
        parts = self._tiles.counts[self._spec].parts * self._heads
        self._parts = PartialOutputs(
            torch.empty(parts * value_width, device=device), torch.empty(parts * 2, device=device)
        )

    def attend(
        self, pages: Tensor, query: Tensor, rotary: Tensor, projections: UpProjections, out: Tensor
    ) -> None:
        """Attend the spans' tokens of `query [T, H, Dn]` and `rotary` into `out [T, H, Dv]`.

        `pages [pages, page_size, R + Dr]` are a layer's latents.
        """
        flat = pages.flatten(0, 1)
        if flat.dtype == FP8:
            stored = flat.view(torch.uint8)[self._places].view(FP8).to(query.dtype)
        else:
            stored = flat[self._places]  # [L, R + Dr]
        tokens = torch.cat([torch.cat([query[at], rotary[at]], dim=2) for at in self._tokens])
        for first in range(0, query.shape[1], self._heads):
            heads = slice(first, min(first + self._heads, query.shape[1]))
            mixed = self._attend(stored, tokens[:, heads], projections, heads)
            start = 0
            for at in self._tokens:
                out[at, heads] = mixed[start : start + at.stop - at.start]
                start += at.stop - at.start

    def _attend(
        self, stored: Tensor, query: Tensor, projections: UpProjections, heads: slice
    ) -> Tensor:
        """Expand latents `[L, R + Dr]` to a block of heads, which `query [t, h, Dk]` attends to."""
        count = heads.stop - heads.start
        up, up_value = projections.key[heads], projections.value[heads]
        nope, rank = up.shape[1:]
        latents = stored[:, :rank]
        key = query.new_empty(len(stored), count, query.shape[2])
        key[..., :nope] = (latents @ up.flatten(0, 1).mT).view(len(stored), count, nope)
        key[..., nope:] = stored[:, None, rank:]
        value = (latents @ up_value.flatten(0, 1).mT).view(len(stored), count, -1)
        out = query.new_empty(len(query), count, value.shape[2])
        shape = AttentionShape(count, count, key.shape[2], value.shape[2], self._shape.scaling)
        lists = (self._tiles.numbers, self._tiles.header(self._spec))
        cache = (self._pages, key[:, :, None], value[:, :, None])
        counts, arrays = self._tiles.counts[self._spec], (shape, query.contiguous(), cache)
        attend_tiles(lists, counts.wide, *arrays, None, out, self._parts, is_wide=True)
        attend_tiles(lists, counts.narrow, *arrays, None, out, self._parts, is_wide=False)
        combine(lists, counts.joins, self._parts, None, out)
        return out


def _lengths(host: Step, spans: Ints) -> Ints:
    """Return how many places each of some spans sees, including its own."""
    starts = host.query_starts.numpy().astype(np.int64)
    lengths: Ints = host.context_lengths.numpy() + starts[1:] - starts[:-1]
    return lengths[spans]


def _slots(host: Step, span: int, length: int, page_size: int) -> Ints:
    """Return the positions of a span's tokens."""
    first = int(host.page_starts.numpy()[span])
    pages = host.pages.numpy()[first : first + cdiv(length, page_size)].astype(np.int64)
    return (pages[:, None] * page_size + np.arange(page_size)).ravel()[:length]

"""Sparse attention to latents (DSA, DeepSeek-V3.2, 2025): each token attends to a selection.

In addition to its latent, a token has an index key, in the same pages. A token's index queries
score the tokens that it may see: Σ weight · ReLU(query · key) over a few heads. It attends to the
best ones, by absorbed queries. Sequences that are not longer than a selection attend to all their
tokens, by the kernels of latents.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .attention import AttentionShape, HeadNorms
from .host_memory import zeros
from .latent import LatentAttention, LatentBackend, UpProjections
from .paged_step import Span, paged_step
from .quantised import FP8
from .step import Step, to_device

Ints = NDArray[np.int64]
# Limits of what is computed at once: scores of index heads, and bytes of selected latents.
MOST_SCORES, MOST_BYTES = 2**26, 2**27


class IndexQueries(NamedTuple):
    """Index queries `[T, H, D]` of a step's tokens, and the weights `[T, H]` of heads in fp32.

    The weights include the scaling of scores.
    """

    query: Tensor
    weights: Tensor


class Selection(NamedTuple):
    """Slots `[t, K]` of the tokens that tokens of long sequences attend to, the best ones first.

    Only the first `num_seen [t]` of them count. It is valid for the step that it was made for.
    """

    slots: Tensor
    num_seen: Tensor


class SparseLatentBackend(LatentBackend, Protocol):
    """A backend of latents that attends to selections.

    In a layer with index keys `store_index_keys` comes first. The prepared step `has_selection` if
    one of its sequences is longer than a selection; else `attend_latents` is all that it needs.
    """

    has_selection: bool

    def store_index_keys(self, layer: int, key: Tensor) -> None:
        """Write the step's index keys `key [T, D]` to their slots."""

    def select(self, layer: int, queries: IndexQueries) -> Selection:
        """Select tokens by a layer's index keys, for it and for later layers without index keys."""

    def attend_selected(
        self,
        layer: int,
        query: Tensor,
        rotary: Tensor,
        projections: UpProjections,
        selection: Selection,
    ) -> Tensor:
        """Attend `query [T, H, Dn]`, `rotary [T, H, Dr]` to selected tokens → `[T, H, Dv]`."""


class SparseLatentAttention:
    """Attention backend of latents and index keys in torch, a batch of long sequences at a time.

    Its sequences that are not long run through a backend of `latents_type`. A layer has index keys
    `[pages, page_size, D]` if its shape's `index_dim` is not 0.
    """

    latents_type: ClassVar[Any] = LatentAttention
    page_size = LatentAttention.page_size
    copies_slots = LatentAttention.copies_slots
    num_trash_pages = 0

    def __init__(
        self,
        shapes: Sequence[AttentionShape],
        num_pages: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._device = device
        (self._num_selected,) = {shape.num_selected for shape in shapes}
        self._set_latents(shapes, self.latents_type(shapes, num_pages, dtype, device))
        kept = index_dtype(dtype)
        self._index_keys = {
            layer: zeros((num_pages + self.num_trash_pages, self.page_size, dim), kept, device)
            for layer, dim in enumerate(shape.index_dim for shape in shapes)
            if dim
        }
        self.has_selection = False

    @classmethod
    def page_bytes(cls, shapes: Sequence[AttentionShape], dtype: torch.dtype) -> int:
        """Return the bytes that one page takes over all layers."""
        width = sum(shape.index_dim for shape in shapes)
        latents: int = cls.latents_type.page_bytes(shapes, dtype)
        return latents + width * cls.page_size * index_dtype(dtype).itemsize

    def with_layers(self, shapes: Sequence[AttentionShape]) -> Self:
        """Return a backend of other layers over the same pages."""
        other = copy(self)
        other._set_latents(shapes, self._latents)  # noqa: SLF001 - of the same class
        return other

    def _set_latents(self, shapes: Sequence[AttentionShape], latents: Any) -> None:
        self.shapes = tuple(shapes)
        self._latents, self._others = (latents.with_layers(shapes) for _ in range(2))

    def prepare(self, step: Step) -> None:
        """Divide the next forward pass's sequences by length; valid until the next call."""
        self._latents.prepare(step)
        self._slots = step.slots
        self._copies = step.page_copies if self.copies_slots else []
        host = step.host
        counts = host.query_starts.numpy().astype(np.int64)
        is_long = host.context_lengths.numpy() + np.diff(counts) > self._num_selected
        self.has_selection = bool(is_long.any())
        if self.has_selection:
            self._long = _LongSpans.of(step, np.flatnonzero(is_long), self._scores_a_place)
            self._other_tokens = None
            if not is_long.all():
                others = _single_tokens_first(host, np.flatnonzero(~is_long))
                self._others.prepare(_step_of(step, others, self.page_size))
                self._other_tokens = to_device(_tokens_of(host, others), self._device)

    def store_qkv(
        self, layer: int, qkv: Tensor, cos_sin: Tensor, norms: HeadNorms | None
    ) -> Tensor:
        """Raise: a latent's queries and keys are not heads of one product."""
        raise NotImplementedError

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write the step's latents and rotary keys `key [T, 1, W]` to their slots."""
        self._latents.store(layer, key, value)

    def store_index_keys(self, layer: int, key: Tensor) -> None:
        """Write the step's index keys; see `SparseLatentBackend`."""
        pages = self._index_keys[layer]
        pages.flatten(0, 1)[self._slots.long()] = key.to(pages.dtype)
        for source, target, count in self._copies:
            pages[target, :count] = pages[source, :count]

    def attend(self, layer: int, query: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Attend absorbed queries to all latents: `[T, H, W]` → `[T, H, R]`."""
        out: Tensor = self._latents.attend(layer, query, sinks)
        return out

    def attend_latents(
        self, layer: int, query: Tensor, rotary: Tensor, projections: UpProjections
    ) -> Tensor:
        """Attend `query [T, H, Dn]`, `rotary [T, H, Dr]` to all latents → `[T, H, Dv]`."""
        out: Tensor = self._latents.attend_latents(layer, query, rotary, projections)
        return out

    def select(self, layer: int, queries: IndexQueries) -> Selection:
        """Select the tokens with the best scores; see `SparseLatentBackend`."""
        long, keys = self._long, self._index_keys[layer]
        query, weights = (part[long.tokens] for part in queries)
        selected = [
            self._select(keys, batch, query[batch.tokens], weights[batch.tokens])
            for batch in long.batches
        ]
        return Selection(torch.cat(selected), long.num_visible.clamp(max=self._num_selected))

    def _select(self, keys: Tensor, batch: _Batch, query: Tensor, weights: Tensor) -> Tensor:
        """Return the slots `[S · N, K]` of the best tokens for `query [S · N, H, D]`."""
        stored = keys[batch.pages].flatten(1, 2).float().mT  # [S, D, L]
        count, length = len(stored), stored.shape[2]
        query, weights = (part.view(count, -1, *part.shape[1:]) for part in (query, weights))
        num_heads, size = query.shape[2], self.page_size
        places = torch.arange(length, device=keys.device)
        ranks = places[: self._num_selected]
        at_once = max(1, MOST_SCORES // (count * num_heads * length))
        best = []
        for start in range(0, query.shape[1], at_once):
            some = slice(start, start + at_once)
            scores = (query[:, some].float().flatten(1, 2) @ stored).relu_()
            scores = scores.view(count, -1, num_heads, length)  # [S, n, H, L]
            scores = (weights[:, some, None] @ scores).squeeze(2)  # [S, n, L]
            num_visible = batch.num_visible[:, some, None]
            scores.masked_fill_(places >= num_visible, -torch.inf)
            found = scores.topk(self._num_selected, dim=2).indices
            # What is stored in other slots is weighted by zero, which a NaN would survive.
            best.append(torch.where(ranks < num_visible, found, found[..., :1]))
        chosen = torch.cat(best, dim=1).flatten(1)  # [S, N · K]
        slots = batch.pages.gather(1, chosen // size) * size + chosen % size
        return slots.view(-1, self._num_selected)

    def attend_selected(
        self,
        layer: int,
        query: Tensor,
        rotary: Tensor,
        projections: UpProjections,
        selection: Selection,
    ) -> Tensor:
        """Attend tokens of long sequences to selected tokens, others to all; see the protocol."""
        tokens, others = self._long.tokens, self._other_tokens
        out = query.new_zeros(*query.shape[:2], projections.value.shape[1])
        if others is not None:
            out[others] = self._others.attend_latents(
                layer, query[others], rotary[others], projections
            )
        absorbed = torch.einsum("thn,hnr->thr", query[tokens], projections.key)
        mixed = self._attend(layer, torch.cat([absorbed, rotary[tokens]], dim=2), selection)
        out[tokens] = torch.einsum("thr,hvr->thv", mixed, projections.value)
        return out

    def _attend(self, layer: int, query: Tensor, selection: Selection) -> Tensor:
        """Attend absorbed queries `[t, H, W]` to selected latents → `[t, H, R]`."""
        shape, latents = self.shapes[layer], self._latents.keys[layer].flatten(0, 1)
        ranks = torch.arange(self._num_selected, device=query.device)
        at_once = self._num_selected * shape.key_dim * query.dtype.itemsize
        at_once = max(1, MOST_BYTES // at_once)
        mixed = []
        for some, slots, num_seen in zip(
            *(torch.split(part, at_once) for part in (query, *selection)), strict=True
        ):
            key = _read(latents, slots, query.dtype)  # [n, K, W]
            scores = (some @ key.mT).float() * shape.scaling  # [n, H, K]
            scores.masked_fill_((ranks >= num_seen[:, None])[:, None], -torch.inf)
            mixed.append(scores.softmax(dim=-1).to(key.dtype) @ key[..., : shape.value_dim])
        return torch.cat(mixed)

    @property
    def _scores_a_place(self) -> int:
        """Return about how many numbers of a place of a sequence are in memory at a time."""
        return max(shape.index_dim for shape in self.shapes)


class _Batch(NamedTuple):
    """Tokens of long sequences that are scored together: of S sequences N tokens each.

    They are the long ones' `tokens`, and see the first `num_visible [S, N]` in `pages [S, P]`.
    """

    tokens: slice
    num_visible: Tensor
    pages: Tensor


class _LongSpans(NamedTuple):
    """Packed `tokens [t]` of sequences that are longer than a selection, in the order of batches.

    Without a selection they would see `num_visible [t]` tokens.
    """

    tokens: Tensor
    num_visible: Tensor
    batches: list[_Batch]

    @classmethod
    def of(cls, step: Step, spans: Ints, numbers_a_place: int) -> Self:
        """Return some spans of a step: single tokens in batches, chunks one by one."""
        host, device = step.host, step.slots.device
        spans = _single_tokens_first(host, spans)
        starts, contexts = (
            array.numpy().astype(np.int64) for array in (host.query_starts, host.context_lengths)
        )
        counts = np.diff(starts)[spans]
        tokens = _tokens_of(host, spans)
        num_visible = to_device(host.positions.numpy()[tokens].astype(np.int64) + 1, device)
        batches, first = [], 0
        for some in _batches(counts, contexts[spans] + counts, numbers_a_place):
            num_tokens = int(counts[some].sum())
            own = slice(first, first + num_tokens)
            pages = to_device(_padded_pages(host, spans[some]), device)
            batches.append(_Batch(own, num_visible[own].view(len(pages), -1), pages))
            first += num_tokens
        return cls(to_device(tokens, device), num_visible, batches)


def index_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of index keys in a cache of a dtype: fp8 would change selections."""
    return torch.bfloat16 if dtype == FP8 else dtype


def _batches(counts: Ints, lengths: Ints, numbers_a_place: int) -> Iterator[slice]:
    """Yield ranges of spans that are scored together; single tokens come first, by length."""
    start = 0
    while start < len(counts):
        stop = start + 1
        while (
            stop < len(counts)
            and counts[start] == counts[stop] == 1
            and (stop + 1 - start) * lengths[stop] * numbers_a_place <= MOST_SCORES
        ):
            stop += 1
        yield slice(start, stop)
        start = stop


def _single_tokens_first(host: Step, spans: Ints) -> Ints:
    """Return spans in another order: those of one token first, by their lengths."""
    counts = np.diff(host.query_starts.numpy())[spans]
    contexts = host.context_lengths.numpy()[spans]
    return spans[np.lexsort((np.where(counts == 1, contexts, spans), counts > 1))]


def _tokens_of(host: Step, spans: Ints) -> Ints:
    """Return the packed tokens of spans, in their order."""
    starts = host.query_starts.numpy().astype(np.int64)
    return np.concatenate([np.arange(starts[span], starts[span + 1]) for span in spans])


def _pages_of(host: Step, span: int) -> Ints:
    """Return a span's pages."""
    start, stop = host.page_starts.numpy()[span : span + 2]
    pages: Ints = host.pages.numpy()[start:stop].astype(np.int64)
    return pages


def _padded_pages(host: Step, spans: Ints) -> Ints:
    """Return spans' pages `[S, P]`, padded with any page."""
    lists = [_pages_of(host, int(span)) for span in spans]
    padded = np.zeros((len(lists), max(map(len, lists))), np.int64)
    for row, pages in zip(padded, lists, strict=True):
        row[: len(pages)] = pages
    return padded


def _step_of(step: Step, spans: Ints, page_size: int) -> Step:
    """Return the step of some of a step's spans, those of one token first."""
    host = step.host
    contexts, counts = host.context_lengths.numpy(), np.diff(host.query_starts.numpy())
    alone = [
        Span(int(contexts[span]), int(contexts[span] + counts[span]), _pages_of(host, int(span)))
        for span in spans
    ]
    return paged_step(alone, page_size, step.slots.device)


def _read(latents: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the latents and rotary keys `[n, K, W]` at slots `[n, K]`."""
    if latents.dtype == FP8:
        return latents.view(torch.uint8)[slots].view(FP8).to(dtype)
    return latents[slots]

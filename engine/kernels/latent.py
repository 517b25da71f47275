"""Latent attention (MLA, DeepSeek-V2, 2024) over pages in torch.

For each token a layer stores a latent and a rotary key: W = R + Dr numbers, from which every head's
key and value are projected. Key h is (W_UK h · latent, rotary), value h is W_UV h · latent. A few
queries are projected to the latents instead (absorbed), and their attention output is projected to
values; for many queries the latents are expanded to keys and values once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from typing import NamedTuple, Protocol, Self, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from .attention import AttentionBackend, AttentionShape, HeadNorms, kv_width
from .host_memory import zeros
from .quantised import FP8
from .reference import Span, step_spans, to_storage
from .shared_prefixes import SharedPrefixes, find_shared_prefixes
from .step import Step

# Decodes in one padded product have similar lengths, so that less than half of it is padding.
DECODES_AT_ONCE = 64


class UpProjections(NamedTuple):
    """Projections from latents: `key [H, Dn, R]` and `value [H, Dv, R]`."""

    key: Tensor
    value: Tensor

    def expands(self, num_tokens: int) -> bool:
        """Return whether keys and values cost less than absorbed queries for that many tokens."""
        nope, rank = self.key.shape[1:]
        width = self.value.shape[1]
        return num_tokens * (2 * rank - nope - width) > rank * (nope + width)


@runtime_checkable
class LatentBackend(AttentionBackend, Protocol):
    """A backend of latents; `attend` takes absorbed queries, and `store` latents as keys."""

    def attend_latents(
        self, layer: int, query: Tensor, rotary: Tensor, projections: UpProjections
    ) -> Tensor:
        """Attend queries `[T, H, Dn]` and their rotary parts `[T, H, Dr]` → `[T, H, Dv]`."""


class LatentAttention:
    """Attention backend of latents: one layer's pages are `[pages, page_size, W]`.

    A shape's one key head has the width of a latent plus its rotary part, its value head that of a
    latent; `scaling` is that of the expanded heads.
    """

    page_size = 16
    copies_slots = True

    def __init__(
        self,
        shapes: Sequence[AttentionShape],
        num_pages: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        assert all(shape.has_latent_values for shape in shapes)
        self.shapes = tuple(shapes)
        self.keys = [
            zeros((num_pages, self.page_size, shape.key_dim), dtype, device) for shape in shapes
        ]

    @classmethod
    def page_bytes(cls, shapes: Sequence[AttentionShape], dtype: torch.dtype) -> int:
        """Return the bytes that one page takes over all layers."""
        return kv_width(shapes) * cls.page_size * dtype.itemsize

    def with_layers(self, shapes: Sequence[AttentionShape]) -> Self:
        """Return a backend of other layers over the same pages."""
        other = copy(self)
        other.shapes = tuple(shapes)
        return other

    def prepare(self, step: Step) -> None:
        """Read the positions of the next forward pass's tokens; valid until the next call."""
        self._slots, self._num_decodes = step.slots.long(), step.num_decodes
        self._copies = step.page_copies
        spans = step_spans(step)
        self._spans = spans[step.num_decodes :]
        shared = find_shared_prefixes(step.host, self.page_size)
        self._prefixes = list(_prefixes(shared, spans))
        decodes = [
            (span, int(first) * self.page_size)
            for span, first in zip(spans, shared.alone_from, strict=False)
        ]
        decodes.sort(key=lambda decode: decode[0].length - decode[1])
        self._batches = [
            _Batch.of(decodes[start : start + DECODES_AT_ONCE])
            for start in range(0, len(decodes), DECODES_AT_ONCE)
        ]

    def store_qkv(
        self, layer: int, qkv: Tensor, cos_sin: Tensor, norms: HeadNorms | None
    ) -> Tensor:
        """Raise: a latent's queries and keys are not heads of one product."""
        raise NotImplementedError

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write the step's latents and rotary keys `key [T, 1, W]` to their slots."""
        del value  # the latents
        pages = self.keys[layer]
        flat = pages.view(-1, pages.shape[2])
        stored = to_storage(key[:, 0], flat.dtype)
        if flat.dtype == FP8:
            flat, stored = flat.view(torch.uint8), stored.view(torch.uint8)
        flat[self._slots] = stored
        for source, target, count in self._copies:
            pages[target, :count] = pages[source, :count]

    def attend(self, layer: int, query: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Attend absorbed queries to latents: `[T, Hq, W]` → `[T, Hq, R]`."""
        del sinks
        out = query.new_zeros(*query.shape[:2], self.shapes[layer].value_dim)
        self._attend_decodes(layer, query, out)
        for span in self._spans:
            own = slice(span.start, span.stop)
            key = self._read(layer, span.pages, query.dtype)[: span.length]
            out[own] = self._attend(layer, query[own], key[None], key[None], span)
        return out

    def attend_latents(
        self, layer: int, query: Tensor, rotary: Tensor, projections: UpProjections
    ) -> Tensor:
        """Attend queries `[T, H, Dn]` and their rotary parts `[T, H, Dr]` → `[T, H, Dv]`."""
        out = query.new_zeros(*query.shape[:2], projections.value.shape[1])
        is_absorbed = torch.ones(len(query), dtype=torch.bool)
        expanded = [span for span in self._spans if projections.expands(span.stop - span.start)]
        for span in expanded:
            own = slice(span.start, span.stop)
            is_absorbed[own] = False
            whole = torch.cat([query[own], rotary[own]], dim=2)
            out[own] = self._attend(layer, whole, *self._expand(layer, span, projections), span)
        if not is_absorbed.any():
            return out
        absorbed = torch.einsum("thn,hnr->thr", query, projections.key)
        kept, self._spans = self._spans, [span for span in self._spans if span not in expanded]
        mixed = self.attend(layer, torch.cat([absorbed, rotary], dim=2))
        self._spans = kept
        some = is_absorbed.to(query.device)
        out[some] = torch.einsum("thr,hvr->thv", mixed[some], projections.value)
        return out

    def _expand(self, layer: int, span: Span, projections: UpProjections) -> tuple[Tensor, Tensor]:
        """Return a span's keys `[H, L, Dn + Dr]` and values `[H, L, Dv]`."""
        rank = self.shapes[layer].value_dim
        stored = self._read(layer, span.pages, projections.key.dtype)[: span.length]  # [L, W]
        latents, rotary = stored[:, :rank], stored[:, rank:]
        key = latents @ projections.key.mT  # [H, L, Dn]
        rotary = rotary.expand(len(key), -1, -1)
        return torch.cat([key, rotary], dim=2), latents @ projections.value.mT

    def _attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, span: Span) -> Tensor:
        """Attend a span's queries `[t, H, D]` to keys `[H or 1, L, D]` → `[t, H, Dv]`."""
        rank = self.shapes[layer].value_dim
        is_absorbed = len(key) == 1 and query.shape[2] == self.shapes[layer].key_dim
        value = value[..., :rank] if is_absorbed else value
        scores = query.transpose(0, 1) @ key.mT * self.shapes[layer].scaling  # [H, t, L]
        places = torch.arange(span.length, device=query.device)
        hidden = places > places[span.context :, None]
        weights = scores.float().masked_fill_(hidden, -torch.inf).softmax(dim=-1)
        return (weights.to(value.dtype) @ value).transpose(0, 1)

    def _attend_decodes(self, layer: int, query: Tensor, out: Tensor) -> None:
        """Attend the step's decodes: first to shared prefixes, then batch by batch."""
        shape, sums = self.shapes[layer], _Sums.of(out[: self._num_decodes])
        for prefix in self._prefixes:
            key = self._read(layer, prefix.pages, query.dtype)  # [L, W]
            for tokens in torch.split(prefix.tokens, DECODES_AT_ONCE):
                scores = query[tokens].flatten(0, 1) @ key.T * shape.scaling  # [S · H, L]
                scores = scores.view(len(tokens), -1, len(key))
                sums.add(tokens, scores, key[:, : shape.value_dim])
        for batch in self._batches:
            key = self._read(layer, batch.pages.flatten(), query.dtype)
            key = key.view(len(batch.tokens), -1, shape.key_dim)  # [S, L, W]
            scores = query[batch.tokens] @ key.mT * shape.scaling  # [S, H, L]
            scores = scores.float().masked_fill_(batch.is_hidden[:, None], -torch.inf)
            if self._prefixes:
                sums.add(batch.tokens, scores, key[..., : shape.value_dim])
            else:
                weights = scores.softmax(dim=-1).to(key.dtype)
                out[batch.tokens] = weights @ key[..., : shape.value_dim]
        if self._prefixes:
            out[: self._num_decodes] = sums.total / sums.mass[..., None]

    def _read(self, layer: int, pages: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the latents and rotary keys `[L, W]` of pages."""
        stored = self.keys[layer]
        if stored.dtype == FP8:
            return stored.view(torch.uint8)[pages].view(FP8).flatten(0, 1).to(dtype)
        return stored[pages].flatten(0, 1)


class _Sums(NamedTuple):
    """Sums over the keys that decodes have seen so far, in fp32 relative to each head's best score.

    The weighted values are `[S, H, R]`, their weights and that score `[S, H]` (log-sum-exp).
    """

    total: Tensor
    mass: Tensor
    peak: Tensor

    @classmethod
    def of(cls, out: Tensor) -> Self:
        """Return the empty sums, for an output `[S, H, R]`."""
        total = torch.zeros_like(out, dtype=torch.float32)
        return cls(total, total[..., 0].clone(), torch.full_like(total[..., 0], -torch.inf))

    def add(self, tokens: Tensor, scores: Tensor, value: Tensor) -> None:
        """Add what tokens `[s]` see by `scores [s, H, L]`: values `[L, R]`, or `[s, L, R]`."""
        before = self.peak[tokens]
        scores = scores.float()
        peak = torch.maximum(before, scores.amax(dim=-1))
        weights = scores.sub_(peak[..., None]).exp_()
        shrink = (before - peak).exp_()
        self.mass[tokens] = self.mass[tokens] * shrink + weights.sum(dim=-1)
        weights = weights.to(value.dtype)
        if value.ndim == 2:  # one product of all tokens
            added = (weights.flatten(0, 1) @ value).view(*peak.shape, -1)
        else:
            added = weights @ value
        self.total[tokens] = (self.total[tokens] * shrink[..., None]).add_(added)
        self.peak[tokens] = peak


class _Prefix(NamedTuple):
    """Pages `[P]` that some decodes share, which are tokens `[S]`."""

    tokens: Tensor
    pages: Tensor


def _prefixes(shared: SharedPrefixes, spans: Sequence[Span]) -> Iterator[_Prefix]:
    """Yield the shared prefixes of a step's decodes, its first spans."""
    for start, stop, first, last in zip(
        shared.starts, shared.stops, shared.firsts, shared.lasts, strict=True
    ):
        members = shared.order[start:stop]
        pages = spans[members[0]].pages
        yield _Prefix(torch.from_numpy(members).to(pages.device), pages[first:last])


class _Batch(NamedTuple):
    """Decodes of a step, from the position on where they share nothing.

    It has tokens `[S]`, pages `[S, P]` and a mask of positions outside a sequence `[S, L]`.
    """

    tokens: Tensor
    pages: Tensor
    is_hidden: Tensor

    @classmethod
    def of(cls, decodes: Sequence[tuple[Span, int]]) -> Self:
        """Return the batch of some decodes, each from a position on, padded to the longest."""
        size = LatentAttention.page_size
        own = [span.pages[first // size :] for span, first in decodes]
        longest = max(map(len, own))
        device = own[0].device
        pages = torch.stack([functional.pad(part, (0, longest - len(part))) for part in own])
        lengths = np.array([span.length - first for span, first in decodes])
        places = torch.arange(longest * size, device=device)
        tokens = torch.tensor([span.start for span, _ in decodes], device=device)
        return cls(tokens, pages, places >= torch.from_numpy(lengths).to(device)[:, None])

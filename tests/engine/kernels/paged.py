"""Sequences of one layer on pages, the steps that compute them, and the expected results."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tidemill.engine.kernels.attention import AttentionBackend, AttentionShape, PositionBias
from tidemill.engine.kernels.step import Step

CPU = torch.device("cpu")
# One of the sequences, its first position to compute and the one after the last.
Piece = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Sequences:
    """Some sequences: `key [H, L, Dk]`, `value [H, L, Dv]` and `query [L, Hq, Dk]` of each.

    `beginnings[i]`: how many tokens at its start it has in common with sequence 0. Of all of them
    the tokens of `wholes`, by first and the one after the last, see each other both ways. No token
    sees the last `num_unseen`, if any, of a bidirectional sequence.
    """

    shape: AttentionShape
    queries: list[Tensor]
    keys: list[Tensor]
    values: list[Tensor]
    sinks: Tensor | None
    beginnings: list[int]
    wholes: tuple[tuple[int, int], ...] = ()
    num_unseen: int = 0

    @classmethod
    def random(
        cls,
        shape: AttentionShape,
        lengths: Sequence[int],
        dtype: torch.dtype = torch.float32,
        beginnings: Sequence[int] = (),
        seed: int | None = None,
    ) -> Sequences:
        """Make sequences of some lengths, rounded to a dtype."""
        generator = torch.Generator().manual_seed(sum(lengths) if seed is None else seed)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=generator).to(dtype)

        heads, kv_heads = shape.num_query_heads, shape.num_kv_heads
        common = list(beginnings) or [0] * len(lengths)
        made = cls(
            shape,
            [normal(length, heads, shape.key_dim) for length in lengths],
            [normal(kv_heads, length, shape.key_dim) for length in lengths],
            [normal(kv_heads, length, shape.value_dim) for length in lengths],
            normal(heads) * 2 if shape.has_sinks else None,
            common,
        )
        for index, count in enumerate(common):
            made.keys[index][:, :count] = made.keys[0][:, :count]
            made.values[index][:, :count] = made.values[0][:, :count]
        return made

    @property
    def lengths(self) -> list[int]:
        """How many tokens each sequence has."""
        return [len(query) for query in self.queries]

    def end(self, position: int) -> int:
        """Return the position after the last key that a causal token sees."""
        wholes = self.wholes if self.shape.sees_ahead else ()
        stops = (stop for start, stop in wholes if start <= position < stop)
        return next(stops, position + 1)

    def expected(self, index: int) -> Tensor:
        """Return one sequence's attention, plainly and in float64: `[L, Hq, Dv]`."""
        shape = self.shape
        group = shape.num_query_heads // shape.num_kv_heads
        query = self.queries[index].double().transpose(0, 1)
        key = self.keys[index].double().repeat_interleave(group, dim=0)
        value = self.values[index].double().repeat_interleave(group, dim=0)
        scores = query @ key.transpose(1, 2) * shape.scaling
        if shape.softcap:
            scores = torch.tanh(scores / shape.softcap) * shape.softcap
        length = query.shape[1]
        if (bias := shape.position_bias) is not None:
            for position in range(length):
                first = bias.reach - position
                scores[:, position] += bias.logits[:, first : first + length]
        reach = shape.window or length
        for position in range(length):
            end = self.end(position) if shape.is_causal else position + reach
            scores[:, position, end:] = -torch.inf
            first = max(0, position - reach + 1)
            if shape.chunk:
                first = max(first, position - position % shape.chunk)
            scores[:, position, :first] = -torch.inf
        scores[..., length - self.num_unseen :] = -torch.inf
        weights = scores.exp()
        total = weights.sum(dim=-1, keepdim=True)
        total[total == 0] = 1  # of a token that sees none
        if self.sinks is not None:
            total += self.sinks.double().exp()[:, None, None]
        return (weights / total @ value).transpose(0, 1)


@dataclass(frozen=True, slots=True)
class Paged:
    """A backend of one layer, and the pages that each sequence has there, in no order."""

    backend: AttentionBackend
    sequences: Sequences
    pages: list[NDArray[np.int64]]

    def step(
        self, pieces: Sequence[Piece], num_decodes: int, copying: AbstractSet[int] = frozenset()
    ) -> Step:
        """Return the step that computes some pieces, the first of them decodes.

        Sequences in `copying` copy the beginning of their first page from sequence 0.
        """
        size = self.backend.page_size
        positions = [np.arange(start, stop) for _, start, stop in pieces]
        used = [self.pages[index][: -(-stop // size)] for index, _, stop in pieces]
        slots = [
            pages[at // size] * size + at % size for pages, at in zip(used, positions, strict=True)
        ]
        num_tokens = sum(map(len, positions))
        seeing = replace(self.sequences, shape=replace(self.sequences.shape, sees_ahead=True))
        ends = [seeing.end(position) for at in positions for position in at.tolist()]
        unseen = [self.sequences.num_unseen] * len(pieces)
        return Step.pack(
            num_decodes,
            CPU,
            token_ids=np.zeros(num_tokens, np.int64),
            positions=np.concatenate(positions),
            slots=np.concatenate(slots),
            query_starts=np.array([0, *accumulate(map(len, positions))]),
            context_lengths=np.array([start for _, start, _ in pieces]),
            page_starts=np.array([0, *accumulate(map(len, used))]),
            pages=np.concatenate(used),
            logit_rows=np.arange(num_tokens),
            **({"ends": np.array(ends)} if self.sequences.wholes else {}),
            **({"unseen": np.array(unseen)} if any(unseen) else {}),
            **({"copies": self._copies(pieces, copying)} if copying else {}),
        )

    def _copies(self, pieces: Sequence[Piece], copying: AbstractSet[int]) -> NDArray[np.int64]:
        size = self.backend.page_size
        rows = [
            (self.pages[0][start // size], self.pages[index][start // size], start % size)
            for index, start, _ in pieces
            if index in copying
        ]
        return np.array(rows).ravel()

    def run(
        self,
        pieces: Sequence[Piece],
        num_decodes: int = 0,
        copying: AbstractSet[int] = frozenset(),
    ) -> list[Tensor]:
        """Store and attend some pieces in one step → `[t, Hq, Dv]` of each; see `step`."""
        all_of = self.sequences
        self.backend.prepare(self.step(pieces, num_decodes, copying))
        key = torch.cat([all_of.keys[i][:, start:stop] for i, start, stop in pieces], dim=1)
        value = torch.cat([all_of.values[i][:, start:stop] for i, start, stop in pieces], dim=1)
        query = torch.cat([all_of.queries[i][start:stop] for i, start, stop in pieces])
        self.backend.store(0, key.transpose(0, 1), value.transpose(0, 1))
        out = self.backend.attend(0, query, all_of.sinks)
        assert out.dtype == query.dtype
        return list(out.split([stop - start for _, start, stop in pieces]))

    def decode_all(self) -> Tensor:
        """Compute all but the last tokens, then those in one step of decodes: `[N, Hq, Dv]`."""
        lengths = enumerate(self.sequences.lengths)
        earlier = [(index, 0, length - 1) for index, length in lengths if length > 1]
        if earlier:
            self.run(earlier)
        pieces = [(i, length - 1, length) for i, length in enumerate(self.sequences.lengths)]
        return torch.cat(self.run(pieces, num_decodes=len(pieces)))


def biased(shape: AttentionShape, longest: int) -> AttentionShape:
    """Give a shape a random position bias for sequences of up to `longest` tokens."""
    generator = torch.Generator().manual_seed(longest)
    logits = torch.randn(shape.num_query_heads, 2 * longest - 1, generator=generator) * 2
    return replace(shape, position_bias=PositionBias(logits))


def scattered(sequences: Sequences, page_size: int, seed: int = 1) -> list[NDArray[np.int64]]:
    """Give each sequence its pages, in no order; whole pages in common are those of sequence 0."""
    counts = [-(-length // page_size) for length in sequences.lengths]
    order = np.random.default_rng(seed).permutation(num_pages(sequences, page_size))
    ends = list(accumulate(counts))
    pages = [order[end - count : end] for count, end in zip(counts, ends, strict=True)]
    for own, common in zip(pages, sequences.beginnings, strict=True):
        own[: common // page_size] = pages[0][: common // page_size]
    return pages


def num_pages(sequences: Sequences, page_size: int) -> int:
    """Return the number of pages: all that sequences need, and three unused ones."""
    return sum(-(-length // page_size) for length in sequences.lengths) + 3

"""Sequences' keys and values laid out in pages, and the plain attention they are held to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.attention import AttentionShape
from engine.kernels.packed import Chunk, PackedStep


@dataclass(frozen=True, slots=True)
class Sequences:
    """Some sequences: `key [H, L, Dk]`, `value [H, L, Dv]` and `query [L, Hq, Dk]` of each."""

    shape: AttentionShape
    queries: list[Tensor]
    keys: list[Tensor]
    values: list[Tensor]
    sinks: Tensor | None

    @classmethod
    def random(
        cls, shape: AttentionShape, lengths: list[int], dtype: torch.dtype = torch.float32
    ) -> Sequences:
        """Make sequences of some lengths, rounded to a dtype."""
        generator = torch.Generator().manual_seed(sum(lengths))

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=generator).to(dtype)

        heads, kv_heads = shape.num_query_heads, shape.num_kv_heads
        return cls(
            shape,
            [normal(length, heads, shape.key_dim) for length in lengths],
            [normal(kv_heads, length, shape.key_dim) for length in lengths],
            [normal(kv_heads, length, shape.value_dim) for length in lengths],
            normal(heads) * 2 if shape.has_sinks else None,
        )

    @property
    def lengths(self) -> list[int]:
        """How many tokens each sequence has."""
        return [len(query) for query in self.queries]

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
        for position in range(length):
            scores[:, position, position + 1 :] = -torch.inf
            if shape.window:
                scores[:, position, : max(0, position - shape.window + 1)] = -torch.inf
        weights = scores.exp()
        total = weights.sum(dim=-1, keepdim=True)
        if self.sinks is not None:
            total += self.sinks.double().exp()[:, None, None]
        return (weights / total @ value).transpose(0, 1)


@dataclass(frozen=True, slots=True)
class Paged:
    """A layer's cache `keys [pages, H, Dk, size]`, `values [pages, H, size, Dv]`, NaN if unwritten.

    `pages[i]` are the pages of sequence i, in no order.
    """

    keys: Tensor
    values: Tensor
    pages: list[Tensor]
    page_size: int

    @classmethod
    def of(cls, sequences: Sequences, page_size: int) -> Paged:
        """Give each sequence just the pages it needs, and write nothing yet."""
        shape, dtype = sequences.shape, sequences.keys[0].dtype
        counts = [-(-length // page_size) for length in sequences.lengths]
        order = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(1))
        keys = torch.full((len(order), shape.num_kv_heads, shape.key_dim, page_size), torch.nan)
        values = torch.full((len(order), shape.num_kv_heads, page_size, shape.value_dim), torch.nan)
        pages = list(order[: sum(counts)].split(counts))
        return cls(keys.to(dtype), values.to(dtype), pages, page_size)

    def write(self, sequences: Sequences) -> None:
        """Write all tokens of all sequences, one at a time."""
        for index, length in enumerate(sequences.lengths):
            for position in range(length):
                page, offset = self.pages[index][position // self.page_size], position
                offset %= self.page_size
                self.keys[page, :, :, offset] = sequences.keys[index][:, position]
                self.values[page, :, offset] = sequences.values[index][:, position]

    def decode_step(self, lengths: list[int]) -> PackedStep:
        """Return the step in which each sequence computes its last token."""
        rows = torch.nn.utils.rnn.pad_sequence(self.pages, batch_first=True)
        last = [length - 1 for length in lengths]
        return PackedStep(
            num_decodes=len(lengths),
            token_pages=torch.stack(
                [pages[at // self.page_size] for pages, at in zip(self.pages, last, strict=True)]
            ),
            token_offsets=torch.tensor(last) % self.page_size,
            decode_pages=rows.int(),
            decode_lengths=torch.tensor(lengths, dtype=torch.int32),
            chunks=(),
        )

    def chunk(self, index: int, start: int, stop: int) -> Chunk:
        """Return the chunk of positions `start:stop` of one sequence, packed from 0."""
        return Chunk(0, stop - start, start, self.pages[index][: -(-stop // self.page_size)])

"""Steps of simulated paged sequences, for benchmarks without a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from tidemill.engine.kernels.paged_step import Span, paged_step
from tidemill.engine.kernels.sampling import SamplingMetadata
from tidemill.engine.kernels.step import Step


class Piece(NamedTuple):
    """Tokens `start : stop` of a sequence."""

    sequence: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class PagedSequences:
    """Sequences of these lengths that share a prefix: the pages of their first `shared` tokens.

    The state of sequence i is in row i.
    """

    lengths: Sequence[int]
    shared: int = 0

    def num_pages(self, page_size: int) -> int:
        """Return the number of pages for all of them."""
        return sum(-(-length // page_size) for length in self.lengths)

    def step(self, pieces: Sequence[Piece], page_size: int, device: torch.device) -> Step:
        """Return the step of some pieces, those of one token before all others."""
        pieces = sorted(pieces, key=lambda piece: piece.stop - piece.start > 1)
        counts = [-(-length // page_size) for length in self.lengths]
        order = np.random.default_rng(0).permutation(sum(counts))
        pages = np.split(order, np.cumsum(counts)[:-1])
        common = self.shared // page_size
        for own in pages[1:]:
            own[:common] = pages[0][: len(own[:common])]
        return paged_step(
            [Span(one.start, one.stop, pages[one.sequence]) for one in pieces],
            page_size,
            device,
            state_sources=np.array([one.sequence if one.start else -1 for one in pieces]),
            state_rows=np.array([one.sequence for one in pieces]),
        )


def sampling_metadata(count: int, vocabulary: int, *, is_mixed: bool) -> SamplingMetadata:
    """Return metadata of greedy rows or, if `is_mixed`, of all kinds of sampling in rotation."""
    rng = np.random.default_rng(count)
    one, nothing = np.ones(count, np.float32), np.zeros(count, np.int64)
    turn = np.arange(count) % 4 if is_mixed else nothing
    has_processors = (turn == 3) | (turn == 1)
    known = 24
    tokens = rng.integers(0, vocabulary, (count, known)).astype(np.int32)
    shaped = np.where(has_processors, 1, 0)
    masks = rng.integers(0, 2**32, (1, -(-vocabulary // 32)), np.uint32)
    return SamplingMetadata(
        temperature=np.where(turn > 0, np.float32(0.8), np.float32(0)),
        top_k=np.where(turn == 2, 40, 0),
        top_p=np.where(turn > 1, np.float32(0.9), np.float32(1)),
        log_min_p=np.where(turn == 3, np.float32(-4), np.float32(-np.inf)),
        draws=rng.random(count),
        has_processors=has_processors,
        repetition_penalty=np.where(has_processors, np.float32(1.1), one),
        presence_penalty=np.where(has_processors, np.float32(0.3), np.float32(0)),
        frequency_penalty=np.where(has_processors, np.float32(0.2), np.float32(0)),
        tokens=tokens,
        slots=np.arange(count),
        num_prompt=nothing + known // 2,
        num_known=nothing + known,
        bias_starts=np.concatenate([[0], shaped.cumsum()]),
        bias_ids=rng.integers(0, vocabulary, int(shaped.sum())),
        bias=np.full(int(shaped.sum()), 2.0, np.float32),
        ban_starts=np.concatenate([[0], shaped.cumsum()]),
        ban_ids=rng.integers(0, vocabulary, int(shaped.sum())),
        mask_rows=np.where(turn == 3, 0, -1),
        masks=masks,
    )

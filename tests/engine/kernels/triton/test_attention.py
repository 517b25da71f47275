"""The GPU's attention, interpreted: whole steps against plain attention in float64."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.kernels.attention import AttentionShape
from engine.kernels.triton.attention import TritonAttention
from tests.engine.kernels.paged import CPU, Paged, Piece, Sequences, num_pages, scattered

SHAPE = AttentionShape(4, 2, 16, 16, 0.25)
SHAPES = {
    "a head each": replace(SHAPE, num_kv_heads=4),
    "sixteen to a key head": replace(SHAPE, num_query_heads=16, num_kv_heads=1),
    "seventeen to a key head": replace(SHAPE, num_query_heads=17, num_kv_heads=1),
    "three of odd widths": AttentionShape(6, 2, 24, 8, 0.3),
    "one number": AttentionShape(1, 1, 8, 1, 0.2),
    "window": replace(SHAPE, window=19),
    "window of one": replace(SHAPE, window=1),
    "softcap": replace(SHAPE, softcap=1.5),
    "sinks": replace(SHAPE, has_sinks=True),
    "everything": AttentionShape(6, 2, 8, 16, 0.7, window=20, softcap=2.0, has_sinks=True),
}


class StoresAtOnce(TritonAttention):
    """Stored by torch: a program for each token takes long to interpret."""

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """See `AttentionBackend.store`."""
        slots = self._slots.long()
        places = (slots // self.page_size, slots % self.page_size)
        self.keys[layer].transpose(1, 2)[places] = key.to(self.keys[layer].dtype)
        self.values[layer].transpose(1, 2)[places] = value.to(self.values[layer].dtype)


def paged(sequences: Sequences, dtype: torch.dtype = torch.float32, seed: int = 1) -> Paged:
    """Return sequences over a backend's pages, with NaN wherever nothing was stored."""
    size = StoresAtOnce.page_size
    backend = StoresAtOnce([sequences.shape], num_pages(sequences, size), dtype, CPU)
    backend.keys[0].fill_(torch.nan)
    backend.values[0].fill_(torch.nan)
    return Paged(backend, sequences, scattered(sequences, size, seed))


def check(
    shape: AttentionShape,
    steps: Sequence[Sequence[Piece]],
    lengths: Sequence[int],
    dtype: torch.dtype = torch.float32,
) -> None:
    """Hold steps, whose decodes come first, to plain attention."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")  # noqa: T201 - to be seen where it fails
    sequences = Sequences.random(shape, lengths, dtype)
    over = paged(sequences, dtype, seed)
    expected = [sequences.expected(index) for index in range(len(lengths))]
    bound = 1e-5 if dtype == torch.float32 else 2e-3
    for pieces in steps:
        num_decodes = int(np.sum([stop - start == 1 for _, start, stop in pieces]))
        outs = over.run(pieces, num_decodes)
        for (index, start, stop), out in zip(pieces, outs, strict=True):
            wanted = expected[index][start:stop]
            torch.testing.assert_close(out.double(), wanted, atol=bound, rtol=bound)


@pytest.mark.parametrize("kind", SHAPES)
def test_steps_give_plain_attention(kind: str) -> None:
    """Chunks without a past and with one, to the ends of pages and beyond; decodes among them."""
    steps = [
        [(2, 0, 1), (0, 0, 33), (1, 0, 16)],
        [(0, 33, 34), (2, 1, 2), (1, 16, 17), (3, 0, 70)],
        [(3, 70, 71), (0, 34, 40), (2, 2, 18)],
    ]
    check(SHAPES[kind], steps, [40, 17, 18, 71])

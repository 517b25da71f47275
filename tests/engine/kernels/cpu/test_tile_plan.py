"""Decodes that share pages: these are read once for all, and each row is bit-identical."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.engine.kernels.paged import CPU, Paged, Sequences, num_pages, scattered
from tidemill.engine.kernels.attention import AttentionShape
from tidemill.engine.kernels.cpu.attention import PAGE_SIZE, CpuAttention
from tidemill.engine.kernels.cpu.flash import BLOCK, PAGES_AT_ONCE
from tidemill.engine.kernels.cpu.scalars import DTYPES
from tidemill.engine.kernels.cpu.tile_plan import TilePlan, plan_tiles
from tidemill.engine.kernels.cpu.tiles import ENDS, FIRST, LAST, PAGES, RESUMES, ROWS, START, STOP
from tidemill.engine.kernels.step import Step

GROUPED = AttentionShape(6, 2, 8, 16, 0.4)
# A tree: the sequences that begin like sequence 0, and the lengths that they share.
LENGTHS = [700, 650, 700, 641, 641, 330, 300, 320, 70, 300, 5]
BEGINNINGS = [0, 640, 640, 640, 640, 320, 256, 256, 64, 0, 0]
# What each layer keeps of a row has no part in these tests but its shape.
KEPT = (2, 3, 18)


def paged(shape: AttentionShape, dtype: torch.dtype, *, is_shared: bool) -> Paged:
    """Return the tree, with some pages shared or with all pages private."""
    sequences = Sequences.random(shape, LENGTHS, dtype, BEGINNINGS)
    pages = scattered(sequences, PAGE_SIZE)
    if not is_shared:
        pages = scattered(replace(sequences, beginnings=[0] * len(LENGTHS)), PAGE_SIZE)
    backend = CpuAttention([shape], num_pages(sequences, PAGE_SIZE), dtype, CPU)
    return Paged(backend, sequences, pages)


@pytest.mark.parametrize("window", [0, 200])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_the_same_with_shared_pages_and_without(dtype: torch.dtype, window: int) -> None:
    """Bit for bit, with sinks, a softcap and a window too."""
    shape = replace(GROUPED, window=window, softcap=5.0, has_sinks=True)
    shared, apart = (paged(shape, dtype, is_shared=is_shared) for is_shared in (True, False))
    assert torch.equal(shared.decode_all(), apart.decode_all())


def decodes_of(tree: Paged) -> Step:
    """Return the step in which every sequence computes its last token."""
    pieces = [(i, length - 1, length) for i, length in enumerate(tree.sequences.lengths)]
    return tree.step(pieces, num_decodes=len(pieces))


def met_blocks(step: Step, layout: TilePlan) -> tuple[list[list[int]], int]:
    """Return the last page of each block that each row meets, and how many blocks are read.

    It asserts that rows continue where they were, and end once.
    """
    pages, starts = step.pages.tolist(), step.page_starts.tolist()
    met: list[list[int]] = [[] for _ in range(step.num_tokens)]
    num_read, ended = 0, []
    for tiles in layout.phases:
        seen_in_phase = []
        for tile in tiles.tolist():
            rows = layout.order[tile[START] : tile[STOP]].tolist()
            num_read += tile[LAST] - tile[FIRST]
            for row in rows:
                assert len(met[row]) == tile[FIRST]
                assert bool(tile[RESUMES]) == (tile[FIRST] > 0)
                for block in range(tile[FIRST], tile[LAST]):
                    last = (block + 1) * PAGES_AT_ONCE - 1
                    number = min(tile[PAGES] + last, starts[starts.index(tile[PAGES]) + 1] - 1)
                    met[row].append(pages[number])
            seen_in_phase += rows
            ended += rows if tile[ENDS] else []
        assert len(set(seen_in_phase)) == len(seen_in_phase)
    assert sorted(ended) == list(range(step.num_tokens))
    return met, num_read


def test_every_row_meets_its_own_blocks_in_order() -> None:
    """Together with others or alone, none left out and none twice."""
    tree = paged(GROUPED, torch.float32, is_shared=True)
    step = decodes_of(tree)
    met, num_read = met_blocks(step, plan_tiles(step, 3, KEPT))
    for index, length in enumerate(LENGTHS):
        own = tree.pages[index][: -(-length // PAGE_SIZE)]
        blocks = -(-length // BLOCK)
        last = np.minimum(np.arange(1, blocks + 1) * PAGES_AT_ONCE, len(own)) - 1
        assert met[index] == own[last].tolist()
    assert num_read < sum(-(-length // BLOCK) for length in LENGTHS)


def test_shared_blocks_are_read_once_per_tile() -> None:
    """Forty sequences share a prefix: three tiles read ten blocks, and each reads its own block."""
    lengths, beginnings = [650] * 40, [0] + [640] * 39
    sequences = Sequences.random(GROUPED, lengths, torch.float32, beginnings)
    backend = CpuAttention([GROUPED], num_pages(sequences, PAGE_SIZE), torch.float32, CPU)
    step = decodes_of(Paged(backend, sequences, scattered(sequences, PAGE_SIZE)))
    layout = plan_tiles(step, 2, KEPT)
    tiles = -(-40 // (ROWS // 2))
    assert met_blocks(step, layout)[1] == tiles * 10 + 40
    assert [len(tiles) for tiles in layout.phases] == [3, 40]


def test_nothing_is_kept_where_nothing_is_shared() -> None:
    """One phase, and no memory for what rows came to."""
    tree = paged(GROUPED, torch.float32, is_shared=False)
    layout = plan_tiles(decodes_of(tree), 3, KEPT)
    assert len(layout.phases) == 1
    assert len(layout.kept) == 0


def test_few_reads_do_not_justify_a_separate_phase() -> None:
    """Two sequences share 600 tokens, which are in the cache: each reads them separately."""
    sequences = Sequences.random(GROUPED, [650] * 2, torch.float32, [0, 640])
    backend = CpuAttention([GROUPED], num_pages(sequences, PAGE_SIZE), torch.float32, CPU)
    step = decodes_of(Paged(backend, sequences, scattered(sequences, PAGE_SIZE)))
    layout = plan_tiles(step, 3, KEPT)
    assert len(layout.phases) == 1
    assert met_blocks(step, layout)[1] == 2 * 11


def test_few_tokens_do_not_justify_a_separate_tile() -> None:
    """A system prompt of one block is read by each sequence for itself."""
    sequences = Sequences.random(GROUPED, [100] * 9, torch.float32, [0] + [64] * 8)
    backend = CpuAttention([GROUPED], num_pages(sequences, PAGE_SIZE), torch.float32, CPU)
    step = decodes_of(Paged(backend, sequences, scattered(sequences, PAGE_SIZE)))
    assert len(plan_tiles(step, 3, KEPT).phases) == 1

"""Tile plan of a step's attention on the CPU, with shared prefixes (cascade attention).

If decodes share a prefix, one tile attends their queries to its blocks, then smaller groups attend
to theirs, and finally each to its own. Keys and values are read once per tile instead of once per
sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..step import Step
from .flash import BLOCK, PAGES_AT_ONCE
from .jit_cache import compiled
from .tiles import (
    COUNT,
    ENDS,
    FIRST,
    LAST,
    LENGTH,
    PAGES,
    RESUMES,
    ROWS,
    START,
    STOP,
    TILE_FIELDS,
)

# The fewest sequences and shared blocks that justify a separate tile. The fewest saved block reads,
# over all tiles, that justify a separate phase (measured by `bench.kernels.attention_cost`). Also
# the number of times that groups are divided.
FEWEST_SHARING = 2
FEWEST_BLOCKS = 2
FEWEST_READS = 32
MOST_LEVELS = 6
# The length of a tile over a shared prefix, all of which is visible.
ENDLESS = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True)
class TilePlan:
    """Tiles `[n, TILE_FIELDS]` in phases, each resuming from the partial states of the last."""

    phases: list[NDArray[np.int32]]
    order: NDArray[np.int32]  # [T]: the tokens that tiles name ranges of
    kept: NDArray[np.float32]  # [decodes or none, Hkv, G, width + 2]


def plan_tiles(
    step: Step, group: int, kept_shape: tuple[int, ...], *, is_causal: bool = True
) -> TilePlan:
    """Plan the tiles of a step for layers of `group` query heads to a key head."""
    at_once = max(1, ROWS // group)
    contexts, page_starts = step.context_lengths.numpy(), step.page_starts.numpy()
    order = np.arange(step.num_tokens, dtype=np.int32)
    resumed = np.zeros(step.num_decodes, np.int32)
    phases = []
    if is_causal and step.num_decodes >= FEWEST_SHARING:
        shared = _shared_tiles(
            contexts[: step.num_decodes],
            *(page_starts, step.pages.numpy(), order, resumed, at_once),
        )
        levels = shared[:, TILE_FIELDS]
        reads = (shared[:, STOP] - shared[:, START] - 1) * (shared[:, LAST] - shared[:, FIRST])
        if reads.sum() < FEWEST_READS:
            resumed[:] = 0
        else:
            phases = [
                np.ascontiguousarray(shared[levels == level, :TILE_FIELDS])
                for level in np.unique(levels)
            ]
    kept = np.empty((step.num_decodes if phases else 0, *kept_shape), np.float32)
    starts = step.query_starts.numpy()
    ends = (step.visible_ends if is_causal else step.span_ends).numpy()
    arrays = (starts, ends, page_starts, order, resumed)
    phases.append(_own_tiles(step.num_decodes, *arrays, at_once))
    return TilePlan(phases, order, kept)


@compiled
def _own_tiles(
    num_decodes: Any,
    starts: Any,
    ends: Any,  # [T]: the position after the last one that a token sees
    page_starts: Any,
    order: Any,
    resumed: Any,
    at_once: Any,
) -> Any:
    """Return the final tiles: the rest of each decode, and all of longer spans."""
    spans, count = len(starts) - 1, num_decodes
    for span in range(num_decodes, spans):
        count += (starts[span + 1] - starts[span] + at_once - 1) // at_once
    tiles = np.zeros((count, TILE_FIELDS), np.int32)
    place = count
    # Backwards, so that longer spans come first, and of these the tokens with most context.
    for span in range(spans):
        start, stop = starts[span], starts[span + 1]
        # A decode is the token of its number.
        owner = order[span] if span < num_decodes else span
        while start < stop:
            end = min(stop, start + at_once)
            place -= 1
            tile = tiles[place]
            tile[START], tile[STOP] = start, end
            _name_pages(tile, owner, page_starts)
            last = order[end - 1] if span < num_decodes else end - 1
            length = ends[last]
            tile[LAST] = (length + BLOCK - 1) // BLOCK
            tile[LENGTH] = length
            if span < num_decodes:
                tile[FIRST] = resumed[owner]
                tile[RESUMES] = resumed[owner] > 0
            tile[ENDS] = 1
            start = end
    return tiles


@compiled
def _shared_tiles(
    contexts: Any,  # [decodes]
    page_starts: Any,
    pages: Any,
    order: Any,  # of tokens, which are decodes as long; put in groups
    resumed: Any,  # [decodes]: the block from which each resumes alone; set here
    at_once: Any,
) -> Any:
    """Return tiles over shared prefixes, with the level of each after its fields."""
    count = len(contexts)
    tiles = np.zeros((MOST_LEVELS * count, TILE_FIELDS + 1), np.int32)
    num_tiles = 0
    # Groups of rows `starts:stops` of the order, and the blocks that all of a group share.
    starts, stops, depths = np.zeros((3, count), np.int64)
    stops[0], num_groups = count, 1
    keys = np.empty(count, np.int64)
    for level in range(MOST_LEVELS):
        next_starts, next_stops, next_depths = np.zeros((3, count), np.int64)
        num_next = 0
        for number in range(num_groups):
            start, stop, depth = starts[number], stops[number], depths[number]
            for i in range(start, stop):
                keys[i] = _block_name(order[i], depth, contexts, page_starts, pages)
            by_key = np.argsort(keys[start:stop], kind="mergesort")
            order[start:stop] = order[start:stop][by_key]
            keys[start:stop] = keys[start:stop][by_key]
            first = start
            while first < stop:
                end = first + 1
                while end < stop and keys[end] == keys[first]:
                    end += 1
                if end - first >= FEWEST_SHARING and keys[first] >= 0:
                    last = _common(order[first:end], depth + 1, contexts, page_starts, pages)
                    begun = resumed[order[first]]
                    if last - begun >= FEWEST_BLOCKS:
                        resumed[order[first:end]] = last
                        for begin in range(first, end, at_once):
                            tile = tiles[num_tiles]
                            tile[START], tile[STOP] = begin, min(begin + at_once, end)
                            _name_pages(tile, order[first], page_starts)
                            tile[FIRST], tile[LAST] = begun, last
                            tile[RESUMES] = begun > 0
                            tile[LENGTH] = ENDLESS
                            tile[TILE_FIELDS] = level
                            num_tiles += 1
                    next_starts[num_next], next_stops[num_next] = first, end
                    next_depths[num_next] = last
                    num_next += 1
                first = end
        starts, stops, depths, num_groups = next_starts, next_stops, next_depths, num_next
    return tiles[:num_tiles]


@compiled
def _name_pages(tile: Any, owner: Any, page_starts: Any) -> None:
    tile[PAGES] = page_starts[owner]
    tile[COUNT] = page_starts[owner + 1] - page_starts[owner]


@compiled
def _block_name(row: Any, block: Any, contexts: Any, page_starts: Any, pages: Any) -> Any:
    """Return the page that identifies a row's block and all before it; -1 if not yet full."""
    if contexts[row] < (block + 1) * BLOCK:
        return -1
    return pages[page_starts[row] + (block + 1) * PAGES_AT_ONCE - 1]


@compiled
def _common(rows: Any, shared: Any, contexts: Any, page_starts: Any, pages: Any) -> Any:
    """Return the number of blocks that all rows share, `shared` at least."""
    block = shared
    while True:
        name = _block_name(rows[0], block, contexts, page_starts, pages)
        if name < 0:
            return block
        for row in rows:
            if _block_name(row, block, contexts, page_starts, pages) != name:
                return block
        block += 1

"""Paged attention on the CPU, tile by tile: some tokens of a key head against a run of blocks.

A tile of a prefill is neighbouring tokens of one sequence; a decode is a tile of one token. Over a
shared prefix a tile has tokens of many sequences, which then continue separately.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .flash import (
    BLOCK,
    HALF,
    LOWEST,
    PAGES_AT_ONCE,
    attend_four,
    attend_four_to_half,
    attend_one,
    attend_two,
    attend_two_to_half,
)
from .jit_cache import compiled, inlined
from .scalars import exp, narrow
from .thread_pool import parallel_for

# A tile: tokens `order[START:STOP]`, over blocks `FIRST:LAST` of the `COUNT` pages from `PAGES` on.
# It starts from the saved partial state if it `RESUMES`, and saves its own unless it `ENDS`. Places
# from `LENGTH` on are masked.
START, STOP, PAGES, COUNT, FIRST, LAST, RESUMES, ENDS, LENGTH = range(9)
TILE_FIELDS = 9
ROWS = 32
# Items of a job: enough that a thread which joins late still finds some.
ITEMS_A_TEAM = 64


@compiled
def attend_tiles(
    words: Any,
    tiles: Any,  # [tiles, TILE_FIELDS] int32
    order: Any,  # [T] int32
    positions: Any,  # [T] int32
    ends: Any,  # [T] int32: the position after the last that a causal token sees
    pages: Any,  # [P] int32
    query: Any,  # [T, Hkv, G, units] int32: words
    keys: Any,  # [pages, Hkv, units, PAGE_SIZE] int32
    values: Any,  # [pages, Hkv, units of tokens, width] int32
    kept: Any,  # [T', Hkv, G, width + 2] float32
    numbers: Any,  # scaling, softcap
    reach: Any,  # of a token: how many before its own it sees, how many after its end, its chunk
    sinks: Any,  # [Hkv, G] float32
    bias: Any,  # [Hkv, G, 2·R + BLOCK + 1] float32 by distance, see `PositionBias`; or [Hkv, G, 0]
    out: Any,  # [T, Hkv, G, Dv]
) -> None:
    """Attend the tokens of all tiles, which are independent of each other."""
    count = len(tiles) * keys.shape[1]
    at_once = max(1, count // ITEMS_A_TEAM)
    arguments = (
        *(at_once, tiles, order, positions, ends, pages, query, keys, values, kept),
        *(numbers, reach, sinks, bias, out),
    )
    parallel_for(words, (count + at_once - 1) // at_once, _attend_some, arguments)


@compiled
def _attend_some(
    item: Any,
    at_once: Any,
    tiles: Any,
    order: Any,
    positions: Any,
    ends: Any,
    pages: Any,
    query: Any,
    keys: Any,
    values: Any,
    kept: Any,
    numbers: Any,
    reach: Any,
    sinks: Any,
    bias: Any,
    out: Any,
) -> None:
    heads, group, units = query.shape[1:]
    width = values.shape[3]
    rows = max(ROWS, group)
    queries = np.empty(rows * units, np.int32)
    state = np.empty(rows * (width + 2), np.float32)
    bounds = np.empty(2 * rows, np.int32)
    shifts = np.empty(rows, np.int32)
    flat_bias, size_of_bias = bias.reshape(-1), bias.shape[2]
    flat_keys, flat_values = keys.reshape(-1), values.reshape(-1)
    places = np.empty(4 * PAGES_AT_ONCE, np.int64)
    last = min((item + 1) * at_once, len(tiles) * heads)
    for index in range(item * at_once, last):
        tile, head = tiles[index // heads], index % heads
        tokens = order[tile[START] : tile[STOP]]
        _load_rows(tile, tokens, head, query, positions, ends, reach, kept, queries, state, bounds)
        if size_of_bias > 0:
            for number, token in enumerate(tokens):
                for g in range(group):
                    own = (head * group + g) * size_of_bias + (size_of_bias - BLOCK) // 2
                    shifts[number * group + g] = own - positions[token]
        after = min(index + 1, last - 1)
        _attend_blocks(
            tile,
            len(tokens) * group,
            head,
            tiles[after // heads],
            after % heads,
            pages,
            keys,
            values,
            flat_keys,
            flat_values,
            places,
            numbers,
            width,
            queries,
            state,
            bounds,
            flat_bias,
            shifts,
            out[0, 0, 0, 0],
        )
        for number, token in enumerate(tokens):
            for g in range(group):
                row = state[(number * group + g) * (width + 2) :]
                if tile[ENDS]:
                    _write_row(row, width, sinks[head, g], out[token, head, g])
                else:
                    for i in range(width + 2):
                        kept[token, head, g, i] = row[i]


@inlined
def _load_rows(
    tile: Any,
    tokens: Any,
    head: Any,
    query: Any,
    positions: Any,
    ends: Any,
    reach: Any,
    kept: Any,
    queries: Any,
    state: Any,
    bounds: Any,
) -> None:
    """Load the tile's rows: queries, partial states, and the range that each sees."""
    group, units = query.shape[2:]
    stride = len(state) // (len(bounds) // 2)
    for number, token in enumerate(tokens):
        place = positions[token]
        begin = max(place - reach[0], place // reach[2] * reach[2])
        stop = min(ends[token] + reach[1], tile[LENGTH])
        for g in range(group):
            row = number * group + g
            bounds[2 * row], bounds[2 * row + 1] = begin, stop
            for u in range(units):
                queries[row * units + u] = query[token, head, g, u]
            if tile[RESUMES]:
                for i in range(stride):
                    state[row * stride + i] = kept[token, head, g, i]
            else:
                for i in range(stride):
                    state[row * stride + i] = 0
                state[row * stride + stride - 2] = LOWEST


@inlined
def _attend_blocks(
    tile: Any,
    rows: Any,
    head: Any,
    next_tile: Any,
    next_head: Any,
    pages: Any,
    keys: Any,
    values: Any,
    flat_keys: Any,
    flat_values: Any,
    places: Any,
    numbers: Any,
    width: Any,
    queries: Any,
    state: Any,
    bounds: Any,
    bias: Any,
    shifts: Any,
    like: Any,
) -> None:
    """Attend the rows to the tile's blocks, in their order."""
    units = keys.shape[2]
    key_size, value_size = units * keys.shape[3], values.shape[2] * width
    heads = keys.shape[1]
    stride = width + 2
    scaling, softcap = numbers
    first, stop = bounds[0], bounds[1]
    for row in range(rows):
        first, stop = min(first, bounds[2 * row]), max(stop, bounds[2 * row + 1])
    last = min(tile[LAST], (stop + BLOCK - 1) // BLOCK)
    for block in range(max(tile[FIRST], first // BLOCK), last):
        start = block * BLOCK
        _locate_pages(places, 0, pages, tile, block, head, heads, key_size, value_size)
        # The first rows prefetch the next block, the others this one, which is then cached.
        if block + 1 < last:
            _locate_pages(places, 1, pages, tile, block + 1, head, heads, key_size, value_size)
        else:
            begun = next_tile[FIRST]
            _locate_pages(
                places, 1, pages, next_tile, begun, next_head, heads, key_size, value_size
            )
        row = 0
        while row < rows:
            count = 4 if rows - row >= 4 else 2 if rows - row >= 2 else 1
            begin, end = bounds[2 * row], bounds[2 * row + 1]
            for other in range(row + 1, row + count):
                begin, end = min(begin, bounds[2 * other]), max(end, bounds[2 * other + 1])
            seen = min(BLOCK, end - start)
            if seen > 0 and begin < start + BLOCK:
                arguments = (
                    *(like, queries, row * units, units, flat_keys, flat_values, places, seen),
                    *(state, row * stride, width, bounds, 2 * row, start, scaling, softcap),
                    *(bias, shifts, row),
                )
                if count == 4 and seen <= HALF:
                    attend_four_to_half(*arguments)
                elif count == 4:
                    attend_four(*arguments)
                elif count == 2 and seen <= HALF:
                    attend_two_to_half(*arguments)
                elif count == 2:
                    attend_two(*arguments)
                else:
                    attend_one(*arguments)
                for i in range(2 * PAGES_AT_ONCE):
                    places[2 * PAGES_AT_ONCE + i] = places[i]
            row += count


@inlined
def _locate_pages(
    places: Any,
    number: Any,
    pages: Any,
    tile: Any,
    block: Any,
    head: Any,
    heads: Any,
    key_size: Any,
    value_size: Any,
) -> None:
    """Write the offsets of a block's pages to the places, as block 0 or 1."""
    at = 2 * number * PAGES_AT_ONCE
    for i in range(PAGES_AT_ONCE):
        # Everything beyond the last page is masked; the address read there must only be valid.
        page = pages[tile[PAGES] + min(block * PAGES_AT_ONCE + i, tile[COUNT] - 1)]
        place = np.int64(page) * heads + head
        places[at + i] = place * key_size
        places[at + PAGES_AT_ONCE + i] = place * value_size


@inlined
def _write_row(row: Any, width: Any, sink: Any, out: Any) -> None:
    """Write a row's output; a sink joins the softmax without a value."""
    before, mass = row[width], row[width + 1]
    peak = max(before, sink)
    shrink = exp(before - peak)
    share_ = shrink / (mass * shrink + exp(sink - peak))
    for d in range(len(out)):
        out[d] = narrow(row[d] * share_, out[0])

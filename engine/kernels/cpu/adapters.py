"""LoRA adapters fused into the CPU's linear layers, a different one for each row.

A row's product with its adapter's A matrix is appended to the row, and B to each panel, so the sum
is complete in registers and gates are applied as without adapters. Rows are processed in tiles that
share one adapter.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ..adapters import AdapterWeights, LinearAdapters
from ..elementwise import Gate
from ..linear import Linear
from .jit_cache import compiled
from .linear import (
    AHEAD_BYTES,
    BLOCK_BYTES,
    ITEM_BYTES,
    ITEMS_A_THREAD,
    NO_MORE,
    NO_SCALES,
    pack_panels,
    prepare,
)
from .linear_panels import NO_ACTIVATION, ROWS, WIDTH, WORD_BYTES, multiply_panel
from .thread_pool import parallel_for, shared_pool


def prepare_adapted(
    weight: Tensor, bias: Tensor | None, gate: Gate | None, adapters: LinearAdapters
) -> Linear | None:
    """Prepare the layer of `weight [O, I]` with adapters; None if that is not supported.

    The weight itself is not kept. A row's result is bit-identical whatever other rows run in the
    same batch.
    """
    base = prepare(weight, bias, gate)
    if base is None:
        return None
    halves = 1 if gate is None else 2
    padded = [_pad_rank(adapter) for adapter in adapters.adapters]
    downs = [None if own is None else pack_panels(own.down, 1) for own in padded]
    ups = [None if own is None else pack_panels(own.up, halves) for own in padded]
    ranks = [0, *(0 if own is None else len(own.down) for own in padded)]
    tables = (
        np.array(ranks),
        *(
            np.array([0, *(0 if own is None else own.data_ptr() for own in several)])
            for several in (downs, ups)
        ),
    )
    kept = (downs, ups, torch.zeros(WIDTH))  # the tables point to the first two; a bias of zeros

    def product(x: Tensor) -> Tensor:
        mapping = adapters.mapping
        if not mapping.has_any:
            return base(x)
        assert len(x) == len(mapping)
        x, out = base.allocate_output(x)
        between = x.new_empty(len(x), max(ranks))
        tensors = (x, between, base.panels, base.biases, kept[-1], out)
        places = tuple(tensor.data_ptr() for tensor in tensors)
        tiles, shape = mapping.tiles(ROWS), (*base.shape, max(ranks))
        _multiply(shared_pool(), base.threads, base.like, tiles, places, shape, base.ending, tables)
        return out

    return product


def _pad_rank(adapter: AdapterWeights | None) -> AdapterWeights | None:
    """Pad an adapter's rank with zeros to whole words."""
    if adapter is None:
        return None
    lacking = -len(adapter.down) % (WORD_BYTES // adapter.down.itemsize)
    down = functional.pad(adapter.down, (0, 0, 0, lacking))
    return AdapterWeights(down, functional.pad(adapter.up, (0, lacking)))


@compiled
def _multiply(
    words: Any,
    threads: Any,
    like: Any,
    tiles: Any,
    places: Any,
    shape: Any,
    end: Any,
    tables: Any,
) -> None:
    _, units, width, count, _, _ = shape
    parallel_for(words, len(tiles), _project_down, (like, tiles, places, shape, tables))
    row_bytes, panel_bytes = units * WORD_BYTES, units * WIDTH * WORD_BYTES
    panels = (width + count - 1) // count
    most_tiles = max(1, BLOCK_BYTES // row_bytes // ROWS)
    blocks = (len(tiles) + most_tiles - 1) // most_tiles
    most_panels = panels * blocks // (threads * ITEMS_A_THREAD)
    at_once = max(1, min(ITEM_BYTES // panel_bytes, most_panels))
    groups = (panels + at_once - 1) // at_once
    cut = (blocks, groups, at_once)
    parallel_for(
        words, blocks * groups, _multiply_item, (like, tiles, cut, places, shape, end, tables)
    )


@compiled
def _project_down(tile: Any, like: Any, tiles: Any, places: Any, shape: Any, tables: Any) -> None:
    """Multiply a tile's rows by their adapter's A matrix."""
    x, between, _, _, nothing, _ = places
    size, units, _, _, _, most = shape
    ranks, downs, _ = tables
    start, stop, owner = tiles[tile]
    row_bytes, panel_bytes = units * WORD_BYTES, units * WIDTH * WORD_BYTES
    for column in range(0, ranks[owner], WIDTH):
        place = downs[owner] + column // WIDTH * panel_bytes
        multiply_panel(
            like,
            x + start * row_bytes,
            row_bytes,
            stop - start,
            units,
            NO_SCALES,
            place,
            place + AHEAD_BYTES,
            WIDTH * WORD_BYTES,
            *NO_MORE,
            nothing,
            between + (start * most + column) * size,
            most * size,
            min(WIDTH, ranks[owner] - column),
            NO_ACTIVATION,
            np.float32(0),
            np.float32(0),
            np.float32(0),
        )


@compiled
def _multiply_item(
    item: Any,
    like: Any,
    tiles: Any,
    cut: Any,
    places: Any,
    shape: Any,
    end: Any,
    tables: Any,
) -> None:
    blocks, groups, at_once = cut
    x, between, packed, bias, _, out = places
    size, units, width, count, _, most = shape
    ranks, _, ups = tables
    row_bytes, panel_bytes = units * WORD_BYTES, units * WIDTH * WORD_BYTES
    block, first = item // groups, item % groups * at_once
    begin, end_tile = len(tiles) * block // blocks, len(tiles) * (block + 1) // blocks
    # As in `linear`.
    step, panels = WIDTH * WORD_BYTES // (end_tile - begin), (width + count - 1) // count
    for panel in range(first, min(first + at_once, panels)):
        is_last = panel + 1 == panels
        beyond = AHEAD_BYTES if end_tile - begin == 1 else 0 if is_last else panel_bytes
        place, column = packed + panel * panel_bytes, panel * count
        for tile in range(begin, end_tile):
            start, stop, owner = tiles[tile]
            more_units = ranks[owner] * size // WORD_BYTES
            multiply_panel(
                like,
                x + start * row_bytes,
                row_bytes,
                stop - start,
                units,
                NO_SCALES,
                place,
                place + beyond + (tile - begin) * step * units,
                step,
                between + start * most * size,
                most * size,
                more_units,
                ups[owner] + panel * more_units * WIDTH * WORD_BYTES,
                bias + panel * WIDTH * WORD_BYTES,
                out + (start * width + column) * size,
                width * size,
                min(count, width - column),
                *end,
            )

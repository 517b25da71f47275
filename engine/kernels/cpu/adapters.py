"""The CPU's products through adapters: of each row its own, in the registers of the product itself.

A row's numbers through the lower half of its adapter are further words of the row, and the upper
half further words of each panel: so gates are joined as ever, and nothing is added afterwards. Rows
are taken in tiles of one owner.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.adapters import Adapting, LowRank
from engine.kernels.blocks import Gate
from engine.kernels.cpu.compiling import compiled
from engine.kernels.cpu.panels import PLAIN, ROWS, WIDTH, WORD_BYTES, multiply_panel
from engine.kernels.cpu.products import (
    AHEAD_BYTES,
    BLOCK_BYTES,
    ITEM_BYTES,
    ITEMS_A_THREAD,
    NO_MORE,
    in_panels,
    pack,
)
from engine.kernels.cpu.threads import share, team
from engine.kernels.products import Product


def prepare_adapted(
    weight: Tensor, bias: Tensor | None, gate: Gate | None, adapting: Adapting
) -> Product | None:
    """Return the product of `weight [O, I]` through adapters; None where no kernel takes it.

    Nothing of the weight itself is kept. A row comes to the same, bit for bit, whatever other rows
    run beside it.
    """
    base = pack(weight, bias, gate)
    if base is None:
        return None
    halves = 1 if gate is None else 2
    adapters = [_whole_words(adapter) for adapter in adapting.adapters]
    downs = [None if own is None else in_panels(own.down, 1) for own in adapters]
    ups = [None if own is None else in_panels(own.up, halves) for own in adapters]
    ranks = [0, *(0 if own is None else len(own.down) for own in adapters)]
    tables = (
        np.array(ranks),
        *(
            np.array([0, *(0 if own is None else own.data_ptr() for own in several)])
            for several in (downs, ups)
        ),
    )
    kept = (downs, ups, torch.zeros(WIDTH))  # which the tables point to, and what adds nothing

    def product(x: Tensor) -> Tensor:
        owners = adapting.owners
        if not owners.has_any:
            return base.multiply(x)
        assert len(x) == len(owners)
        x, out = base.begun(x)
        between = x.new_empty(len(x), max(ranks))
        tensors = (x, between, base.panels, base.biases, kept[-1], out)
        places = tuple(tensor.data_ptr() for tensor in tensors)
        tiles, shape = owners.tiles(ROWS), (*base.shape, max(ranks))
        _multiply(team(), base.threads, base.like, tiles, places, shape, base.ending, tables)
        return out

    return product


def _whole_words(adapter: LowRank | None) -> LowRank | None:
    """Return an adapter of a rank that fills words, by zeros."""
    if adapter is None:
        return None
    lacking = -len(adapter.down) % (WORD_BYTES // adapter.down.itemsize)
    down = functional.pad(adapter.down, (0, 0, 0, lacking))
    return LowRank(down, functional.pad(adapter.up, (0, lacking)))


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
    _, units, width, count, _ = shape
    share(words, len(tiles), _lower_tile, (like, tiles, places, shape, tables))
    row_bytes, panel_bytes = units * WORD_BYTES, units * WIDTH * WORD_BYTES
    panels = (width + count - 1) // count
    most_tiles = max(1, BLOCK_BYTES // row_bytes // ROWS)
    blocks = (len(tiles) + most_tiles - 1) // most_tiles
    most_panels = panels * blocks // (threads * ITEMS_A_THREAD)
    at_once = max(1, min(ITEM_BYTES // panel_bytes, most_panels))
    groups = (panels + at_once - 1) // at_once
    cut = (blocks, groups, at_once)
    share(words, blocks * groups, _multiply_item, (like, tiles, cut, places, shape, end, tables))


@compiled
def _lower_tile(tile: Any, like: Any, tiles: Any, places: Any, shape: Any, tables: Any) -> None:
    """Multiply a tile's rows by the lower half of their adapter."""
    x, between, _, _, nothing, _ = places
    size, units, _, _, most = shape
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
            place,
            place + AHEAD_BYTES,
            WIDTH * WORD_BYTES,
            *NO_MORE,
            nothing,
            between + (start * most + column) * size,
            most * size,
            min(WIDTH, ranks[owner] - column),
            PLAIN,
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
    size, units, width, count, most = shape
    ranks, _, ups = tables
    row_bytes, panel_bytes = units * WORD_BYTES, units * WIDTH * WORD_BYTES
    block, first = item // groups, item % groups * at_once
    begin, end_tile = len(tiles) * block // blocks, len(tiles) * (block + 1) // blocks
    # Each tile asks for its part of the next panel; a single one for what it needs itself.
    step = WIDTH * WORD_BYTES // (end_tile - begin)
    beyond = AHEAD_BYTES if end_tile - begin == 1 else panel_bytes
    for panel in range(first, min(first + at_once, (width + count - 1) // count)):
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

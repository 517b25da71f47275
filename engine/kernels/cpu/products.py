"""The CPU's products with weights: a kernel on our own threads, which joins gates as it goes.

Weights are packed once, as panels that `panels` reads in one stream. An item of work is a block of
rows and some panels: its rows stay in the second cache while the panels pass by.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import llvmlite.binding
import numpy as np
import torch
from torch import Tensor

from engine.kernels.blocks import Gate
from engine.kernels.cpu.compiling import compiled
from engine.kernels.cpu.panels import (
    ALONE,
    CURVES,
    PLAIN,
    ROWS,
    WIDTH,
    WORD_BYTES,
    multiply_panel,
)
from engine.kernels.cpu.threads import share, team, team_size
from engine.kernels.cpu.vectors import HAS_PAIR_PRODUCT, LANES
from engine.kernels.products import End, Product

# What a block of rows may take of the second cache.
BLOCK_BYTES = 256 * 1024
# An item's panels have so many bytes at most, or fewer, for each thread to have so many items.
ITEM_BYTES = 256 * 1024
ITEMS_A_THREAD = 4
# How far ahead of their use weights are asked for, where each is used once.
AHEAD_BYTES = 4096
# Of a row and its panel, further words.
NO_MORE = (0, 0, 0, 0)
HAS_VECTORS = llvmlite.binding.get_host_cpu_features().get("avx512f", False)


def serves(dtype: torch.dtype) -> bool:
    """Say whether the kernel takes numbers of this kind here, and nothing else is faster."""
    if dtype == torch.bfloat16:
        # torch tells this nowhere else; with AMX oneDNN multiplies tiles in one instruction.
        return HAS_PAIR_PRODUCT and not torch.cpu._is_amx_tile_supported()  # noqa: SLF001
    return dtype == torch.float32 and HAS_VECTORS


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight in panels, and what becomes of a product's sums; `shape` is as the kernels take it.

    That is bytes of a number, words of a row, outputs, and outputs of a panel.
    """

    panels: Tensor
    biases: Tensor
    shape: tuple[int, int, int, int]
    like: np.generic
    ending: tuple[int, np.float32, np.float32, np.float32]
    threads: int

    def multiply(self, x: Tensor) -> Tensor:
        """Return the product."""
        x, out = self.begun(x)
        places = (x.data_ptr(), self.panels.data_ptr(), self.biases.data_ptr(), out.data_ptr())
        _multiply(team(), self.threads, self.like, len(x), places, self.shape, self.ending)
        return out

    def begun(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows as the kernels read them, and room for what comes of them."""
        x = x.contiguous()
        return x, x.new_empty(x.shape[0], self.shape[2])


def prepare(weight: Tensor, bias: Tensor | None, end: End) -> Product | None:
    """Return the product of `weight [O, I]`; None where the kernel does not take it.

    Nothing of the weight itself is kept. A row comes to the same, bit for bit, whatever other rows
    run beside it.
    """
    packed = pack(weight, bias, end)
    return None if packed is None else packed.multiply


def pack(weight: Tensor, bias: Tensor | None, end: End) -> Packed | None:
    """Return `weight [O, I]` in panels; None where the kernel does not take it."""
    outputs, inputs = weight.shape
    dtype, size = weight.dtype, weight.itemsize
    units = inputs * size // WORD_BYTES
    if not serves(dtype) or not units or units * WORD_BYTES != inputs * size:
        return None
    halves = 2 if isinstance(end, Gate) else 1
    return Packed(
        panels=in_panels(weight, halves),
        biases=_packed_bias(bias, outputs, halves),
        shape=(size, units, outputs // halves, WIDTH // halves),
        like=np.uint16(0) if dtype == torch.bfloat16 else np.float32(0),
        ending=_ending(end),
        threads=team_size(),
    )


def _ending(end: End) -> tuple[int, np.float32, np.float32, np.float32]:
    """Return what becomes of sums, as the kernel takes it."""
    curve, gate = PLAIN, Gate()
    if isinstance(end, Gate):
        curve, gate = CURVES[end.curve], end
    elif end is not None:
        curve = CURVES[end] + ALONE
    limit = np.inf if gate.limit is None else gate.limit
    return curve, np.float32(gate.steepness), np.float32(limit), np.float32(gate.lift)


def in_panels(weight: Tensor, halves: int) -> Tensor:
    """Return a weight's words `[panels, units, WIDTH]`: a panel has as many outputs of each half.

    What the last one has too many is zero.
    """
    words = weight.contiguous().view(torch.int32)
    count, width = WIDTH // halves, words.shape[0] // halves
    packed = words.new_empty(-(-width // count), words.shape[1], WIDTH)
    _pack(team(), words.numpy(), halves, packed.numpy())
    return packed


def _packed_bias(bias: Tensor | None, outputs: int, halves: int) -> Tensor:
    """Return a bias in fp32 and the order of panels, `[panels, WIDTH]`, or as many zeros."""
    count, width = WIDTH // halves, outputs // halves
    panels = -(-width // count)
    padded = torch.zeros(halves, panels * count)
    if bias is not None:
        padded[:, :width] = bias.view(halves, width)
    return padded.view(halves, panels, count).transpose(0, 1).contiguous()


@compiled
def _pack(words: Any, weight: Any, halves: Any, packed: Any) -> None:
    share(words, packed.shape[0], _pack_panel, (weight, halves, packed))


@compiled
def _pack_panel(panel: Any, weight: Any, halves: Any, packed: Any) -> None:
    width, count, units = weight.shape[0] // halves, WIDTH // halves, weight.shape[1]
    # A line of the cache of each output at a time.
    for start in range(0, units, LANES):
        for half in range(halves):
            for lane in range(count):
                output = panel * count + lane
                for unit in range(start, min(start + LANES, units)):
                    word = weight[half * width + output, unit] if output < width else np.int32(0)
                    packed[panel, unit, half * count + lane] = word


@compiled
def _multiply(
    words: Any, threads: Any, like: Any, rows: Any, places: Any, shape: Any, end: Any
) -> None:
    _, units, width, count = shape
    row_bytes, panel_bytes = units * WORD_BYTES, units * WIDTH * WORD_BYTES
    panels = (width + count - 1) // count
    most_rows = max(ROWS, BLOCK_BYTES // row_bytes // ROWS * ROWS)
    blocks = (rows + most_rows - 1) // most_rows
    most_panels = panels * blocks // (threads * ITEMS_A_THREAD)
    at_once = max(1, min(ITEM_BYTES // panel_bytes, most_panels))
    groups = (panels + at_once - 1) // at_once
    cut = (rows, blocks, groups, at_once)
    share(words, blocks * groups, _multiply_item, (like, cut, places, shape, end))


@compiled
def _multiply_item(item: Any, like: Any, cut: Any, places: Any, shape: Any, end: Any) -> None:
    rows, blocks, groups, at_once = cut
    x, packed, bias, out = places
    size, units, width, count = shape
    row_bytes, panel_bytes = units * WORD_BYTES, units * WIDTH * WORD_BYTES
    block, first = item // groups, item % groups * at_once
    start, stop = rows * block // blocks, rows * (block + 1) // blocks
    tiles = (stop - start + ROWS - 1) // ROWS
    # Each tile asks for its part of the next panel; a single one for what it needs itself.
    step = WIDTH * WORD_BYTES // tiles
    beyond = AHEAD_BYTES if tiles == 1 else panel_bytes
    for panel in range(first, min(first + at_once, (width + count - 1) // count)):
        place, column = packed + panel * panel_bytes, panel * count
        for tile in range(tiles):
            row = start + (stop - start) * tile // tiles
            after = start + (stop - start) * (tile + 1) // tiles
            multiply_panel(
                like,
                x + row * row_bytes,
                row_bytes,
                after - row,
                units,
                place,
                place + beyond + tile * step * units,
                step,
                *NO_MORE,
                bias + panel * WIDTH * WORD_BYTES,
                out + (row * width + column) * size,
                width * size,
                min(count, width - column),
                *end,
            )

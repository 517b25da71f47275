"""Linear layers on the CPU: a blocked GEMM on our thread pool, with fused gate or activation.

Weights are prepacked once, as panels that `linear_panels` reads in one stream. A work item is a
block of rows and some panels: the rows stay in the L2 cache while the panels are streamed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..elementwise import SIGMOID_SLOPE, Gate
from ..host_memory import WeightBlocks
from ..linear import Epilogue
from .jit_cache import compiled
from .linear_panels import (
    ACTIVATION_ONLY,
    ACTIVATIONS,
    NO_ACTIVATION,
    ROWS,
    WIDTH,
    WORD_BYTES,
    multiply_panel,
)
from .simd import HAS_PAIR_PRODUCT, HAS_VECTORS, HAS_WIDE_VECTORS, LANES
from .thread_pool import parallel_for, pool_size, shared_pool

# L2 cache budget of a block of rows.
BLOCK_BYTES = 256 * 1024
# Most bytes of an item's panels; fewer if a thread would get less than ITEMS_A_THREAD items.
ITEM_BYTES = 256 * 1024
ITEMS_A_THREAD = 4
# Prefetch distance of weights that are used once.
AHEAD_BYTES = 4096
# No further words of a row and its panel (those of an adapter), and no scales.
NO_MORE = (0, 0, 0, 0)
NO_SCALES = 0
_weights = WeightBlocks()


def supports(dtype: torch.dtype) -> bool:
    """Return whether the kernel supports this dtype on this CPU and is faster than oneDNN."""
    if dtype == torch.bfloat16:
        # torch has no public function for it; with AMX oneDNN multiplies tiles in one instruction.
        is_best = HAS_PAIR_PRODUCT or not HAS_WIDE_VECTORS
        return HAS_VECTORS and is_best and not torch.cpu._is_amx_tile_supported()  # noqa: SLF001
    return dtype == torch.float32 and HAS_VECTORS


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A weight packed in panels, with bias and epilogue.

    `shape` is bytes of an output, words of a row, outputs, outputs of a panel, and bytes of a
    panel's biases.
    """

    panels: Tensor
    biases: Tensor
    shape: tuple[int, int, int, int, int]
    like: np.generic
    ending: tuple[int, np.float32, np.float32, np.float32]
    threads: int

    def __call__(self, x: Tensor) -> Tensor:
        """Return x · weightᵀ + bias after the epilogue."""
        x, out = self.allocate_output(x)
        self.multiply_rows(x, NO_SCALES, out)
        return out

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return the rows `[T, I]` of a weight without a gate, bit for bit, out of its panels."""
        units = self.shape[1]
        words = torch.empty(len(token_ids), units, dtype=torch.int32)
        _unpack_rows(shared_pool(), self.panels.numpy(), token_ids.long().numpy(), words.numpy())
        return words.view(torch.float32 if self.shape[0] == WORD_BYTES else torch.bfloat16)

    def multiply_rows(self, x: Tensor, scales: int, out: Tensor) -> None:
        """Write the product of contiguous rows; `scales` is the address of theirs, if any."""
        tensors = (tensor.data_ptr() for tensor in (x, self.panels, self.biases, out))
        places = (*tensors, scales)
        _multiply(shared_pool(), self.threads, self.like, len(x), places, self.shape, self.ending)

    def allocate_output(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return contiguous rows, and a tensor for their outputs."""
        x = x.contiguous()
        return x, x.new_empty(x.shape[0], self.shape[2])


def prepare(weight: Tensor, bias: Tensor | None, end: Epilogue) -> PackedLinear | None:
    """Prepare the layer of `weight [O, I]`; None if the kernel does not support it.

    The weight itself is not kept. A row's result is bit-identical whatever other rows run in the
    same batch.
    """
    outputs, inputs = weight.shape
    dtype, size = weight.dtype, weight.itemsize
    units = inputs * size // WORD_BYTES
    if not supports(dtype) or not units or units * WORD_BYTES != inputs * size:
        return None
    if isinstance(end, str) and end not in (*ACTIVATIONS, "gelu_sigmoid"):
        return None
    halves = 2 if isinstance(end, Gate) else 1
    return PackedLinear(
        panels=pack_panels(weight, halves),
        biases=pack_outputs(bias, outputs, halves),
        shape=(size, units, outputs // halves, WIDTH // halves, WIDTH * WORD_BYTES),
        like=np.uint16(0) if dtype == torch.bfloat16 else np.float32(0),
        ending=epilogue_arguments(end),
        threads=pool_size(),
    )


def epilogue_arguments(end: Epilogue) -> tuple[int, np.float32, np.float32, np.float32]:
    """Return the epilogue as the kernel's arguments."""
    activation, gate = NO_ACTIVATION, Gate()
    if isinstance(end, Gate):
        activation, gate = ACTIVATIONS[end.activation], end
    elif end == "gelu_sigmoid":
        activation, gate = ACTIVATIONS["silu"] + ACTIVATION_ONLY, Gate(alpha=SIGMOID_SLOPE)
    elif end is not None:
        activation = ACTIVATIONS[end] + ACTIVATION_ONLY
    limit = np.inf if gate.limit is None else gate.limit
    return activation, np.float32(gate.alpha), np.float32(limit), np.float32(gate.beta)


def pack_panels(weight: Tensor, halves: int) -> Tensor:
    """Pack a weight's words `[panels, units, WIDTH]`: a panel has as many outputs of each half.

    The last panel is padded with zeros.
    """
    words = weight.contiguous().view(torch.int32)
    count, width = WIDTH // halves, words.shape[0] // halves
    packed = _weights.allocate((-(-width // count), words.shape[1], WIDTH), torch.int32)
    _pack(shared_pool(), words.numpy(), halves, packed.numpy())
    return packed


def pack_outputs(
    numbers: Tensor | None, outputs: int, halves: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return one number per output in the order of panels, `[panels, WIDTH]`, or zeros."""
    count, width = WIDTH // halves, outputs // halves
    panels = -(-width // count)
    padded = torch.zeros(halves, panels * count, dtype=dtype)
    if numbers is not None:
        padded[:, :width] = numbers.view(halves, width)
    return padded.view(halves, panels, count).transpose(0, 1).contiguous()


@compiled
def _pack(words: Any, weight: Any, halves: Any, packed: Any) -> None:
    parallel_for(words, packed.shape[0], _pack_panel, (weight, halves, packed))


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
def _unpack_rows(words: Any, panels: Any, rows: Any, out: Any) -> None:
    parallel_for(words, len(rows), _unpack_row, (panels, rows, out))


@compiled
def _unpack_row(index: Any, panels: Any, rows: Any, out: Any) -> None:
    panel, lane = divmod(rows[index], WIDTH)
    for unit in range(out.shape[1]):
        out[index, unit] = panels[panel, unit, lane]


@compiled
def _multiply(
    words: Any, threads: Any, like: Any, rows: Any, places: Any, shape: Any, end: Any
) -> None:
    _, units, width, count, _ = shape
    row_bytes, panel_bytes = units * WORD_BYTES, units * WIDTH * WORD_BYTES
    panels = (width + count - 1) // count
    most_rows = max(ROWS, BLOCK_BYTES // row_bytes // ROWS * ROWS)
    blocks = (rows + most_rows - 1) // most_rows
    most_panels = panels * blocks // (threads * ITEMS_A_THREAD)
    at_once = max(1, min(ITEM_BYTES // panel_bytes, most_panels))
    groups = (panels + at_once - 1) // at_once
    cut = (rows, blocks, groups, at_once)
    parallel_for(words, blocks * groups, _multiply_item, (like, cut, places, shape, end))


@compiled
def _multiply_item(item: Any, like: Any, cut: Any, places: Any, shape: Any, end: Any) -> None:
    rows, blocks, groups, at_once = cut
    x, packed, bias, out, scales = places
    size, units, width, count, bias_bytes = shape
    row_bytes, panel_bytes = units * WORD_BYTES, units * WIDTH * WORD_BYTES
    block, first = item // groups, item % groups * at_once
    start, stop = rows * block // blocks, rows * (block + 1) // blocks
    tiles = (stop - start + ROWS - 1) // ROWS
    # Each tile prefetches its part of the next panel; a single one its own data. Prefetching memory
    # that was never written is slow, so the last panel prefetches itself.
    step, panels = WIDTH * WORD_BYTES // tiles, (width + count - 1) // count
    for panel in range(first, min(first + at_once, panels)):
        beyond = AHEAD_BYTES if tiles == 1 else 0 if panel + 1 == panels else panel_bytes
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
                scales + row * WORD_BYTES,
                place,
                place + beyond + tile * step * units,
                step,
                *NO_MORE,
                bias + panel * bias_bytes,
                out + (row * width + column) * size,
                width * size,
                min(count, width - column),
                *end,
            )

"""Tile buffers: a step's attention tiles on the device, copied once, static for CUDA graphs.

All numbers are int32 in one tensor: a header for each tile spec, then the tiles of each.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ..shared_prefixes import find_shared_prefixes
from ..step import Step, host_buffer
from .tiles import (
    ENTRY_FIELDS,
    JOIN_FIELDS,
    TILE_FIELDS,
    TileCounts,
    Tiles,
    TileSpec,
    plan_tiles,
)

# Fields of a header: the counts of wide tiles, narrow ones and joins, and the offsets of these and
# of the entries.
NUM_WIDE, NUM_NARROW, NUM_JOINS, WIDE, NARROW, JOINS, ENTRIES = range(7)
HEADER = 8


class TileBuffers:
    """Tiles of a step for each tile spec, on the device."""

    def __init__(self, specs: Sequence[TileSpec], page_size: int, device: torch.device) -> None:
        self._headers = {spec: number * HEADER for number, spec in enumerate(dict.fromkeys(specs))}
        self._page_size = page_size
        self._device = device
        self.counts: dict[TileSpec, TileCounts] = {}  # of the step's tiles
        self._static = torch.zeros(0, dtype=torch.int32, device=device)
        self.numbers = self._static

    def header(self, spec: TileSpec) -> int:
        """Return the offset of a spec's header."""
        return self._headers[spec]

    def fill(self, step: Step) -> None:
        """Plan the tiles of a step and copy them to the device, asynchronously.

        The static buffer is used if they fit, as those of the steps that it was allocated for do.
        """
        host = step.host
        shared = find_shared_prefixes(host, self._page_size)
        tiles = {
            spec: plan_tiles(host, step.num_tokens, spec, self._page_size, shared)
            for spec in self._headers
        }
        self.counts = {spec: of_spec.counts for spec, of_spec in tiles.items()}
        lists = _pack(tiles)
        numbers = host_buffer(sum(map(len, lists)), self._device)
        np.concatenate(lists, out=numbers.numpy())
        if len(numbers) <= len(self._static):
            self._static[: len(numbers)].copy_(numbers, non_blocking=True)
            self.numbers = self._static
        else:
            self.numbers = numbers.to(self._device, non_blocking=True)

    def allocate_static(self, num_tokens: int, num_decodes: int) -> None:
        """Keep the tiles of steps up to this size at one address, for CUDA graphs."""
        total = len(self._headers) * HEADER
        for spec in self._headers:
            limits = TileCounts.upper_bound(spec, num_tokens, num_decodes)
            total += (limits.wide + limits.narrow) * TILE_FIELDS + limits.joins * JOIN_FIELDS
            total += (num_tokens + limits.parts) * ENTRY_FIELDS
        self._static = torch.zeros(total, dtype=torch.int32, device=self._device)


def _pack(tiles: dict[TileSpec, Tiles]) -> list[NDArray[np.int32]]:
    """Return all numbers, the headers first."""
    headers = np.zeros((len(tiles), HEADER), np.int32)
    lists, end = [headers.ravel()], headers.size

    def put(numbers: NDArray[np.int32]) -> int:
        nonlocal end
        begin, end = end, end + numbers.size
        lists.append(numbers.ravel())
        return begin

    for header, of_spec in zip(headers, tiles.values(), strict=True):
        header[:WIDE] = of_spec.counts[:WIDE]
        header[WIDE], header[NARROW] = put(of_spec.wide), put(of_spec.narrow)
        header[JOINS], header[ENTRIES] = put(of_spec.joins), put(of_spec.entries)
    return lists

"""A step's tiles on the device: one copy a step, to where captured steps look for them.

All numbers are int32 in one tensor: a header for each kind of layers, then the tiles of each.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engine.kernels.step import Step, host_buffer
from engine.kernels.triton.prefixes import find_shared
from engine.kernels.triton.tiles import (
    ENTRY_FIELDS,
    JOIN_FIELDS,
    TILE_FIELDS,
    Kind,
    Limits,
    Tiles,
    lay_out,
)

# How many wide tiles, narrow ones and joins there are, and where in all numbers these begin, and
# the entries.
NUM_WIDE, NUM_NARROW, NUM_JOINS, WIDE, NARROW, JOINS, ENTRIES = range(7)
HEADER = 8


class Lists:
    """The tiles of a step for each kind of layers, on the device."""

    def __init__(self, kinds: Sequence[Kind], page_size: int, device: torch.device) -> None:
        self._headers = {kind: number * HEADER for number, kind in enumerate(dict.fromkeys(kinds))}
        self._page_size = page_size
        self._device = device
        self._counts: dict[Kind, Limits] = {}
        # Of steps by how many tokens they have: where those lie that may be captured.
        self._places: dict[int, torch.Tensor] = {}
        self._num_tokens = 0
        self.numbers = torch.zeros(0, dtype=torch.int32, device=device)

    def header(self, kind: Kind) -> int:
        """Return where among the numbers the header of a kind is."""
        return self._headers[kind]

    def counts(self, kind: Kind) -> Limits:
        """Return how much there is of each in the step's tiles of a kind."""
        return self._counts[kind]

    def fill(self, step: Step) -> None:
        """Make the tiles of a step and send them on their way to the device."""
        host, self._num_tokens = step.host, step.num_tokens
        shared = find_shared(host, self._page_size)
        tiles = {
            kind: lay_out(host, step.num_tokens, kind, self._page_size, shared)
            for kind in self._headers
        }
        self._counts = {kind: of_kind.counts for kind, of_kind in tiles.items()}
        lists = _packed(tiles)
        numbers = host_buffer(sum(map(len, lists)), self._device)
        np.concatenate(lists, out=numbers.numpy())
        place = self._places.get(step.num_tokens)
        if place is None:
            self.numbers = numbers.to(self._device, non_blocking=True)
        else:
            place[: len(numbers)].copy_(numbers, non_blocking=True)
            self.numbers = place

    def stay(self, num_tokens: int) -> None:
        """Let the tiles of steps of so many tokens lie in one place from now on.

        Those that lie somewhere move there.
        """
        if num_tokens in self._places:
            return
        place = torch.zeros(self._most(num_tokens), dtype=torch.int32, device=self._device)
        self._places[num_tokens] = place
        if self._num_tokens == num_tokens:
            place[: len(self.numbers)] = self.numbers
            self.numbers = place

    def _most(self, num_tokens: int) -> int:
        """Return how many numbers the tiles of a step of so many tokens come to at most."""
        total = len(self._headers) * HEADER
        for kind in self._headers:
            limits = Limits.of(kind, num_tokens)
            total += (limits.wide + limits.narrow) * TILE_FIELDS + limits.joins * JOIN_FIELDS
            total += (num_tokens + limits.parts) * ENTRY_FIELDS
        return total


def _packed(tiles: dict[Kind, Tiles]) -> list[NDArray[np.int32]]:
    """Return all numbers, one list after another, the headers first."""
    headers = np.zeros((len(tiles), HEADER), np.int32)
    lists, end = [headers.ravel()], headers.size

    def put(numbers: NDArray[np.int32]) -> int:
        nonlocal end
        begin, end = end, end + numbers.size
        lists.append(numbers.ravel())
        return begin

    for header, of_kind in zip(headers, tiles.values(), strict=True):
        header[:WIDE] = of_kind.counts[:WIDE]
        header[WIDE], header[NARROW] = put(of_kind.wide), put(of_kind.narrow)
        header[JOINS], header[ENTRIES] = put(of_kind.joins), put(of_kind.entries)
    return lists

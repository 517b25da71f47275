"""Shared prefixes of a step's decodes (cascade attention): pages that are read once for many.

A page's number identifies it and all pages before it: if two sequences have the same page at the
same position, the prefix cache shared it, and so all pages before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .step import Step

Ints = NDArray[np.int64]
# The fewest shared pages that justify separate tiles: combining a token's part costs about as much
# as reading half a page. Also the number of times that groups are divided.
FEWEST_PAGES = 4
MOST_LEVELS = 6


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Groups `starts:stops` of `order`ed decodes, and the pages `firsts:lasts` that each shares.

    The pages are at the same positions of each member's page list. Decode `d` shares nothing from
    page `alone_from[d]` on.
    """

    order: Ints
    starts: Ints
    stops: Ints
    firsts: Ints
    lasts: Ints
    alone_from: Ints


def no_shared_prefixes(num_decodes: int) -> SharedPrefixes:
    """Return the value for decodes that share nothing."""
    none = np.zeros(0, np.int64)
    return SharedPrefixes(none, none, none, none, none, np.zeros(num_decodes, np.int64))


def find_shared_prefixes(step: Step, page_size: int) -> SharedPrefixes:
    """Find the shared prefixes of a step's decodes; the step is on the host.

    Level by level, as in a radix tree: sequences that share the next page form a group, which is
    divided again where its members diverge.
    """
    count = step.num_decodes
    table = _Table(
        step.pages.numpy(),
        step.page_starts.numpy()[:count].astype(np.int64),
        # Full pages only: the last one has the decode's own token and is never shared.
        step.context_lengths.numpy()[:count].astype(np.int64) // page_size,
    )
    alone_from = np.zeros(count, np.int64)
    members = np.flatnonzero(table.full >= FEWEST_PAGES)
    groups, depths = np.zeros((2, len(members)), np.int64)
    found: list[SharedPrefixes] = []
    for _ in range(MOST_LEVELS):
        names = table.name(members, depths)
        order = np.lexsort((names, groups))
        members, groups, depths, names = members[order], groups[order], depths[order], names[order]
        _, sizes = _runs(groups, names)
        together = np.repeat(sizes > 1, sizes)
        if not together.any():
            break
        members, depths = members[together], depths[together]
        starts, sizes = _runs(groups[together], names[together])
        lasts = table.shared_until(members, starts, sizes, depths[starts] + 1)
        firsts = alone_from[members[starts]]
        is_worth = lasts - firsts >= FEWEST_PAGES
        worth = starts[is_worth], (starts + sizes)[is_worth]
        found.append(SharedPrefixes(members, *worth, firsts[is_worth], lasts[is_worth], alone_from))
        depths, groups = np.repeat(lasts, sizes), np.repeat(np.arange(len(sizes)), sizes)
        of_worth = np.repeat(is_worth, sizes)
        alone_from[members[of_worth]] = depths[of_worth]
        goes_on = table.full[members] > depths
        members, groups, depths = members[goes_on], groups[goes_on], depths[goes_on]
    return _concatenate(found) if found else no_shared_prefixes(count)


@dataclass(frozen=True, slots=True)
class _Table:
    """The pages of decodes: decode `d` has `full[d]` full ones, from `begins[d]` on."""

    pages: NDArray[np.int32]
    begins: Ints
    full: Ints

    def name(self, members: Ints, places: Ints) -> NDArray[np.int32]:
        """Return, for each of some decodes, the page at its own position."""
        return np.take(self.pages, self.begins[members] + places)

    def shared_until(self, members: Ints, starts: Ints, sizes: Ints, known: Ints) -> Ints:
        """Bisect for the number of pages that each group of members shares, `known` at least."""
        low, high = known, np.minimum.reduceat(self.full[members], starts)
        while (low < high).any():
            middle = (low + high + 1) // 2
            names = self.name(members, np.repeat(middle, sizes) - 1)
            is_same = np.logical_and.reduceat(names == np.repeat(names[starts], sizes), starts)
            low, high = np.where(is_same, middle, low), np.where(is_same, high, middle - 1)
        return low


def _runs(groups: Ints, names: NDArray[np.int32]) -> tuple[Ints, Ints]:
    """Return where runs of one group and name start, and how long they are."""
    starts = np.flatnonzero((np.diff(groups, prepend=-1) != 0) | (np.diff(names, prepend=-1) != 0))
    return starts, np.diff(starts, append=len(groups))


def _concatenate(found: list[SharedPrefixes]) -> SharedPrefixes:
    """Return the runs of all levels as one."""
    lengths = [len(level.order) for level in found]
    offsets = np.cumsum([0, *lengths[:-1]])
    starts = [level.starts + offset for level, offset in zip(found, offsets, strict=True)]
    stops = [level.stops + offset for level, offset in zip(found, offsets, strict=True)]
    return SharedPrefixes(
        np.concatenate([level.order for level in found]),
        np.concatenate(starts),
        np.concatenate(stops),
        np.concatenate([level.firsts for level in found]),
        np.concatenate([level.lasts for level in found]),
        found[0].alone_from,
    )

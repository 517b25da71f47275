"""Which decodes of a step begin with the same pages, so that these are read once for all of them.

A page's number stands for it and all before it: where two sequences have the same one at the same
place, the scheduler shared it, and so all before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.kernels.step import Step

Ints = NDArray[np.int64]
# What is worth tiles of its own: so many pages that are shared; a token's part that is joined costs
# about as much as half a page is to read. And how often groups are divided.
FEWEST_PAGES = 4
MOST_LEVELS = 6


@dataclass(frozen=True, slots=True)
class Shared:
    """Runs `starts:stops` of decodes in an order, and the pages `firsts:lasts` that each shares.

    They are in the same places of every one's list. Decode `d` is alone from page `alone_from[d]`.
    """

    order: Ints
    starts: Ints
    stops: Ints
    firsts: Ints
    lasts: Ints
    alone_from: Ints


def shared_by_none(num_decodes: int) -> Shared:
    """Return that nothing is shared."""
    none = np.zeros(0, np.int64)
    return Shared(none, none, none, none, none, np.zeros(num_decodes, np.int64))


def find_shared(step: Step, page_size: int) -> Shared:
    """Return what the decodes of a step share, which lies on the host.

    Level by level: those who share the next page stay together until one of them goes its own way,
    and are divided there.
    """
    count = step.num_decodes
    table = _Table(
        step.pages.numpy(),
        step.page_starts.numpy()[:count].astype(np.int64),
        # The last page is never among them: a decode's own token lies there.
        step.context_lengths.numpy()[:count].astype(np.int64) // page_size,
    )
    alone_from = np.zeros(count, np.int64)
    members = np.flatnonzero(table.full >= FEWEST_PAGES)
    groups, depths = np.zeros((2, len(members)), np.int64)
    found: list[Shared] = []
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
        found.append(Shared(members, *worth, firsts[is_worth], lasts[is_worth], alone_from))
        depths, groups = np.repeat(lasts, sizes), np.repeat(np.arange(len(sizes)), sizes)
        of_worth = np.repeat(is_worth, sizes)
        alone_from[members[of_worth]] = depths[of_worth]
        goes_on = table.full[members] > depths
        members, groups, depths = members[goes_on], groups[goes_on], depths[goes_on]
    return _joined(found) if found else shared_by_none(count)


@dataclass(frozen=True, slots=True)
class _Table:
    """The pages of decodes: decode `d` has `full[d]` full ones, from `begins[d]` on."""

    pages: NDArray[np.int32]
    begins: Ints
    full: Ints

    def name(self, members: Ints, places: Ints) -> NDArray[np.int32]:
        """Return the page that each of some decodes has in a place of its own."""
        return np.take(self.pages, self.begins[members] + places)

    def shared_until(self, members: Ints, starts: Ints, sizes: Ints, known: Ints) -> Ints:
        """Return how many pages each run of members shares, of which some are known, by halves."""
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


def _joined(found: list[Shared]) -> Shared:
    """Return the runs of all levels as one."""
    lengths = [len(level.order) for level in found]
    offsets = np.cumsum([0, *lengths[:-1]])
    starts = [level.starts + offset for level, offset in zip(found, offsets, strict=True)]
    stops = [level.stops + offset for level, offset in zip(found, offsets, strict=True)]
    return Shared(
        np.concatenate([level.order for level in found]),
        np.concatenate(starts),
        np.concatenate(stops),
        np.concatenate([level.firsts for level in found]),
        np.concatenate([level.lasts for level in found]),
        found[0].alone_from,
    )

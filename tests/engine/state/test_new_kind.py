"""The smallest custom kind of state: one page per sequence, which no other sequence can reuse."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tests.engine.scheduling.yard import Yard, long
from tidemill.engine.scheduling.scheduler import Scheduler
from tidemill.engine.state.pages import Digest, PagePool

Slots = NDArray[np.int64]


class Notebooks:
    """A page for each running sequence, however long it is; see `StateGroup`."""

    keeps_places = True

    def __init__(self, num_pages: int, num_slots: int) -> None:
        self.pool = PagePool(num_pages)
        self.pages = np.full(num_slots, -1)

    def resumable(self, digests: Sequence[Digest], most: int) -> int:
        """Return 0: each sequence writes its own from the first token on."""
        del digests, most
        return 0

    def room(
        self, digests: Sequence[Digest], num_cached: int, num_tokens: int, num_others: int
    ) -> int:
        """Return 1, the page that a sequence takes."""
        del digests, num_cached, num_tokens, num_others
        return 1

    def most_pages(self, num_tokens: int) -> int:
        """Return 1, however many tokens it has."""
        del num_tokens
        return 1

    def share(self, slot: int, digests: Sequence[Digest], num_cached: int) -> None:
        """Do nothing: nothing is cached."""

    def enter(self, slot: int, num_cached: int, num_tokens: int) -> None:
        """Allocate the page."""
        del num_cached, num_tokens
        (self.pages[slot],) = self.pool.allocate(1)

    def attend(self, slot: int, start: int, stop: int, num_settled: int) -> int:
        """Return `stop`: the page has room for any token."""
        del slot, start, num_settled
        return stop

    def needs(self, slots: Slots, num_tokens: Slots) -> Slots:
        """Return no slot."""
        del num_tokens
        return slots[:0]

    def extend(self, slots: Slots, num_settled: Slots) -> None:
        """Do nothing."""

    def settle(self, slots: Slots, stops: Slots) -> None:
        """Do nothing."""

    def undo(self, slot: int, start: int) -> int:
        """Return `start`: what a step wrote is written again."""
        del slot
        return start

    def is_shared(self, slot: int) -> bool:
        """Return False."""
        del slot
        return False

    def register(self, slot: int, digests: Sequence[Digest], first: int, last: int) -> None:
        """Do nothing."""

    def invalidate(self, slot: int, digests: Sequence[Digest], first: int) -> None:
        """Do nothing."""

    def release(self, slot: int) -> None:
        """Release the page."""
        self.pool.release([int(self.pages[slot])])

    def expect(self, slot: int, digests: Sequence[Digest], num_pages: int) -> None:
        """Do nothing."""

    def is_expected(self, digest: Digest) -> bool:
        """Return False."""
        del digest
        return False


def test_a_custom_kind_limits_the_running_sequences() -> None:
    """Four sequences share two of its pages: two run at a time, and all of them finish."""
    yard = Yard()
    notebooks = Notebooks(2, yard.max_num_seqs)
    yard.scheduler = Scheduler(
        yard.table, yard.pool, yard.admission, yard.budget, groups=[notebooks]
    )
    sequences = [yard.add(long(5, seed), 3) for seed in range(4)]
    most = 0
    while yard.is_busy:
        yard.step()
        most = max(most, int(yard.table.is_running.sum()))
    assert most == 2
    assert {*yard.finished} == {*sequences}
    assert notebooks.pool.num_free == 2

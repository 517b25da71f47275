"""Rows of recurrent state: one per sequence, plus snapshots of shared prefixes.

A row contains the state of recurrent layers after all tokens before a position. The sequence that
owns a row writes it in every step, so others can resume from it only once it is left: if other
sequences share a prefix, the first one to compute it moves to a new row after it, and the old row
becomes a snapshot, named after the page that ends there. Snapshots are evicted like pages.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .groups import Slots
from .pages import Digest, PagePool

NO_ROW = -1
# The minimum number of tokens that a snapshot must save: it splits a step, and costs a read.
FEWEST_TOKENS = 64


class Rows:
    """Rows of the sequences in a table's slots; see `StateGroup`.

    A sequence that `entered` at a position starts there from row `sources`, or from zeros at
    position 0, and continues in its own row, in `rows`. Its state after token `borders` is saved,
    unless that is 0.
    """

    keeps_places = False

    def __init__(self, pool: PagePool, page_size: int, num_slots: int) -> None:
        self.pool = pool
        self.rows: NDArray[np.int32] = np.full(num_slots, NO_ROW, np.int32)
        self.sources: NDArray[np.int32] = np.full(num_slots, NO_ROW, np.int32)
        self.entered = np.zeros(num_slots, np.int64)
        self.borders = np.zeros(num_slots, np.int64)
        self._size = page_size
        self._names: dict[int, Digest] = {}  # by slot, of the state to save
        self._expected: set[Digest] = set()  # those of them that no step has left yet
        self._parents: dict[int, Digest] = {}  # by slot, the name of the snapshot before

    def resumable(self, digests: Sequence[Digest], most: int) -> int:
        """Return the most pages after which there is a snapshot."""
        for page in range(most, 0, -1):
            if self._snapshot(digests, page):
                return page
        return 0

    def room(
        self, digests: Sequence[Digest], num_cached: int, num_tokens: int, num_others: int
    ) -> int:
        """Return the number of free rows for entering: one, plus a snapshot without holders."""
        del num_tokens, num_others
        return 1 + self.pool.num_unheld(self._snapshot(digests, num_cached))

    def most_pages(self, num_tokens: int) -> int:
        """Return 1: a sequence that runs alone needs no snapshot."""
        del num_tokens
        return 1

    def share(self, slot: int, digests: Sequence[Digest], num_cached: int) -> None:
        """Hold the snapshot, if there is one, until it has been read."""
        snapshot = self._snapshot(digests, num_cached)
        self.pool.share(snapshot)
        if snapshot:
            self.sources[slot] = snapshot[0]
            self._parents[slot] = digests[num_cached - 1]
        self.entered[slot] = num_cached * self._size

    def enter(self, slot: int, num_cached: int, num_tokens: int) -> None:
        """Allocate a row."""
        del num_cached, num_tokens
        (self.rows[slot],) = self.pool.allocate(1)

    def attend(self, slot: int, start: int, stop: int, num_settled: int) -> int:
        """Stop where the state must be saved, and continue from there in another row."""
        del num_settled
        if self._must_move(slot, start) and not self._try_move(slot):
            return start
        if start != self.entered[slot]:
            self._drop_source(slot)
        border = int(self.borders[slot])
        return border if start < border < stop else stop

    def needs(self, slots: Slots, num_tokens: Slots) -> Slots:
        """Return the slots that leave their row after the second-to-last token."""
        starts = num_tokens - 1
        entered = self.entered[slots]
        for slot in slots[(self.sources[slots] != NO_ROW) & (starts != entered)].tolist():
            self._drop_source(slot)  # a step has read it
        leaving = (self.borders[slots] == starts) & (entered != starts)
        needy: Slots = slots[leaving]
        for slot in needy[self.pool.num_free :].tolist():
            leaving[slots == slot] = not self._try_keep_row(slot)
        still: Slots = slots[leaving]
        return still

    def extend(self, slots: Slots, num_settled: Slots) -> None:
        """Move slots to other rows."""
        del num_settled
        for slot in slots.tolist():
            self._move(slot)

    def undo(self, slot: int, start: int) -> int:
        """Return the position whose state still exists: where the sequence entered, or 0."""
        if start != self.entered[slot]:
            self._drop_source(slot)
        return int(self.entered[slot])

    def is_shared(self, slot: int) -> bool:
        """Return False: rows that others read are never written."""
        del slot
        return False

    def register(self, slot: int, digests: Sequence[Digest], first: int, last: int) -> None:
        """Do nothing: a state is named once it exists."""

    def settle(self, slots: Slots, stops: Slots) -> None:
        """Name the states after their borders: the next step may start from them."""
        for slot in slots[self.borders[slots] == stops].tolist():
            name = self._names[slot]
            self._expected.discard(name)
            border = int(self.borders[slot])
            has_moved = int(self.entered[slot]) == border
            row = self.sources[slot] if has_moved else self.rows[slot]
            self.pool.register([int(row)], [name], self._parents.get(slot))
            self._parents[slot] = name
            if has_moved:
                self._forget_border(slot)

    def invalidate(self, slot: int, digests: Sequence[Digest], first: int) -> None:
        """Forget snapshots after page `first` and later ones, and all that started from them."""
        del slot
        snapshots = [self.pool.lookup([digest]) for digest in digests[first:]]
        self.pool.invalidate([row for rows in snapshots for row in rows])

    def release(self, slot: int) -> None:
        """Release the row, and an unread snapshot."""
        self._drop_source(slot)
        self._forget_border(slot)
        self._parents.pop(slot, None)
        self.pool.release([int(self.rows[slot])])
        self.rows[slot] = NO_ROW

    def expect(self, slot: int, digests: Sequence[Digest], num_pages: int) -> None:
        """Save the state after `num_pages` pages, if that saves enough tokens."""
        border, name = num_pages * self._size, digests[num_pages - 1]
        saves = border - int(self.entered[slot]) >= FEWEST_TOKENS
        if saves and border > self.borders[slot] and name not in self._expected:
            self._forget_border(slot)
            self.borders[slot] = border
            self._names[slot] = name
            self._expected.add(name)

    def is_expected(self, digest: Digest) -> bool:
        """Return whether a running sequence will leave its state after such a page."""
        return digest in self._expected

    def sources_of(self, slots: Slots, starts: Slots) -> NDArray[np.int32]:
        """Return the rows that spans start from; -1 means zeros."""
        has_entered = starts == self.entered[slots]
        sources: NDArray[np.int32] = np.where(has_entered, self.sources[slots], self.rows[slots])
        return sources

    def _snapshot(self, digests: Sequence[Digest], num_cached: int) -> list[int]:
        return self.pool.lookup(digests[num_cached - 1 : num_cached]) if num_cached else []

    def _must_move(self, slot: int, start: int) -> bool:
        return 0 < int(self.borders[slot]) == start != int(self.entered[slot])

    def _try_move(self, slot: int) -> bool:
        """Leave the row to others; if no row is free, keep it unless others hold it."""
        if self.pool.can_allocate(1):
            self._move(slot)
            return True
        return self._try_keep_row(slot)

    def _try_keep_row(self, slot: int) -> bool:
        """Keep the row instead of leaving a snapshot, unless another one must still read it."""
        row = int(self.rows[slot])
        if self.pool.num_holders(row) > 1:
            return False
        self.pool.invalidate([row])
        self._forget_border(slot)
        return True

    def _move(self, slot: int) -> None:
        self._drop_source(slot)
        self.sources[slot] = self.rows[slot]
        self.entered[slot] = self.borders[slot]
        (self.rows[slot],) = self.pool.allocate(1)
        if self._names[slot] not in self._expected:
            self._forget_border(slot)

    def _drop_source(self, slot: int) -> None:
        """Release the row that the sequence started from."""
        if self.sources[slot] != NO_ROW:
            self.pool.release([int(self.sources[slot])])
            self.sources[slot] = NO_ROW
        if self.entered[slot] == self.borders[slot]:
            self._forget_border(slot)
        self.entered[slot] = 0

    def _forget_border(self, slot: int) -> None:
        self.borders[slot] = 0
        if (name := self._names.pop(slot, None)) is not None:
            self._expected.discard(name)

"""State groups: layers with one kind of state, with the methods room, enter, attend and release.

A group knows the state of each slot of the sequence table, and the page borders from which a
sequence could resume. Full pages hold every token; windowed pages are released once no token sees
them any more; for rows see `rows`. Groups of pages may share a pool, whose pages serve all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from .pages import Beginning, Digest, PagePool

Slots = NDArray[np.int64]
NO_PAGE = -1


class StateGroup(Protocol):
    """State of one group of layers for the sequences in all slots.

    Digests belong to a sequence's full pages, from its first; `num_cached` counts the pages after
    which it resumes. `pool` provides its pages or rows.
    """

    pool: PagePool
    keeps_places: bool  # `attend` always has a place for a token of a prompt that has entered

    def resumable(self, digests: Sequence[Digest], most: int) -> int:
        """Return the most pages, up to `most`, after which a sequence could resume."""

    def room(
        self, digests: Sequence[Digest], num_cached: int, num_tokens: int, num_others: int
    ) -> int:
        """Return the number of free pages that `enter` needs next to `num_others` sequences."""

    def most_pages(self, num_tokens: int) -> int:
        """Return the most pages that a sequence of `num_tokens` holds at a time."""

    def share(self, slot: int, digests: Sequence[Digest], num_cached: int) -> None:
        """Hold the cached state for a slot, before any group allocates; `room` was checked."""

    def enter(self, slot: int, num_cached: int, num_tokens: int) -> None:
        """Give a slot that shares the cached state room for its next tokens."""

    def attend(self, slot: int, start: int, stop: int, num_settled: int) -> int:
        """Give tokens `start:stop` their places; return the stop of those that have one.

        No step in flight reads anything before the tokens that token `num_settled` sees.
        """

    def needs(self, slots: Slots, num_tokens: Slots) -> Slots:
        """Return the slots whose last of `num_tokens` tokens has no place yet."""

    def extend(self, slots: Slots, num_settled: Slots) -> None:
        """Give a place to slots that `needs` returned; the pool has enough free pages."""

    def undo(self, slot: int, start: int) -> int:
        """Go back to `start` after a step is lost; return the position to resume from."""

    def is_shared(self, slot: int) -> bool:
        """Return whether others hold state that a slot rewrites when it starts over."""

    def register(self, slot: int, digests: Sequence[Digest], first: int, last: int) -> None:
        """Name the pages `first:last`, which are full now or at the end of the step."""

    def settle(self, slots: Slots, stops: Slots) -> None:
        """Record that a collected step has computed slots up to `stops`."""

    def invalidate(self, slot: int, digests: Sequence[Digest], first: int) -> None:
        """Forget the names of pages from `first` on, and of all pages computed from them."""

    def release(self, slot: int) -> None:
        """Release the state of a slot."""

    def expect(self, slot: int, digests: Sequence[Digest], num_pages: int) -> None:
        """Record that other sequences share the first `num_pages` pages that this one computes."""

    def is_expected(self, digest: Digest) -> bool:
        """Return whether a running sequence will soon leave the state after such a page."""


def most_pages(num_tokens: int, page_size: int, most_visible: int, step_tokens: int) -> int:
    """Return the most pages that a sequence holds at a time; `most_visible` 0 means all."""
    if most_visible:
        # The first and the last visible page of a step may contain only one of its tokens.
        num_tokens = min(num_tokens, most_visible + step_tokens + page_size)
    return -(-num_tokens // page_size)


class Visibility(NamedTuple):
    """Reach of a token: `first` maps positions to the first positions that their tokens see.

    `most` is the maximum number of visible tokens, including the token itself.
    """

    first: Callable[[Slots], Slots]
    most: int


class Pages:
    """Page group: one page list per slot; pages that no token sees any more are released.

    With a `visibility` tokens see only the last ones, else all. A prompt uses room for
    `step_tokens` more than a token sees. `tag` distinguishes its names from those of other groups
    in the pool. The arrays `pages [slots, most]`, `num_pages [slots]` and `sources [slots]` may
    belong to the caller. A slot's first step copies the first tokens of its page from its source,
    if it has one.
    """

    def __init__(
        self,
        pool: PagePool,
        page_size: int,
        pages: NDArray[np.int32],
        num_pages: NDArray[np.int32],
        sources: NDArray[np.int32],
        *,
        visibility: Visibility | None = None,
        step_tokens: int = 0,
        tag: bytes = b"",
    ) -> None:
        self.pool = pool
        self.pages = pages
        self.num_pages = num_pages
        self.sources = sources
        self.keeps_places = visibility is None
        self.first_live = np.zeros(len(pages), np.int64)  # pages before it are released
        self._size = page_size
        self.visibility = visibility
        self._step_tokens = step_tokens
        self._tag = tag
        sources.fill(NO_PAGE)

    def resumable(self, digests: Sequence[Digest], most: int) -> int:
        """Return the most pages after which everything that the next token sees is cached."""
        if self.visibility is None:
            return len(self.pool.lookup(digests[:most]))
        page = most
        while page:
            seen = range(page - 1, self._first_page(page * self._size) - 1, -1)
            missing = next((i for i in seen if not self._cached(digests[i : i + 1])), None)
            if missing is None:
                return page
            page = missing  # after any page in between, the next token also sees the missing one
        return 0

    def room(
        self, digests: Sequence[Digest], num_cached: int, num_tokens: int, num_others: int
    ) -> int:
        """Count new pages, shared pages without holders, and the pages that others will soon fill.

        Otherwise a new sequence would soon be preempted.
        """
        shared = self._cached(digests[self._first_page(num_cached * self._size) : num_cached])
        new = self._num_new(num_cached, num_tokens)
        return new + self.pool.num_unheld(shared) + self._pages_for(num_others)

    def most_pages(self, num_tokens: int) -> int:
        """Return the most pages that a sequence of `num_tokens` holds at a time, when alone."""
        most_visible = 0 if self.visibility is None else self.visibility.most
        return most_pages(num_tokens, self._size, most_visible, self._step_tokens)

    def share(self, slot: int, digests: Sequence[Digest], num_cached: int) -> None:
        """Hold the cached pages that are still visible."""
        first = self._first_page(num_cached * self._size)
        shared = self._cached(digests[first:num_cached])
        self.pool.share(shared)
        self.pages[slot, first:num_cached] = shared
        self.num_pages[slot] = num_cached
        self.first_live[slot] = first

    def enter(self, slot: int, num_cached: int, num_tokens: int) -> None:
        """Allocate the pages of the first chunk."""
        new = self.pool.allocate(self._num_new(num_cached, num_tokens))
        self.pages[slot, num_cached : num_cached + len(new)] = new
        self.num_pages[slot] += len(new)

    def attend(self, slot: int, start: int, stop: int, num_settled: int) -> int:
        """Allocate the pages up to `stop`, or as many as are free."""
        del start
        count = int(self.num_pages[slot])
        wanted = self._pages_for(stop) - count
        if wanted > 0:
            slots = np.array([slot], np.int64)
            self._release_unseen(slots, np.array([num_settled], np.int64))
            new = self.pool.allocate(min(wanted, self.pool.num_free))
            self.pages[slot, count : count + len(new)] = new
            self.num_pages[slot] += len(new)
        return min(stop, int(self.num_pages[slot]) * self._size)

    def needs(self, slots: Slots, num_tokens: Slots) -> Slots:
        """Return the slots whose last token begins a page."""
        return slots[num_tokens > self.num_pages[slots] * self._size]

    def extend(self, slots: Slots, num_settled: Slots) -> None:
        """Allocate each slot's next page, after releasing the pages that its token does not see."""
        self._release_unseen(slots, num_settled)
        self.pages[slots, self.num_pages[slots]] = self.pool.allocate(len(slots))
        self.num_pages[slots] += 1

    def undo(self, slot: int, start: int) -> int:
        """Return `start`: pages are rewritten with the same contents."""
        del slot
        return start

    def is_shared(self, slot: int) -> bool:
        """Return whether others hold one of the pages, or some are released already."""
        if self.visibility is not None:
            return True
        return any(
            self.pool.num_holders(page) > 1 for page in self.pages[slot, : self.num_pages[slot]]
        )

    def register(self, slot: int, digests: Sequence[Digest], first: int, last: int) -> None:
        """Name live pages; those of a prompt when the step is planned.

        Each layer stores before it attends, so that even a sequence that starts in the same step
        may read them.
        """
        first = max(first, int(self.first_live[slot]))
        if first >= last:
            return
        names = self._names(digests[first:last])
        parent = self._names(digests[first - 1 : first])[0] if first else None
        self.pool.register(self.pages[slot, first:last].tolist(), names, parent)

    def settle(self, slots: Slots, stops: Slots) -> None:
        """Do nothing: pages were named when the step was planned."""

    def invalidate(self, slot: int, digests: Sequence[Digest], first: int) -> None:
        """Forget the slot's pages from page `first` on, including those that others have read."""
        del digests
        first = max(first, int(self.first_live[slot]))
        self.pool.invalidate(self.pages[slot, first : self.num_pages[slot]].tolist())

    def beginning(self, before: Digest) -> Beginning | None:
        """Return a page of the group after the page named `before`, and its first tokens."""
        return self.pool.beginning(before + self._tag)

    def begin(self, slot: int, page: int, before: Digest, tokens: bytes) -> None:
        """Record the first tokens of a slot's page, for sequences that diverge within it."""
        if page >= self.first_live[slot]:
            self.pool.begin(int(self.pages[slot, page]), before + self._tag, tokens)

    def copy_from(self, slot: int, page: int) -> None:
        """Hold a page whose first tokens the slot's first step copies."""
        self.pool.share([page])
        self.sources[slot] = page

    def drop_source(self, slot: int) -> None:
        """Release the page that the slot has copied from."""
        if self.sources[slot] != NO_PAGE:
            self.pool.release([int(self.sources[slot])])
            self.sources[slot] = NO_PAGE

    def release(self, slot: int) -> None:
        """Release the live pages."""
        self.drop_source(slot)
        self.pool.release(self.pages[slot, self.first_live[slot] : self.num_pages[slot]].tolist())
        self.first_live[slot] = self.num_pages[slot] = 0

    def expect(self, slot: int, digests: Sequence[Digest], num_pages: int) -> None:
        """Do nothing: full pages are named when they are computed."""

    def is_expected(self, digest: Digest) -> bool:
        """Return False: pages can be read by the step that computes them."""
        del digest
        return False

    def _release_unseen(self, slots: Slots, num_settled: Slots) -> None:
        """Release the pages of slots that no token after the settled ones sees."""
        if self.visibility is None:
            return
        firsts = self.visibility.first(num_settled) // self._size
        firsts = np.minimum(firsts, self.num_pages[slots])
        for slot, begin, end in zip(
            slots.tolist(), self.first_live[slots].tolist(), firsts.tolist(), strict=True
        ):
            if begin < end:
                self.pool.release(self.pages[slot, begin:end].tolist())
        self.first_live[slots] = np.maximum(firsts, self.first_live[slots])

    def _first_page(self, place: int) -> int:
        """Return the first page that a token at a position sees."""
        if self.visibility is None:
            return 0
        return int(self.visibility.first(np.array([place], np.int64))[0]) // self._size

    def _num_new(self, num_cached: int, num_tokens: int) -> int:
        """Return the number of pages that a sequence allocates when it enters."""
        if self.visibility is not None:
            most = num_cached * self._size + self.visibility.most + self._step_tokens
            num_tokens = min(num_tokens, most)
        return self._pages_for(num_tokens) - num_cached

    def _cached(self, digests: Sequence[Digest]) -> list[int]:
        return self.pool.lookup(self._names(digests))

    def _names(self, digests: Sequence[Digest]) -> Sequence[Digest]:
        return [digest + self._tag for digest in digests] if self._tag else digests

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._size)

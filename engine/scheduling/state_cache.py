"""State cache: the state of running sequences, by group of layers, and the prefix cache over it.

A sequence resumes after the full pages whose state exists in all groups. This module does not know
the kinds of state: a group reports its free room, and the positions to resume from. If all groups
are pages, a sequence also copies the first tokens of the next page, instead of computing them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Several
from itertools import chain, takewhile
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..state.groups import NO_PAGE, Pages, StateGroup
from ..state.pages import Digest, PagePool, page_digests, root_digest
from .images import image_digests
from .sequence import Sequence, SequenceRequest
from .table import SequenceTable
from .token_logprobs import narrow_records, record_bytes

MAX_BYTES = 64 << 20
# Copying one token into a page may cost as much as computing it.
FEWEST_COPIED = 2


class _Page(NamedTuple):
    """Records of the tokens of a page, each with `num_top` alternatives."""

    num_top: int
    records: bytes


class LogprobCache:
    """Log-probabilities of the tokens of full pages; the least recently used are dropped first.

    A page's digest identifies its tokens and all before them, which the values depend on.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._pages: OrderedDict[Digest, _Page] = OrderedDict()

    def covers(self, digest: Digest, num_top: int) -> bool:
        """Return whether a page is cached with at least `num_top` alternatives."""
        page = self._pages.get(digest)
        return page is not None and page.num_top >= num_top

    def get(self, digest: Digest, num_top: int) -> bytes:
        """Return the records of a page that it `covers`."""
        self._pages.move_to_end(digest)
        page = self._pages[digest]
        return narrow_records(page.records, page.num_top, num_top)

    def put(self, digest: Digest, num_top: int, records: bytes) -> None:
        """Store the records of a page, unless they are cached already or are NaN."""
        if self.covers(digest, num_top):
            return
        # Records from NaN logits are not valid log-probabilities.
        words = np.frombuffer(records, np.float32).reshape(-1, record_bytes(num_top) // 4)
        if np.isnan(words[:, 1]).any():
            return
        before = self._pages.pop(digest, None)
        self._num_bytes += len(records) - (0 if before is None else len(before.records))
        self._pages[digest] = _Page(num_top, records)
        while self._num_bytes > self._max_bytes:
            _, dropped = self._pages.popitem(last=False)
            self._num_bytes -= len(dropped.records)


Slots = NDArray[np.int64]


class Placement(NamedTuple):
    """The position where a waiting sequence would resume, next to `num_others` other sequences.

    `num_cached` pages are cached in all groups, `most_cached` in at least one; `needed` is the
    number of pages that must be free, by pool. The first `num_copied` tokens of the next page are
    copied from `sources`, one page for each group.
    """

    sequence: Sequence
    num_cached: int
    most_cached: int
    needed: tuple[tuple[PagePool, int], ...]
    num_others: int
    num_copied: int = 0
    sources: tuple[int, ...] = ()

    @property
    def fits(self) -> bool:
        """Return whether enough pages are free."""
        return all(pool.can_allocate(count) for pool, count in self.needed)


class StateCache:
    """Groups of state of one table's sequences: looked up, entered, extended, named, released.

    A sequence copies at least `fewest_copied` tokens into a page, or none; 0 means that no
    sequence does.
    """

    def __init__(
        self, table: SequenceTable, groups: Several[StateGroup], fewest_copied: int = 0
    ) -> None:
        self.groups = tuple(groups)
        self._further_groups = self.groups[1:]
        self.keeps_places = all(group.keeps_places for group in groups)
        self._table = table
        self._page_size = table.page_size
        pages = [group for group in groups if isinstance(group, Pages)]
        self._copying = pages if fewest_copied and len(pages) == len(groups) else []
        self._fewest_copied = fewest_copied
        self._settled = np.zeros(len(table.sequences), np.int64)  # tokens of collected steps
        self.logprob_cache = LogprobCache()

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Return whether a sequence that grows to `num_tokens` fits alone."""
        counts = _by_pool((group.pool, group.most_pages(num_tokens)) for group in self.groups)
        return all(count <= pool.num_pages for pool, count in counts)

    def place(self, sequence: Sequence, num_others: int = 0) -> Placement:
        """Look up the position to resume from; the last token is always computed again."""
        digests = self._digests(sequence)
        most = (self._num_resumable(sequence) - 1) // self._page_size
        resumable = [group.resumable(digests, most) for group in self.groups]
        num_cached, most_cached = min(resumable), max(resumable)
        while any(num > num_cached for num in resumable):
            resumable = [group.resumable(digests, num_cached) for group in self.groups]
            num_cached = min(resumable)
        placement = self._placed(sequence, num_cached, most_cached, num_others)
        if num_cached and not num_others and not placement.fits:
            # The cached pages occupy the memory, and no other sequence will release any.
            return self._placed(sequence, 0, most_cached, num_others)
        return self._with_copies(placement) if self._copying else placement

    def is_in_progress(self, sequence: Sequence) -> bool:
        """Return whether another prompt of an interactive request will compute the next page."""
        table, size = self._table, self._page_size
        running = table.running[table.is_urgent[table.running]]
        prompts = running[table.num_tokens[running] - table.num_computed[running] > 1].tolist()
        name = sequence.request.request_id
        others = [slot for slot in prompts if table.sequence(slot).request.request_id == name]
        if not others:
            return False
        digests, most = self._digests(sequence), (self._num_resumable(sequence) - 1) // size
        page = min(group.resumable(digests, most) for group in self.groups)
        return page < most and any(
            table.num_computed[slot] < (page + 1) * size
            and table.sequence(slot).digests[page : page + 1] == digests[page : page + 1]
            for slot in others
        )

    def _with_copies(self, placement: Placement) -> Placement:
        """Return a placement that copies the first tokens of the next page, if that is possible."""
        sequence, place = placement.sequence, placement.num_cached
        if sequence.request.prompt_logprobs is not None:  # those of the page are unknown
            return placement
        start, size = place * self._page_size, self._page_size
        if image_digests(sequence.request.images, start, start + size):
            return placement
        before = self._before(sequence, place)
        known = [group.beginning(before) for group in self._copying]
        beginnings = [beginning for beginning in known if beginning is not None]
        if len(beginnings) < len(known):
            return placement
        own = sequence.tokens(start, min(start + size, sequence.num_tokens) - 1)
        num_copied = min(_num_equal(own, beginning.tokens) for beginning in beginnings)
        if num_copied < self._fewest_copied:
            return placement
        sources = tuple(beginning.page for beginning in beginnings)
        unheld = (
            (group.pool, group.pool.num_unheld([page]))
            for group, page in zip(self._copying, sources, strict=True)
        )
        needed = _by_pool(chain(placement.needed, unheld))
        copying = placement._replace(needed=needed, num_copied=num_copied, sources=sources)
        return copying if copying.fits else placement

    def _before(self, sequence: Sequence, page: int) -> Digest:
        """Return the name of the page before one of a sequence's pages, or the root."""
        return sequence.digests[page - 1] if page else self._root_digest(sequence.request)

    def restore_logprobs(self, sequence: Sequence, num_cached: int) -> None:
        """Give a sequence the cached scores of the prompt tokens that it skips."""
        if sequence.request.prompt_logprobs is None:
            return
        scores, size = sequence.prompt_logprobs, self._page_size
        while len(scores) <= min(num_cached * size, len(sequence.prompt) - 1):
            page = len(scores) // size
            cached = self.logprob_cache.get(sequence.digests[page], scores.num_top)
            scores.append(cached[(len(scores) - max(1, page * size)) * scores.record_bytes :])
        scores.truncate(len(sequence.prompt))

    def keep_logprobs(self, sequence: Sequence, start: int) -> None:
        """Cache the scores of a prompt's completely scored pages, from a token on."""
        scores, size = sequence.prompt_logprobs, self._page_size
        for page in range(start // size, min(len(scores) // size, len(sequence.digests))):
            first = max(1, page * size)
            if first >= scores.num_unscored:
                self.logprob_cache.put(
                    sequence.digests[page],
                    scores.num_top,
                    scores.records(first, (page + 1) * size),
                )

    def _num_resumable(self, sequence: Sequence) -> int:
        """Return the length of the tokens that may be skipped, including the last one.

        For a prompt to be scored it ends at the first token with an unknown score.
        """
        if sequence.request.prompt_logprobs is None:
            return sequence.num_tokens
        scores, digests, size = sequence.prompt_logprobs, sequence.digests, self._page_size
        num_scored, page = len(scores), len(scores) // size
        while page < len(digests) and self.logprob_cache.covers(digests[page], scores.num_top):
            page += 1
            num_scored = page * size
        return sequence.num_tokens if num_scored >= len(sequence.prompt) else num_scored

    def _placed(
        self, sequence: Sequence, num_cached: int, most_cached: int, num_others: int
    ) -> Placement:
        needed = _by_pool(
            (group.pool, group.room(sequence.digests, num_cached, sequence.num_tokens, num_others))
            for group in self.groups
        )
        return Placement(sequence, num_cached, most_cached, needed, num_others)

    def is_worth_waiting(self, placement: Placement) -> bool:
        """Return whether a running sequence will soon leave state to resume from."""
        digests = placement.sequence.digests[placement.num_cached : placement.most_cached]
        return any(group.is_expected(digest) for group in self.groups for digest in digests)

    def lasts(self, refused: Placement, sequence: Sequence, num_others: int) -> bool:
        """Return whether a refused placement stays refused: no more pages are cached or free.

        Pages that lose their name or holders in the meantime only make the sequence need more.
        """
        if sequence is not refused.sequence or refused.fits or num_others < refused.num_others:
            return False
        following = sequence.digests[: refused.most_cached + 1]
        return self.groups[0].resumable(following, len(following)) <= refused.most_cached

    def enter(self, slot: int, placement: Placement, following: Sequence | None) -> None:
        """Give a slot the state that its sequence resumes from, and room for its prompt.

        State that it shares with earlier sequences, or with the one `following`, is expected of it.
        """
        sequence = placement.sequence
        for group in self.groups:
            group.share(slot, sequence.digests, placement.num_cached)
        for pages, page in zip(self._copying, placement.sources, strict=False):
            pages.copy_from(slot, page)
        for group in self.groups:
            group.enter(slot, placement.num_cached, sequence.num_tokens)
        self._settled[slot] = placement.num_cached * self._page_size
        num_shared = placement.most_cached
        if following is not None:
            num_shared = max(num_shared, self._num_common(sequence, following))
        num_shared = min(num_shared, (sequence.num_tokens - 1) // self._page_size)
        if num_shared > placement.num_cached:
            for group in self.groups:
                group.expect(slot, sequence.digests, num_shared)

    def attend(self, slot: int, start: int, stop: int) -> int:
        """Give tokens of a prompt their places; return the stop of those that have one."""
        for group in reversed(self.groups):
            stop = group.attend(slot, start, stop, int(self._settled[slot]))
        return stop

    def can_extend(self, decodes: Slots) -> bool:
        """Return whether the decodes' tokens fit."""
        if self._have_places(decodes):
            return True
        needed = _by_pool((group.pool, len(needy)) for group, needy in self._needs(decodes))
        return all(pool.can_allocate(count) for pool, count in needed)

    def extend(self, decodes: Slots) -> None:
        """Give places to the tokens of decodes, which must fit."""
        if self._have_places(decodes):
            return
        for group, needy in self._needs(decodes):
            if len(needy):
                group.extend(needy, self._settled[needy])

    def settle(self, slots: Slots, stops: Slots) -> None:
        """Record that a collected step has computed running slots up to `stops`."""
        self._settled[slots] = stops
        if self._copying:
            for slot in slots[self._table.sources[slots] != NO_PAGE].tolist():
                for pages in self._copying:
                    pages.drop_source(slot)
        for group in self._further_groups:
            group.settle(slots, stops)

    def undo(self, slots: Slots, starts: Slots) -> Slots:
        """Go back to `starts` after a step is lost; return the positions to resume from.

        Recomputed state is written again, which a failure may corrupt: it is no longer found by
        others, and a sequence that shares it must be placed again (-1).
        """
        resumes = starts.copy()
        if len(self.groups) == 1:
            return resumes
        for index, (slot, start) in enumerate(zip(slots.tolist(), starts.tolist(), strict=True)):
            resumes[index] = min(group.undo(slot, start) for group in self.groups)
            if resumes[index] < start:
                is_shared = any(group.is_shared(slot) for group in self.groups)
                self.invalidate_from(slot, 0, self._table.sequence(slot).digests)
                self._settled[slot] = 0
                resumes[index] = -1 if is_shared else 0
        return resumes

    def register(self, slot: int, start: int, stop: int) -> None:
        """Name the pages that these tokens, whose ids are known, fill."""
        sequence = self._table.sequence(slot)
        first, last = start // self._page_size, stop // self._page_size
        self._extend_digests(sequence, self._table.tokens[slot], last)
        for group in self.groups:
            group.register(slot, sequence.digests, first, last)
        if self._copying:
            self._begin_pages(slot, start, stop)

    def _begin_pages(self, slot: int, start: int, stop: int) -> None:
        """Record the beginnings of the pages that tokens `start:stop` fill or begin.

        A page whose beginning is still to be copied is left out: no copy waits for another.
        """
        size, tokens = self._page_size, self._table.tokens[slot]
        sequence = self._table.sequence(slot)
        images = sequence.request.images
        first = start // size + int(self._table.sources[slot] != NO_PAGE)
        for page in range(first, -(-stop // size)):
            begins, ends = page * size, min((page + 1) * size, stop)
            if images and image_digests(images, begins, ends):
                continue
            before, text = self._before(sequence, page), tokens[begins:ends].tobytes()
            for pages in self._copying:
                pages.begin(slot, page, before, text)

    def register_generated(self, slot: int) -> None:
        """Name the pages that a sequence has filled since it started, which have no name yet.

        They are rarely needed while it runs, and naming them together is cheaper. They include the
        last page of its prompt, since a step may end before its last token. If no step has included
        the sequence, all its pages belong to others, which may never have filled them.
        """
        table = self._table
        if not table.has_begun[slot]:
            return
        num_stored = min(table.num_known_ids[slot] - 1, table.num_computed[slot])
        num_named = max(0, len(table.sequence(slot).digests) - 1)
        self.register(slot, num_named * self._page_size, int(num_stored))

    def invalidate_from(self, slot: int, start: int, digests: Several[Digest]) -> None:
        """Forget the state of a slot from a token on, and all state computed from it."""
        for group in self.groups:
            group.invalidate(slot, digests, start // self._page_size)

    def release(self, slot: int) -> None:
        """Release the state of a slot."""
        for group in self.groups:
            group.release(slot)

    def _have_places(self, decodes: Slots) -> bool:
        """Return whether no decode needs a page; False if there are other kinds of state."""
        if self._further_groups:
            return False
        table = self._table
        num_places = table.num_pages[decodes] * self._page_size
        return bool((table.num_tokens[decodes] <= num_places).all())

    def _needs(self, decodes: Slots) -> list[tuple[StateGroup, Slots]]:
        num_tokens = self._table.num_tokens[decodes]
        return [(group, group.needs(decodes, num_tokens)) for group in self.groups]

    def _num_common(self, sequence: Sequence, other: Sequence) -> int:
        """Return the number of full pages in the common prefix of two sequences."""
        pairs = zip(sequence.digests, self._digests(other), strict=False)
        return next(
            (index for index, (a, b) in enumerate(pairs) if a != b),
            min(len(sequence.digests), len(other.digests)),
        )

    def _digests(self, sequence: Sequence) -> list[Digest]:
        """Return the names of a waiting sequence's full pages."""
        num_full = sequence.num_tokens // self._page_size
        if len(sequence.digests) < num_full:
            self._extend_digests(sequence, sequence.tokens(0, sequence.num_tokens), num_full)
        return sequence.digests

    def _extend_digests(
        self, sequence: Sequence, tokens: NDArray[np.int32], num_pages: int
    ) -> None:
        """Name those of the first `num_pages` pages of a sequence that have no name yet."""
        digests, size = sequence.digests, self._page_size
        if len(digests) < num_pages:
            parent = self._before(sequence, len(digests))
            unnamed = tokens[len(digests) * size : num_pages * size]
            images = sequence.request.images
            pages = range(len(digests), num_pages) if images else ()
            shown = [image_digests(images, page * size, (page + 1) * size) for page in pages]
            digests += page_digests(parent, unnamed, size, shown)

    def _root_digest(self, request: SequenceRequest) -> Digest:
        has_long_rope = self._table.takes_long_rope(request)
        return root_digest(request.cache_salt, request.adapter, has_long_rope=has_long_rope)


def _num_equal(tokens: NDArray[np.int32], others: bytes) -> int:
    """Return the number of first tokens that are equal."""
    pairs = zip(tokens.tolist(), np.frombuffer(others, np.int32).tolist(), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _by_pool(counts: Iterable[tuple[PagePool, int]]) -> tuple[tuple[PagePool, int], ...]:
    """Return the sums of counts by pool."""
    pools: dict[int, tuple[PagePool, int]] = {}
    for pool, count in counts:
        before = pools.get(id(pool), (pool, 0))[1]
        pools[id(pool)] = pool, before + count
    return tuple(pools.values())

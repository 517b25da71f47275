"""State cache: what running sequences hold, by group of layers, and the prefix cache over it.

A sequence resumes behind as many full pages as all groups have the state of. Which kinds of state
there are is not known here: a group says what it has room for, and from where it can resume.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Several
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..state.groups import StateGroup
from ..state.pages import Digest, PagePool, page_digests, root_digest
from .images import image_digests
from .sequence import Sequence, SequenceRequest
from .table import SequenceTable
from .token_logprobs import narrow_records, record_bytes

MAX_BYTES = 64 << 20


class _Page(NamedTuple):
    """Records of the tokens of a page, each with so many alternatives."""

    num_top: int
    records: bytes


class LogprobCache:
    """Log-probabilities of the tokens of full pages, the least recently used dropped first.

    A page's digest names its tokens and all before them, which is what these depend on.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._pages: OrderedDict[Digest, _Page] = OrderedDict()

    def covers(self, digest: Digest, num_top: int) -> bool:
        """Say whether a page is known with so many alternatives."""
        page = self._pages.get(digest)
        return page is not None and page.num_top >= num_top

    def get(self, digest: Digest, num_top: int) -> bytes:
        """Return the records of a page that it `covers`."""
        self._pages.move_to_end(digest)
        page = self._pages[digest]
        return narrow_records(page.records, page.num_top, num_top)

    def put(self, digest: Digest, num_top: int, records: bytes) -> None:
        """Keep the records of a page, unless they are known or no numbers."""
        if self.covers(digest, num_top):
            return
        # What comes of broken logits is no log-probability of anything.
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
    """Where a waiting sequence would resume, beside so many others.

    `num_cached` pages are cached in all groups, `most_cached` in one of them; `needed` are the
    pages that must be free, by pool.
    """

    sequence: Sequence
    num_cached: int
    most_cached: int
    needed: tuple[tuple[PagePool, int], ...]
    num_beside: int

    @property
    def fits(self) -> bool:
        """Say whether enough pages are free."""
        return all(pool.can_allocate(count) for pool, count in self.needed)


class StateCache:
    """Groups of one table's sequences: looked up, entered, attended to, named and released."""

    def __init__(self, table: SequenceTable, groups: Several[StateGroup]) -> None:
        self.groups = tuple(groups)
        self._further_groups = self.groups[1:]
        self.keeps_places = all(group.keeps_places for group in groups)
        self._table = table
        self._page_size = table.page_size
        self._settled = np.zeros(len(table.sequences), np.int64)  # tokens that are collected
        self.logprob_cache = LogprobCache()

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Say whether a sequence that grows to `num_tokens` fits when it is alone."""
        held = _by_pool((group.pool, group.most_pages(num_tokens)) for group in self.groups)
        return all(count <= pool.num_pages for pool, count in held)

    def place(self, sequence: Sequence, num_beside: int = 0) -> Placement:
        """Look up where a sequence may resume; its last token is always computed anew."""
        digests = self._digests(sequence)
        most = (self._num_resumable(sequence) - 1) // self._page_size
        found = [group.resumable(digests, most) for group in self.groups]
        num_cached, most_cached = min(found), max(found)
        while any(num > num_cached for num in found):
            found = [group.resumable(digests, num_cached) for group in self.groups]
            num_cached = min(found)
        placement = self._placed(sequence, num_cached, most_cached, num_beside)
        if num_cached and not num_beside and not placement.fits:
            # What is cached is in the way, and nobody else will make room.
            return self._placed(sequence, 0, most_cached, num_beside)
        return placement

    def restore_logprobs(self, sequence: Sequence, num_cached: int) -> None:
        """Give a sequence the cached scores of its prompt that it resumes behind."""
        if sequence.request.prompt_logprobs is None:
            return
        scores, size = sequence.prompt_logprobs, self._page_size
        while len(scores) <= min(num_cached * size, len(sequence.prompt) - 1):
            page = len(scores) // size
            cached = self.logprob_cache.get(sequence.digests[page], scores.num_top)
            scores.append(cached[(len(scores) - max(1, page * size)) * scores.record_bytes :])
        scores.truncate(len(sequence.prompt))

    def keep_logprobs(self, sequence: Sequence, start: int) -> None:
        """Keep the scores of pages of a prompt that have all of theirs, from a token on."""
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
        """Return the length of what may be resumed behind, but for its last token.

        That of a prompt to be scored ends at the first token whose score nobody knows.
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
        self, sequence: Sequence, num_cached: int, most_cached: int, num_beside: int
    ) -> Placement:
        needed = _by_pool(
            (group.pool, group.room(sequence.digests, num_cached, sequence.num_tokens, num_beside))
            for group in self.groups
        )
        return Placement(sequence, num_cached, most_cached, needed, num_beside)

    def is_worth_waiting(self, placement: Placement) -> bool:
        """Say whether a running sequence will soon leave state from which it could resume."""
        digests = placement.sequence.digests[placement.num_cached : placement.most_cached]
        return any(group.is_expected(digest) for group in self.groups for digest in digests)

    def lasts(self, refused: Placement, sequence: Sequence, num_beside: int) -> bool:
        """Say whether a sequence is still refused: no more of it is cached, as few pages are free.

        Pages that lose their name or holders meanwhile only make it need more.
        """
        if sequence is not refused.sequence or refused.fits or num_beside < refused.num_beside:
            return False
        following = sequence.digests[: refused.most_cached + 1]
        return self.groups[0].resumable(following, len(following)) <= refused.most_cached

    def enter(self, slot: int, placement: Placement, following: Sequence | None) -> None:
        """Give a slot what its sequence resumes from, and room for its prompt.

        What other sequences share of it, by what was computed before, or the one `following`, is
        expected of it.
        """
        sequence = placement.sequence
        for group in self.groups:
            group.share(slot, sequence.digests, placement.num_cached)
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
        """Give tokens of a prompt their places; return the stop before which all have one."""
        for group in reversed(self.groups):
            stop = group.attend(slot, start, stop, int(self._settled[slot]))
        return stop

    def can_extend(self, decodes: Slots) -> bool:
        """Say whether the decodes' tokens fit."""
        if self._have_places(decodes):
            return True
        needed = _by_pool((group.pool, len(needy)) for group, needy in self._needs(decodes))
        return all(pool.can_allocate(count) for pool, count in needed)

    def extend(self, decodes: Slots) -> None:
        """Give the tokens of decodes that fit their places."""
        if self._have_places(decodes):
            return
        for group, needy in self._needs(decodes):
            if len(needy):
                group.extend(needy, self._settled[needy])

    def settle(self, slots: Slots, stops: Slots) -> None:
        """Take note that a collected step has computed running slots up to `stops`."""
        self._settled[slots] = stops
        for group in self._further_groups:
            group.settle(slots, stops)

    def undo(self, slots: Slots, starts: Slots) -> Slots:
        """Go back to `starts`, a step being lost; return from where sequences can go on.

        What is computed again is written again, which a failure may spoil: nobody finds it any
        more, and who shares it with others is to be placed anew (-1).
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
        """Name the pages that are full once these tokens are computed, whose ids are known."""
        sequence = self._table.sequence(slot)
        first, last = start // self._page_size, stop // self._page_size
        self._extend_digests(sequence, self._table.tokens[slot], last)
        for group in self.groups:
            group.register(slot, sequence.digests, first, last)

    def register_generated(self, slot: int) -> None:
        """Name the pages that a sequence has filled since it started, none of which has a name yet.

        Hardly anybody asks for them while it runs, and to name them all at once costs less. The
        last page of its prompt is among them, since a step may end before its last token. Where no
        step has held the sequence, all its pages are others', who may never have filled them.
        """
        table = self._table
        if not table.has_begun[slot]:
            return
        num_stored = min(table.num_known_ids[slot] - 1, table.num_computed[slot])
        num_named = max(0, len(table.sequence(slot).digests) - 1)
        self.register(slot, num_named * self._page_size, int(num_stored))

    def invalidate_from(self, slot: int, start: int, digests: Several[Digest]) -> None:
        """Forget what a slot holds from a token on, and all that was computed from it."""
        for group in self.groups:
            group.invalidate(slot, digests, start // self._page_size)

    def release(self, slot: int) -> None:
        """Give back what a slot holds."""
        for group in self.groups:
            group.release(slot)

    def _have_places(self, decodes: Slots) -> bool:
        """Say whether no decode begins a page, where pages of all tokens are all the state."""
        if self._further_groups:
            return False
        table = self._table
        num_places = table.num_pages[decodes] * self._page_size
        return bool((table.num_tokens[decodes] <= num_places).all())

    def _needs(self, decodes: Slots) -> list[tuple[StateGroup, Slots]]:
        num_tokens = self._table.num_tokens[decodes]
        return [(group, group.needs(decodes, num_tokens)) for group in self.groups]

    def _num_common(self, sequence: Sequence, other: Sequence) -> int:
        """Return how many full pages two sequences begin with alike."""
        pairs = zip(sequence.digests, self._digests(other), strict=False)
        return next(
            (index for index, (a, b) in enumerate(pairs) if a != b),
            min(len(sequence.digests), len(other.digests)),
        )

    def _digests(self, sequence: Sequence) -> list[Digest]:
        """Return the names of a waiting sequence's full pages."""
        num_full = sequence.num_tokens // self._page_size
        if len(sequence.digests) < num_full:
            tokens = np.append(sequence.prompt, np.array(sequence.generated, np.int32))
            self._extend_digests(sequence, tokens, num_full)
        return sequence.digests

    def _extend_digests(
        self, sequence: Sequence, tokens: NDArray[np.int32], num_pages: int
    ) -> None:
        """Name the first `num_pages` pages of a sequence, those that have no name yet."""
        digests, size = sequence.digests, self._page_size
        if len(digests) < num_pages:
            parent = digests[-1] if digests else self._root_digest(sequence.request)
            unnamed = tokens[len(digests) * size : num_pages * size]
            images = sequence.request.images
            pages = range(len(digests), num_pages) if images else ()
            shown = [image_digests(images, page * size, (page + 1) * size) for page in pages]
            digests += page_digests(parent, unnamed, size, shown)

    def _root_digest(self, request: SequenceRequest) -> Digest:
        has_long_rope = self._table.takes_long_rope(request)
        return root_digest(request.cache_salt, request.adapter, has_long_rope=has_long_rope)


def _by_pool(counts: Iterable[tuple[PagePool, int]]) -> tuple[tuple[PagePool, int], ...]:
    """Return the sums of counts by pool."""
    pools: dict[int, tuple[PagePool, int]] = {}
    for pool, count in counts:
        before = pools.get(id(pool), (pool, 0))[1]
        pools[id(pool)] = pool, before + count
    return tuple(pools.values())

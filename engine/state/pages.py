"""KV cache pages: a reference-counted pool with an index of full pages by digest.

This module only keeps records, and handles no tensors. A page contains the keys and values of
`page_size` consecutive tokens of a sequence, for every layer of a group. Full pages are named by a
digest of the salt and all tokens and images up to their end, so that a later sequence with the same
prefix takes the page instead of computing it. A page without holders keeps its contents until it is
reused: unnamed pages first, then the least recently freed. A sequence that diverges within a page
copies the page's first tokens: the pool knows one page after each name, full or not.
"""

from __future__ import annotations

from collections import OrderedDict, abc
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Digest = bytes


def root_digest(salt: str, adapter: int = 0, *, has_long_rope: bool = False) -> Digest:
    """Return the root of page names, which differs by salt, adapter and rope."""
    if not (salt or adapter or has_long_rope):
        return b""
    word = adapter.to_bytes(4, "little") + bytes([has_long_rope])
    return blake2b(salt.encode(), digest_size=16, salt=word, person=b"cache salt").digest()


def page_digests(
    parent: Digest, tokens: NDArray[np.int32], page_size: int, shown: abc.Sequence[bytes] = ()
) -> list[Digest]:
    """Return the names of full pages after `parent`; a name covers its tokens and all before them.

    `shown` contains for each page the digests of images among its tokens.
    """
    text, width = tokens.tobytes(), page_size * tokens.itemsize
    digests = []
    for page, start in enumerate(range(0, len(text), width)):
        named = text[start : start + width] + (shown[page] if shown else b"")
        parent = blake2b(named, digest_size=16, key=parent).digest()
        digests.append(parent)
    return digests


class Beginning(NamedTuple):
    """The first tokens of a page, as int32 bytes."""

    page: int
    tokens: bytes


class PagePool:
    """Reference-counted pages `0 … num_pages-1` with a prefix index over the full ones."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._holders = [0] * num_pages
        self._digest_of: list[Digest | None] = [None] * num_pages
        self._parent_of: list[Digest | None] = [None] * num_pages  # of the previous page, or None
        self._page_of: dict[Digest, int] = {}
        self._beginnings: dict[Digest, Beginning] = {}  # by the name of the page before
        self._before: dict[int, Digest] = {}  # by page, its key in `_beginnings`
        # Pages without holders: unnamed ones, with the next to be reused last, and named ones.
        self._uncached = list(reversed(range(num_pages)))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Return the number of pages without holders, cached or not."""
        return len(self._uncached) + len(self._cached)

    def can_allocate(self, count: int) -> bool:
        """Return whether `allocate(count)` would succeed now."""
        return count <= self.num_free

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages and forget their contents; the caller has checked `can_allocate`."""
        cut = max(0, len(self._uncached) - count)
        pages = self._uncached[cut:][::-1]
        del self._uncached[cut:]
        reused = [self._cached.popitem(last=False)[0] for _ in range(count - len(pages))]
        self._drop_digests(reused)
        pages += reused
        for page in pages:
            self._holders[page] = 1
        return pages

    def lookup(self, digests: abc.Sequence[Digest]) -> list[int]:
        """Return the cached pages of the longest known run at the start of `digests`."""
        pages = []
        for digest in digests:
            page = self._page_of.get(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def share(self, pages: abc.Sequence[int]) -> None:
        """Add a holder to each of `pages`, which `lookup` returned."""
        for page in pages:
            if self._holders[page] == 0:
                del self._cached[page]
            self._holders[page] += 1

    def num_unheld(self, pages: abc.Sequence[int]) -> int:
        """Count the pages that `share` would take off the free list."""
        return sum(self._holders[page] == 0 for page in pages)

    def num_holders(self, page: int) -> int:
        """Return the number of holders of a page."""
        return self._holders[page]

    def register(
        self, pages: abc.Iterable[int], digests: abc.Sequence[Digest], parent: Digest | None = None
    ) -> None:
        """Name held pages that are full, or will be by the end of the step being planned.

        They follow one another; `parent` is the name of the page before them, if there is one.
        """
        page_of, digest_of, parent_of = self._page_of, self._digest_of, self._parent_of
        for page, digest in zip(pages, digests, strict=True):
            if digest not in page_of:
                page_of[digest] = page
                digest_of[page] = digest
                parent_of[page] = parent
            parent = digest

    def begin(self, page: int, before: Digest, tokens: bytes) -> None:
        """Record the first tokens of a held page, computed by the end of the step being planned.

        `before` is the name of the page before it, or the root. Only the first page after a name
        is recorded, until it is forgotten; its tokens may grow.
        """
        known = self._beginnings.get(before)
        if known is None or known.page == page:
            self._beginnings[before] = Beginning(page, tokens)
            self._before[page] = before

    def beginning(self, before: Digest) -> Beginning | None:
        """Return the page recorded after a name, and its first tokens."""
        return self._beginnings.get(before)

    def release(self, pages: abc.Sequence[int]) -> None:
        """Drop one holder from each page; the sequence's last pages are reused first."""
        holders, digest_of = self._holders, self._digest_of
        for page in reversed(pages):
            holders[page] -= 1
            if not holders[page]:
                if digest_of[page] is None:
                    self._forget_beginning(page)
                    self._uncached.append(page)
                else:
                    self._cached[page] = None

    def invalidate(self, pages: abc.Iterable[int]) -> None:
        """Drop the names of pages, and of all pages computed from them."""
        pages = list(pages)
        for page in pages:
            self._forget_beginning(page)
        lost = {digest for page in pages if (digest := self._digest_of[page]) is not None}
        if not lost:
            return
        children: dict[Digest, list[Digest]] = {}
        for digest, page in self._page_of.items():
            parent = self._parent_of[page]
            if parent is None:
                continue
            children.setdefault(parent, []).append(digest)
            if parent not in self._page_of:  # its predecessor is unknown
                lost.add(digest)
        todo = list(lost)
        while todo:
            following = [one for one in children.get(todo.pop(), ()) if one not in lost]
            lost.update(following)
            todo += following
        for digest in lost & self._beginnings.keys():
            self._forget_beginning(self._beginnings[digest].page)
        self._uncache([page for digest, page in self._page_of.items() if digest in lost])

    def invalidate_all(self) -> None:
        """Drop every name: the pages' contents can no longer be trusted."""
        self._beginnings.clear()
        self._before.clear()
        self._uncache(list(self._page_of.values()))

    def _uncache(self, pages: abc.Sequence[int]) -> None:
        """Remove names; their pages without holders are reused after those that had none."""
        self._drop_digests(pages)
        gone = set(pages)
        unheld = [page for page in self._cached if page in gone]
        self._uncached[:0] = reversed(unheld)
        for page in unheld:
            del self._cached[page]

    def _drop_digests(self, pages: abc.Iterable[int]) -> None:
        """Remove the names of named pages."""
        page_of, digest_of = self._page_of, self._digest_of
        for page in pages:
            digest = digest_of[page]
            assert digest is not None, f"page {page} has no name"
            del page_of[digest]
            digest_of[page] = None
            self._forget_beginning(page)

    def _forget_beginning(self, page: int) -> None:
        if (before := self._before.pop(page, None)) is not None:
            del self._beginnings[before]

"""The pages of the KV cache: who holds them, which hold a known prefix, which to reuse next.

Pure bookkeeping: no tensor is touched here. A page holds the keys and values of `page_size`
consecutive tokens of a sequence, in every layer. Full pages are named by a digest of the salt and
all tokens up to their end, so that a later sequence with the same beginning takes the page instead
of computing it. A page without holders keeps its contents until it is reused, least recently freed
first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

Digest = bytes


def root_digest(salt: str) -> Digest:
    """Return what the names of pages begin with: sequences of different salts share no page."""
    return blake2b(salt.encode(), digest_size=16, person=b"cache salt").digest() if salt else b""


def page_digest(parent: Digest, tokens: NDArray[np.int32]) -> Digest:
    """Return the name of a full page: its tokens and, through `parent`, all before them."""
    return blake2b(tokens.tobytes(), digest_size=16, key=parent).digest()


class PagePool:
    """Reference-counted pages `0 … num_pages-1` with a prefix index over the full ones."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._holders = [0] * num_pages
        self._digest_of: list[Digest | None] = [None] * num_pages
        self._page_of: dict[Digest, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_pages))

    @property
    def num_free(self) -> int:
        """Pages that no sequence holds, cached or not."""
        return len(self._free)

    def can_allocate(self, count: int) -> bool:
        """Say whether `allocate(count)` would succeed now."""
        return count <= len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages, forgetting what they held; the caller has asked `can_allocate`."""
        pages = []
        for _ in range(count):
            page, _ = self._free.popitem(last=False)
            self._forget(page)
            self._holders[page] = 1
            pages.append(page)
        return pages

    def lookup(self, digests: Sequence[Digest]) -> list[int]:
        """Return the cached pages of the longest known run at the start of `digests`."""
        pages = []
        for digest in digests:
            page = self._page_of.get(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Add a holder to each of `pages`, which `lookup` returned."""
        for page in pages:
            if self._holders[page] == 0:
                del self._free[page]
            self._holders[page] += 1

    def num_unheld(self, pages: Sequence[int]) -> int:
        """Count those of `pages` that `share` would take off the free list."""
        return sum(self._holders[page] == 0 for page in pages)

    def register(self, page: int, digest: Digest) -> None:
        """Name a held page that is full, or will be by the end of the step now being planned."""
        if digest not in self._page_of:
            self._page_of[digest] = page
            self._digest_of[page] = digest

    def release(self, pages: Sequence[int]) -> None:
        """Drop one holder from each page; the sequence's last pages are reused first."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._free[page] = None
                if self._digest_of[page] is None:
                    self._free.move_to_end(page, last=False)

    def forget_all(self) -> None:
        """Drop every name: what the pages hold can no longer be trusted."""
        for page in range(self.num_pages):
            self._forget(page)

    def _forget(self, page: int) -> None:
        digest = self._digest_of[page]
        if digest is not None:
            del self._page_of[digest]
            self._digest_of[page] = None

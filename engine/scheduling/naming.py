"""The names of pages: given once they are full, looked up by who begins alike."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.scheduling.pages import PagePool, page_digests, root_digest
from engine.scheduling.pictures import digest_within
from engine.scheduling.sequence import Sequence
from engine.scheduling.table import SequenceTable


class PageNames:
    """Names pages of the sequences of one table in one pool."""

    def __init__(self, table: SequenceTable, pool: PagePool) -> None:
        self._table = table
        self._pool = pool
        self._page_size = table.page_size

    def cached(self, sequence: Sequence) -> list[int]:
        """Look the sequence's beginning up; its last token is always computed anew."""
        request, size = sequence.request, self._page_size
        num_full = sequence.num_tokens // size
        if len(sequence.digests) < num_full:
            tokens = np.append(sequence.prompt, np.array(sequence.generated, np.int32))
            self._extend_digests(sequence, tokens, num_full)
        if request.prompt_logprobs is not None:
            return []
        return self._pool.lookup(sequence.digests[: (sequence.num_tokens - 1) // size])

    def register(self, slot: int, start: int, stop: int) -> None:
        """Name the pages that are full once these tokens are computed, whose ids are known.

        Those of a prompt may be named when the step is planned: each layer stores before it
        attends, so that even a sequence which starts in the same step may read them.
        """
        table = self._table
        pages = slice(start // self._page_size, stop // self._page_size)
        sequence = table.sequence(slot)
        self._extend_digests(sequence, table.tokens[slot], pages.stop)
        parent = sequence.digests[pages.start - 1] if pages.start else None
        self._pool.register(table.pages[slot, pages].tolist(), sequence.digests[pages], parent)

    def register_generated(self, slot: int) -> None:
        """Name the pages that a sequence has filled since it started, none of which has a name yet.

        Hardly anybody asks for them while it runs, and to name them all at once costs less. The
        last page of its prompt is among them, since a step may end before its last token.
        """
        table = self._table
        num_stored = min(table.num_known[slot] - 1, table.num_computed[slot])
        num_named = max(0, len(table.sequence(slot).digests) - 1)
        self.register(slot, num_named * self._page_size, int(num_stored))

    def _extend_digests(
        self, sequence: Sequence, tokens: NDArray[np.int32], num_pages: int
    ) -> None:
        """Name the first `num_pages` pages of a sequence, those that have no name yet."""
        digests, size = sequence.digests, self._page_size
        if len(digests) < num_pages:
            salt, adapter = sequence.request.cache_salt, sequence.request.adapter
            parent = digests[-1] if digests else root_digest(salt, adapter)
            unnamed = tokens[len(digests) * size : num_pages * size]
            pictures = sequence.request.pictures
            pages = range(len(digests), num_pages) if pictures else ()
            shown = [digest_within(pictures, page * size, (page + 1) * size) for page in pages]
            digests += page_digests(parent, unnamed, size, shown)

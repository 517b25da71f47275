"""Logprob cache: log-probabilities of prompts, beside the pages of the prefix cache."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import numpy as np

from ..state.pages import Digest
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

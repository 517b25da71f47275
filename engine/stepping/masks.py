"""Which tokens the constraints of a step's rows allow: found by threads while it is computed."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.protocol.errors import InternalError, RequestError
from engine.scheduling.table import SequenceTable

logger = logging.getLogger(__name__)

_MOST_THREADS = 8


@dataclass(slots=True)
class Masks:
    """What `N` rows may come to: `of_rows` says whose row of `words` each has, -1 for any token.

    `failed` has what went wrong, by row. All of it is there after `wait`.
    """

    of_rows: NDArray[np.int64]  # [N]
    words: NDArray[np.uint32]  # [M, vocabulary in words of 32 bits]
    failed: dict[int, RequestError] = field(default_factory=dict)
    helpers: tuple[Future[None], ...] = ()

    def wait(self) -> None:
        """Return once all rows are filled."""
        for helper in self.helpers:
            helper.result()

    def may_be_none_of(self, row: int, token_ids: list[int]) -> bool:
        """Say whether a row may have any other token than these."""
        place = int(self.of_rows[row])
        if place < 0:
            return True
        left = self.words[place].copy()
        for token_id in token_ids:
            left[token_id // 32] &= ~np.uint32(1 << token_id % 32)
        return bool(left.any())


class MaskThreads:
    """Threads that ask the constraints of one table's sequences what may come next."""

    def __init__(self, table: SequenceTable, vocab_size: int) -> None:
        self._table = table
        self._num_words = -(-vocab_size // 32)
        self._num_threads = max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // 2))
        self._threads = ThreadPoolExecutor(self._num_threads, "tidemill-masks")

    def begin(self, slots: NDArray[np.int64]) -> Masks:
        """Begin to ask for the sequences in these slots; whoever begins must wait for all."""
        rows = np.flatnonzero(self._table.is_constrained[slots])
        of_rows = np.full(len(slots), -1, np.int64)
        of_rows[rows] = np.arange(len(rows))
        masks = Masks(of_rows, np.empty((len(rows), self._num_words), np.uint32))
        todo = iter(rows.tolist())  # shared: each of its rows comes to one thread
        masks.helpers = tuple(
            self._threads.submit(self._fill, masks, slots, todo)
            for _ in range(min(self._num_threads, len(rows)))
        )
        return masks

    def _fill(self, masks: Masks, slots: NDArray[np.int64], rows: Iterator[int]) -> None:
        for row in rows:
            watch = self._table.sequence(int(slots[row])).constraint_watch
            assert watch is not None
            try:
                if not watch.fill(masks.words[masks.of_rows[row]]):
                    masks.of_rows[row] = -1
            except RequestError as error:
                masks.failed[row] = error
            except Exception as exc:
                logger.exception("a constraint failed")
                masks.failed[row] = InternalError(f"The constraint failed: {exc!r}")
            if row in masks.failed:
                masks.of_rows[row] = -1

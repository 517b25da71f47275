"""Rows of a batch that runs, as they come."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from cli.api import patience
from cli.api.client import Client
from cli.api.objects import Batch
from cli.api.patience import LONG_SECONDS
from cli.batches.follow import poll_delays
from cli.batches.outcome import print_json
from cli.kinds import Kinds
from engine.batchfile.rows import failure_in

# Rows behind a gap are asked for again and again: that may take this share of the time.
_PAUSE_PER_SWEEP = 4.0


class RowFollower:
    """Yields each finished row once; forgets all lines before which no row is missing."""

    def __init__(self, client: Client, batch_id: str) -> None:
        self._client = client
        self._batch_id = batch_id
        self._through = 0
        self._beyond: set[int] = set()

    def sweep(self) -> Iterator[Mapping[str, Any]]:
        """Yield the rows that are new, in the order of their lines."""
        after, has_more = self._through, True
        while has_more:
            page = self._client.rows(self._batch_id, after, patience_seconds=LONG_SECONDS)
            for row in page.rows:
                if row["line"] not in self._beyond:
                    yield row
                    self._beyond.add(row["line"])
            if after == self._through:
                self._through = max(self._through, page.complete_through)
                self._beyond = {line for line in self._beyond if line > self._through}
            has_more = page.has_more and bool(page.rows)
            after = page.rows[-1]["line"] if page.rows else after


def print_rows(client: Client, batch: Batch, failures: Kinds) -> Batch:
    """Print rows until a batch has ended and all of them are told; return it as it ended.

    Why rows failed is counted in `failures`.
    """
    follower = RowFollower(client, batch.id)
    delays = poll_delays()
    while True:
        began = time.monotonic()
        is_new = False
        for row in follower.sweep():
            print_json(row)
            if (message := failure_in(row)) is not None:
                failures.add(message, row["line"])
            is_new = True
        if batch.has_ended:
            return batch
        if is_new:
            delays = poll_delays()
        patience.pause(max(next(delays), _PAUSE_PER_SWEEP * (time.monotonic() - began)))
        batch = client.batch(batch.id, patience_seconds=LONG_SECONDS)

"""Row follower: prints the rows of a running batch as they finish."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from tidemill.batch.file.rows import row_error_message
from tidemill.offline.console import backoff
from tidemill.offline.console.backoff import LONG_SECONDS
from tidemill.offline.console.error_summary import ErrorSummary

from ..api.client import Client
from ..api.objects import Batch
from .follow import poll_delays
from .outcome import print_json

# Rows behind a gap are fetched again in each sweep; pause this many times its duration.
_PAUSE_PER_SWEEP = 4.0


class RowFollower:
    """Yields each finished row once; stores only the numbers of lines beyond the first gap."""

    def __init__(self, client: Client, batch_id: str) -> None:
        self._client = client
        self._batch_id = batch_id
        self._through = 0
        self._seen_ahead: set[int] = set()

    def sweep(self) -> Iterator[Mapping[str, Any]]:
        """Yield the new rows in line order."""
        after, has_more = self._through, True
        while has_more:
            page = self._client.rows(self._batch_id, after, retry_seconds=LONG_SECONDS)
            for row in page.rows:
                if row["line"] not in self._seen_ahead:
                    yield row
                    self._seen_ahead.add(row["line"])
            if after == self._through:
                self._through = max(self._through, page.complete_through)
                self._seen_ahead = {line for line in self._seen_ahead if line > self._through}
            has_more = page.has_more and bool(page.rows)
            after = page.rows[-1]["line"] if page.rows else after


def print_rows(client: Client, batch: Batch, failures: ErrorSummary) -> Batch:
    """Print all rows until a batch has ended; return the ended batch.

    Failed rows are counted in `failures`.
    """
    follower = RowFollower(client, batch.id)
    delays = poll_delays()
    while True:
        began = time.monotonic()
        is_new = False
        for row in follower.sweep():
            print_json(row)
            if (message := row_error_message(row)) is not None:
                failures.add(message, row["line"])
            is_new = True
        if batch.has_ended:
            return batch
        if is_new:
            delays = poll_delays()
        backoff.sleep(max(next(delays), _PAUSE_PER_SWEEP * (time.monotonic() - began)))
        batch = client.batch(batch.id, retry_seconds=LONG_SECONDS)

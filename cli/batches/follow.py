"""Polls a batch until it has ended, with a progress bar."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tidemill.batch.file.throughput import Rates
from tidemill.net.backoff import exponential_delays
from tidemill.offline.console import backoff
from tidemill.offline.console.backoff import LONG_SECONDS
from tidemill.offline.console.progress_bar import TerminalBar
from tidemill.offline.console.terminal import (
    amount,
    duration,
    log,
    without_control_chars,
)

from .outcome import cost_words

if TYPE_CHECKING:
    from ..api.client import Client
    from ..api.objects import Batch

Show = Callable[["Batch"], object]

_FIRST_SECONDS = 1.0
_MOST_SECONDS = 10.0
_MOVING_SECONDS = 2.0
_GROWTH = 1.5
_LINE_SECONDS = 30.0
_WAITS_FOR = {
    "validating": "its file is being read",
    "finalizing": "its results are being joined",
    "cancelling": "its requests are being stopped",
}


def poll_delays(first: float = _FIRST_SECONDS) -> Iterator[float]:
    """Return the delays between polls: they grow from `first` to ten seconds."""
    return exponential_delays(first, factor=_GROWTH, most=_MOST_SECONDS)


def follow(client: Client, batch: Batch, show: Show) -> Batch:
    """Poll until the batch has ended and return it; `show` gets each changed state.

    While neither the status nor the row counts change, polls become rarer, and the ETA of the
    last finished row is shown. Server outages of up to `LONG_SECONDS` are retried.
    """
    show(batch)
    delays = poll_delays()
    while not batch.has_ended:
        backoff.sleep(_next_delay(batch, next(delays)))
        seen, batch = batch, client.batch(batch.id, retry_seconds=LONG_SECONDS)
        if _counts_of(batch) != _counts_of(seen):
            delays = poll_delays(_MOVING_SECONDS)
        elif seen.eta_at is not None:
            batch = batch.with_eta(seen.eta_at)
        if batch != seen:
            show(batch)
    return batch


def _counts_of(batch: Batch) -> tuple[str, int, int]:
    return batch.status, batch.completed, batch.failed


def _next_delay(batch: Batch, delay: float) -> float:
    """Return the delay, shortened if the batch is expected to end earlier."""
    left = 0.0 if batch.eta_at is None else batch.eta_at - time.time()
    return min(delay, max(_FIRST_SECONDS, left)) if left > 0 else delay


@contextmanager
def batch_progress() -> Iterator[Show]:
    """Yield a function that shows a batch: a progress bar on a terminal, lines elsewhere."""
    if not sys.stderr.isatty():
        yield _lines()
        return
    with TerminalBar(is_titled=True) as bar:

        def show(batch: Batch) -> None:
            bar.show(
                batch.completed + batch.failed,
                batch.total or None,
                _words(batch),
                title=batch.status,
                dropped_first=(token_rate(batch.fields), row_rate(batch.fields)),
            )

        yield show


def _lines() -> Show:
    logged_at, logged = 0.0, ("", "")

    def show(batch: Batch) -> None:
        nonlocal logged_at, logged
        now = time.monotonic()
        state = batch.status, (batch.extension.get("waiting") or {}).get("code", "")
        if state == logged and now < logged_at + _LINE_SECONDS:
            return
        logged_at, logged = now, state
        done = f"{batch.completed + batch.failed:,} of {amount(batch.total, 'row')}"
        log(", ".join([batch.status, *([done] if batch.total else []), *_words(batch)]))

    return show


def _words(batch: Batch) -> list[str]:
    waits_for = _WAITS_FOR.get(batch.status)
    if waiting := batch.extension.get("waiting"):
        waits_for = without_control_chars(waiting["message"])
    elif batch.status == "in_progress" and not batch.completed + batch.failed:
        waits_for = "no rows yet: a worker is starting and loading the model"
    return [*([waits_for] if waits_for else []), *rates(batch.fields)]


def token_rate(fields: Any) -> str:
    """Return the rate, such as `512 tokens/s`; empty when nothing runs."""
    extension = fields.get("tidemill") or {}
    flow = Rates(**{name: extension.get(name) or 0.0 for name in Rates._fields})
    return flow.main_rate if any(flow[1:]) else ""


def row_rate(fields: Any) -> str:
    """Return the rate of rows, such as `40.1 rows/s`; empty while it is unknown."""
    rate = (fields.get("tidemill") or {}).get("rows_per_second")
    return f"{rate:,.1f} rows/s" if rate else ""


def rates(fields: Any) -> list[str]:
    """Return the known figures: failed and truncated rows, rates, time left and cost.

    Older servers report only the rates of rows and generated tokens.
    """
    extension = fields.get("tidemill") or {}
    words = []
    if failed := (fields.get("request_counts") or {}).get("failed"):
        words.append(f"{failed:,} failed")
    if truncated := extension.get("truncated_rows"):
        words.append(f"{truncated:,} truncated")
    words += filter(None, (row_rate(fields), token_rate(fields)))
    if (left := (extension.get("eta_at") or 0) - time.time()) > 0:
        words.append(f"{duration(left)} left")
    if cost := cost_words(extension):
        words.append(f"cost {cost}")
    return words

"""Waits for the end of a batch, and shows how far it is meanwhile."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from cli.api import patience
from cli.api.patience import LONG_SECONDS
from cli.terminal import amount, bar_width, duration, fitted, plain, say
from engine.batchfile.pace import Rates

if TYPE_CHECKING:
    from cli.api.client import Client
    from cli.api.objects import Batch

Show = Callable[["Batch"], object]

_FIRST_SECONDS = 1.0
_MOST_SECONDS = 10.0
_GROWTH = 1.5
_LINE_SECONDS = 30.0
_WAITS_FOR = {
    "validating": "its file is being read",
    "finalizing": "its rows are being put together",
    "cancelling": "its workers are stopping",
}


def poll_delays() -> Iterator[float]:
    """Yield the seconds between two looks: from one up to ten."""
    delay = _FIRST_SECONDS
    while True:
        yield delay
        delay = min(delay * _GROWTH, _MOST_SECONDS)


def follow(client: Client, batch: Batch, show: Show) -> Batch:
    """Return the batch when it has ended; `show` sees it as it is now and each time it changed.

    A server that is away for minutes is waited for.
    """
    show(batch)
    delays = poll_delays()
    while not batch.has_ended:
        patience.pause(_until_next_look(batch, next(delays)))
        seen, batch = batch, client.batch(batch.id, patience_seconds=LONG_SECONDS)
        if batch != seen:
            show(batch)
    return batch


def _until_next_look(batch: Batch, delay: float) -> float:
    """Return the delay, or less when the batch will be through before."""
    eta = batch.beyond.get("eta_at")
    return delay if eta is None else min(delay, max(_FIRST_SECONDS, eta - time.time()))


@contextmanager
def batch_shown() -> Iterator[Show]:
    """Yield what shows a batch on standard error: a bar on a terminal, a line now and then else."""
    if not sys.stderr.isatty():
        yield _lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console = Console(stderr=True)
    bar = BarColumn(bar_width(console.width))
    progress = Progress(
        TextColumn("{task.description}"),
        bar,
        TextColumn("{task.fields[words]}", markup=False),
        console=console,
        transient=True,
        redirect_stdout=False,
    )
    with progress:
        task = progress.add_task("", total=None, words="")

        def show(batch: Batch) -> None:
            done = batch.completed + batch.failed
            count = f"{done}/{batch.total} " if batch.total else ""
            bar.bar_width = bar_width(console.width)
            room = console.width - bar.bar_width - len(batch.status) - len(count) - 2
            words = fitted(_words(batch), room, (flow_of(batch.fields), _rate_of(batch.fields)))
            progress.update(
                task,
                description=batch.status,
                total=batch.total or None,
                completed=done,
                words=count + words,
            )

        yield show


def _lines() -> Show:
    said_at, said = 0.0, ("", "")

    def show(batch: Batch) -> None:
        nonlocal said_at, said
        now = time.monotonic()
        state = batch.status, (batch.beyond.get("waiting") or {}).get("code", "")
        if state == said and now < said_at + _LINE_SECONDS:
            return
        said_at, said = now, state
        done = f"{batch.completed + batch.failed:,} of {amount(batch.total, 'row')}"
        say(", ".join([batch.status, *([done] if batch.total else []), *_words(batch)]))

    return show


def _words(batch: Batch) -> list[str]:
    waits_for = _WAITS_FOR.get(batch.status)
    if waiting := batch.beyond.get("waiting"):
        waits_for = plain(waiting["message"])
    elif batch.status == "in_progress" and not batch.completed + batch.failed:
        waits_for = "no rows yet: a worker starts and loads the model"
    return [*([waits_for] if waits_for else []), *rates(batch.fields)]


def flow_of(fields: Any) -> str:
    """Return `512 tokens/s`, or how fast a batch reads or listens; nothing where it stands."""
    beyond = fields.get("tidemill") or {}
    flow = Rates(**{name: beyond.get(name) or 0.0 for name in Rates._fields})
    return flow.flow if any(flow[1:]) else ""


def _rate_of(fields: Any) -> str:
    rate = (fields.get("tidemill") or {}).get("rows_per_second")
    return f"{rate:,.1f} rows/s" if rate else ""


def rates(fields: Any) -> list[str]:
    """Return what is known of `3 failed`, `40.1 rows/s`, `512 tokens/s`, `22 s left`, a cost.

    A server that is older than this knows of no rates but rows and generated tokens.
    """
    beyond = fields.get("tidemill") or {}
    words = []
    if failed := (fields.get("request_counts") or {}).get("failed"):
        words.append(f"{failed:,} failed")
    words += filter(None, (_rate_of(fields), flow_of(fields)))
    if beyond.get("eta_at"):
        words.append(f"{duration(max(0, beyond['eta_at'] - time.time()))} left")
    if beyond.get("cost"):
        words.append(f"cost {beyond['cost']:,.4g}")
    return words

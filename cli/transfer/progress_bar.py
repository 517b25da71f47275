"""Progress bar for bytes: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tidemill.offline.console.terminal import log

Advance = Callable[[int], None]

_SECONDS_PER_LINE = 5.0
_MEGABYTE = 10**6


@contextmanager
def byte_progress(doing: str, total: int | None, done: int = 0) -> Iterator[Advance]:
    """Yield a thread-safe function that advances the bar by bytes, or back."""
    if not sys.stderr.isatty():
        yield _lines(doing, total, done)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,
    )
    with progress:
        task = progress.add_task(doing, total=total, completed=done)
        yield lambda num_bytes: progress.advance(task, num_bytes)


def _lines(doing: str, total: int | None, done: int) -> Advance:
    lock = threading.Lock()
    next_at = time.monotonic() + _SECONDS_PER_LINE

    def advance(num_bytes: int) -> None:
        nonlocal done, next_at
        with lock:
            done += num_bytes
            if time.monotonic() < next_at:
                return
            next_at = time.monotonic() + _SECONDS_PER_LINE
            of = f" of {total / _MEGABYTE:,.0f}" if total else ""
            log(f"{doing}: {done / _MEGABYTE:,.0f}{of} MB")

    return advance

"""How far bytes are on their way: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cli.terminal import say

Advance = Callable[[int], None]

_SECONDS_PER_LINE = 5.0
_MEGABYTE = 10**6


@contextmanager
def bytes_shown(doing: str, total: int | None, done: int = 0) -> Iterator[Advance]:
    """Yield what is told of each number of bytes more, or less; from any thread."""
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
            say(f"{doing}: {done / _MEGABYTE:,.0f}{of} MB")

    return advance

"""Progress in Python programs: a bar in a notebook or on a terminal, nothing in a log."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Final

from tidemill.batch.file.throughput import Countdown, seconds_left
from tidemill.offline.console.progress_bar import Bar, NotebookBar, TerminalBar
from tidemill.offline.console.terminal import duration

_SECONDS: Final = 0.25

# A terminal has only one last line.
_terminal = threading.Lock()


class Progress:
    """Progress of requests that are answered one by one; `refresh` shows it."""

    def __init__(self, bar: Bar | None, unit: str, total: int | None) -> None:
        self._bar = bar
        self._unit = unit
        self._total = total
        self._done = self._failed = 0
        self._started = time.monotonic()
        self._countdown = Countdown(time.monotonic)

    def add(self, count: int = 1, *, is_failed: bool = False) -> None:
        """Count answered requests, and failed ones."""
        self._done += count
        self._failed += is_failed

    def refresh(self) -> None:
        """Show the count."""
        if self._bar is not None:
            self._bar.show(self._done, self._total, self._words(time.monotonic() - self._started))

    def _words(self, seconds: float) -> list[str]:
        words = [f"{self._failed:,} failed"] if self._failed else []
        if not self._done or seconds <= 0:
            return words
        rate = self._done / seconds
        words.append(f"{rate:,.1f} {self._unit}/s")
        if self._total:
            left = seconds_left(self._done / self._total, seconds, rate / self._total)
            left = self._countdown.left(self._done, left)
            words += [] if left is None or self._done >= self._total else [f"{duration(left)} left"]
        return words


@contextmanager
def progress_of(unit: str, total: int | None, *, is_wanted: bool) -> Iterator[Progress]:
    """Show the progress of `total` answers, if it is wanted and there is a notebook or terminal."""
    with _bar(unit, is_wanted=is_wanted) as bar:
        progress = Progress(bar, unit, total)
        if bar is None:
            yield progress
            return
        ended = threading.Event()
        showing = threading.Thread(target=_refresh_until, args=(ended, progress), daemon=True)
        showing.start()
        try:
            yield progress
        finally:
            ended.set()
            showing.join()


def _refresh_until(ended: threading.Event, progress: Progress) -> None:
    """Show progress a few times a second, also while nothing is answered, and at the end.

    Only one thread writes, because output from several threads of a notebook is reordered.
    """
    progress.refresh()
    while not ended.wait(_SECONDS):
        progress.refresh()
    progress.refresh()


@contextmanager
def progress_of_run(*, is_wanted: bool) -> Iterator[int | None]:
    """Show the progress of a run; yield the file descriptor that its process writes it to.

    Yields None if a bar cannot be shown: the run then logs its progress in lines.
    """
    if not is_wanted:
        with open(os.devnull, "wb") as nowhere:  # noqa: PTH123 - its descriptor is needed
            yield nowhere.fileno()
        return
    with _bar("rows", is_wanted=True) as bar:
        if bar is None:
            yield None
            return
        reader, writer = os.pipe()
        reading = threading.Thread(target=_show_lines, args=(reader, bar), daemon=True)
        reading.start()
        try:
            yield writer
        finally:
            os.close(writer)
            reading.join()


def _show_lines(reader: int, bar: Bar) -> None:
    """Show the progress that a run reports, until it ends."""
    with open(reader, encoding="utf-8") as lines:
        for line in lines:
            bar.show(**json.loads(line))


@contextmanager
def _bar(unit: str, *, is_wanted: bool) -> Iterator[Bar | None]:
    """Yield the bar for a notebook or a terminal; None if there is neither."""
    if not is_wanted:
        yield None
    elif _is_notebook():
        yield NotebookBar(unit)
    elif _is_terminal(sys.stderr) and _terminal.acquire(blocking=False):
        try:
            # Otherwise output that is meant for a file would go to the terminal.
            with TerminalBar(redirect_stdout=_is_terminal(sys.stdout)) as bar:
                yield bar
        finally:
            _terminal.release()
    else:
        yield None


def _is_terminal(stream: IO[str] | None) -> bool:
    return stream is not None and stream.isatty()


def _is_notebook() -> bool:
    """Return whether this is an IPython kernel, that is, a notebook."""
    if (ipython := sys.modules.get("IPython")) is None:
        return False
    return getattr(ipython.get_ipython(), "kernel", None) is not None

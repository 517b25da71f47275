"""Progress bars on a terminal or in a notebook; progress in bytes also as log lines."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any, Protocol, Self

from .terminal import bar_width, fit_words, log

if TYPE_CHECKING:
    from types import TracebackType

    from rich.progress import Progress, ProgressColumn

Advance = Callable[[int], None]

_SECONDS_PER_LINE = 5.0
_MEGABYTE = 10**6


class Bar(Protocol):
    """Progress bar that appears with its first `show`."""

    def show(self, done: int, total: int | None, words: Sequence[str]) -> None:
        """Show the count, with words next to it."""


class TerminalBar:
    """Progress bar on the terminal of standard error; a context manager.

    With `is_titled`, a title precedes the bar, which also moves between updates. With
    `redirect_stdout`, output of the program is printed above the bar.
    """

    def __init__(self, *, is_titled: bool = False, redirect_stdout: bool = False) -> None:
        from rich.progress import BarColumn, TextColumn

        self._is_titled = is_titled
        title = [TextColumn("{task.fields[title]}", markup=False)] if is_titled else []
        self._bar = BarColumn()
        self._progress = terminal_progress(
            *title,
            self._bar,
            TextColumn("{task.description}", markup=False),
            auto_refresh=is_titled,
            redirect_stdout=redirect_stdout,
        )
        self._bar.bar_width = bar_width(self._progress.console.width)
        # A titled bar first erases its line: its first frame is empty.
        self._task = self._progress.add_task(" ", total=None, title="", visible=not is_titled)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Show the bar on the terminal's last line."""
        self._progress.start()
        self._progress.update(self._task, visible=True, refresh=self._is_titled)

    def stop(self) -> None:
        """Remove the bar."""
        self._progress.stop()

    def show(
        self,
        done: int,
        total: int | None,
        words: Sequence[str],
        *,
        title: str = "",
        label: str = "",
        dropped_first: Sequence[str] = (),
    ) -> None:
        """Draw the bar; without a total, it is animated, and a titled bar has no count."""
        columns = self._progress.console.width
        self._bar.bar_width = bar_width(columns)
        count = f"{label}{done} " if total is None else f"{label}{done}/{total} "
        room = columns - self._bar.bar_width - 1
        if self._is_titled:
            count = "" if total is None else count
            room -= len(title) + 1
        self._progress.update(
            self._task,
            description=count + fit_words(words, room - len(count), dropped_first),
            total=total,
            completed=done,
            title=title,
            refresh=not self._is_titled,
        )


class NotebookBar:
    """Updated output of a notebook cell: a bar if HTML is supported, otherwise text."""

    def __init__(self, unit: str) -> None:
        self._unit = unit
        self._handle: Any = None

    def show(self, done: int, total: int | None, words: Sequence[str]) -> None:
        """Update the output."""
        from IPython.display import display

        text = progress_text(done, total, self._unit, words)
        attributes = "" if total is None else f' value="{done}" max="{max(1, total)}"'
        bundle = {
            "text/plain": text,
            "text/html": f"<progress{attributes}></progress> {escape(text)}",
        }
        if self._handle is None:
            self._handle = display(  # type: ignore[no-untyped-call]
                bundle, raw=True, display_id=True
            )
        else:
            self._handle.update(bundle, raw=True)


def progress_text(done: int, total: int | None, unit: str, words: Sequence[str]) -> str:
    """Return `120 of 1,000 rows, 3 failed`: the count and words without a bar."""
    count = f"{done:,}" if total is None else f"{done:,} of {total:,}"
    return ", ".join([f"{count} {unit}", *words])


def terminal_progress(
    *columns: ProgressColumn, auto_refresh: bool = True, redirect_stdout: bool = False
) -> Progress:
    """Return a display on standard error's terminal, which is removed when it stops."""
    from rich.console import Console
    from rich.progress import Progress

    return Progress(
        *columns,
        console=Console(stderr=True),
        auto_refresh=auto_refresh,
        transient=True,
        redirect_stdout=redirect_stdout,
    )


@contextmanager
def byte_progress(doing: str, total: int | None, done: int = 0) -> Iterator[Advance]:
    """Yield a thread-safe function that moves the progress by bytes, forwards or backwards.

    The progress is a bar on a terminal, otherwise a line every few seconds.
    """
    if not sys.stderr.isatty():
        yield _byte_lines(doing, total, done)
        return
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    with terminal_progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    ) as progress:
        task = progress.add_task(doing, total=total, completed=done)
        yield lambda num_bytes: progress.advance(task, num_bytes)


def _byte_lines(doing: str, total: int | None, done: int) -> Advance:
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

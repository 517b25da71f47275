"""Spinner: shows that work of unknown length is in progress."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from .progress_bar import terminal_progress
from .terminal import duration, log

_SECONDS_PER_LINE = 30.0


@contextmanager
def spinner(doing: str) -> Iterator[None]:
    """Show a spinner on a terminal, and a line every 30 seconds elsewhere."""
    if not sys.stderr.isatty():
        with _lines(doing):
            yield
        return
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    text = TextColumn("{task.description}", markup=False)
    with terminal_progress(SpinnerColumn(), text, TimeElapsedColumn()) as progress:
        progress.add_task(doing, total=None)
        yield


@contextmanager
def _lines(doing: str) -> Iterator[None]:
    done, began = threading.Event(), time.monotonic()

    def print_lines() -> None:
        while not done.wait(_SECONDS_PER_LINE):
            log(f"still {doing} after {duration(time.monotonic() - began)}")

    threading.Thread(target=print_lines, name="spinner", daemon=True).start()
    try:
        yield
    finally:
        done.set()

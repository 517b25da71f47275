"""Work that cannot be counted: something moves meanwhile."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from cli.terminal import duration, say

_SECONDS_PER_LINE = 30.0


@contextmanager
def spinner(doing: str) -> Iterator[None]:
    """Show that something goes on: on a terminal it turns, elsewhere there is a line at times."""
    if not sys.stderr.isatty():
        with _lines(doing):
            yield
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,
    )
    with progress:
        progress.add_task(doing, total=None)
        yield


@contextmanager
def _lines(doing: str) -> Iterator[None]:
    done, began = threading.Event(), time.monotonic()

    def tell() -> None:
        while not done.wait(_SECONDS_PER_LINE):
            say(f"still {doing}, for {duration(time.monotonic() - began)}")

    threading.Thread(target=tell, name="spinner", daemon=True).start()
    try:
        yield
    finally:
        done.set()

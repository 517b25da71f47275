"""The C allocator: what large requests leave free in it goes back to the system.

glibc keeps the pages that a thread has freed, for that thread: a text of 3 MB leaves 500 MB behind
it, in each thread that ever tokenized one. They are given back once there is a pause, or every few
seconds where there is none. Elsewhere nothing is done.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Lock, Timer

_PAUSE_SECONDS = 1.0
_MOST_SECONDS = 10.0


class Trimmer:
    """Calls `trim` in a thread of its own, a while after memory was freed."""

    def __init__(
        self,
        trim: Callable[[], object],
        pause_seconds: float = _PAUSE_SECONDS,
        most_seconds: float = _MOST_SECONDS,
    ) -> None:
        self._trim = trim
        self._pause_seconds = pause_seconds
        self._most_seconds = most_seconds
        self._lock = Lock()
        self._timer: Timer | None = None
        self._first = self._last = 0.0

    def note(self) -> None:
        """Note that something large was freed just now; callable from any thread."""
        with self._lock:
            self._last = time.monotonic()
            if self._timer is None:
                self._first = self._last
                self._begin_timer(min(self._pause_seconds, self._most_seconds))

    def _begin_timer(self, seconds: float) -> None:
        self._timer = None
        timer = Timer(seconds, self._end_timer)
        timer.daemon = True
        with suppress(RuntimeError):  # no thread can be started now: the next note tries again
            timer.start()
            self._timer = timer

    def _end_timer(self) -> None:
        with self._lock:
            now = time.monotonic()
            wait = min(self._last + self._pause_seconds, self._first + self._most_seconds) - now
            if wait > 0:
                self._begin_timer(wait)
                return
            self._timer = None
        self._trim()


def trim_heap() -> None:
    """Return free pages of all arenas to the system; callable from any thread."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


_trimmer = Trimmer(trim_heap)


def note_freed() -> None:
    """Note that something large was freed just now, so that its pages are given back soon."""
    _trimmer.note()

"""Heap trimming: returns memory freed by large requests to the system, with glibc's malloc_trim.

glibc keeps freed pages in the arena of the thread that freed them: a text of 3 MB leaves 500 MB
behind in each thread that tokenized one. The pages are trimmed at the next pause, or every few
seconds if there is none. The tensors of a step, however, are allocated again in the next one: a CPU
engine keeps them, as each fresh page of 4 KiB costs a fault. With other C libraries nothing is
done.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Lock, Timer

_PAUSE_SECONDS = 1.0
_MAX_SECONDS = 10.0
# Parameters of mallopt in malloc.h: the free bytes that are kept at an arena's end, and the size
# from which an allocation is a separate mapping, at most this.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MOST_KEPT_BYTES, _MAPPED_BYTES = 2**30, 2**25
_LIMITS = ("TRIM_THRESHOLD", "MMAP_THRESHOLD", "TOP_PAD", "MMAP_MAX")
_OF_GLIBC = frozenset({"GLIBC_TUNABLES", *(f"MALLOC_{name}_" for name in _LIMITS)})


class HeapTrimmer:
    """Debounced trimming: calls `trim` in a timer thread, a while after memory was freed."""

    def __init__(
        self,
        trim: Callable[[], object],
        pause_seconds: float = _PAUSE_SECONDS,
        max_seconds: float = _MAX_SECONDS,
    ) -> None:
        self._trim = trim
        self._pause_seconds = pause_seconds
        self._max_seconds = max_seconds
        self._lock = Lock()
        self._timer: Timer | None = None
        self._first = self._last = 0.0

    def schedule(self) -> None:
        """Schedule a trim after something large was freed; callable from any thread."""
        with self._lock:
            self._last = time.monotonic()
            if self._timer is None:
                self._first = self._last
                self._start_timer(min(self._pause_seconds, self._max_seconds))

    def _start_timer(self, seconds: float) -> None:
        self._timer = None
        timer = Timer(seconds, self._on_timer)
        timer.name, timer.daemon = "tidemill-trim", True
        with suppress(RuntimeError):  # no thread can be started now: the next call tries again
            timer.start()
            self._timer = timer

    def _on_timer(self) -> None:
        with self._lock:
            now = time.monotonic()
            wait = min(self._last + self._pause_seconds, self._first + self._max_seconds) - now
            if wait > 0:
                self._start_timer(wait)
                return
            self._timer = None
        self._trim()


def trim_heap() -> None:
    """Return free pages of all arenas to the system; callable from any thread."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


def keep_heap() -> None:
    """Keep freed memory for the next step, until `trim_heap`.

    glibc's environment variables have priority, even if they are empty.
    """
    if sys.platform != "linux" or os.environ.keys() & _OF_GLIBC:
        return
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_M_TRIM_THRESHOLD, _MOST_KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)


_trimmer = HeapTrimmer(trim_heap)


def schedule_trim() -> None:
    """Schedule a heap trim, after something large was freed."""
    _trimmer.schedule()

"""Liveness: a page of memory that an engine's process shares with whoever started it.

A thread of its own writes it, so that a slow event loop is told from a process that hangs.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import threading
from collections.abc import Callable
from typing import NamedTuple

from engine.contract import EngineStats
from engine.errors import EngineError

BEAT_SECONDS = 0.25

_PAGE = struct.Struct("=QQQQ")


class Life(NamedTuple):
    """Counts that grow: `beats` of the thread, `turns` of the event loop, the engine's steps.

    `turns` stand still while one turn of the loop lasts, `steps` and `layers` while no step runs.
    """

    beats: int = 0
    turns: int = 0
    steps: int = 0
    layers: int = 0


class LivenessPage:
    """The shared page behind a file descriptor, which whoever made it may close at once."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, _PAGE.size)

    @staticmethod
    def new_fd() -> int:
        """Return the descriptor of an empty page, for a child process to inherit."""
        if hasattr(os, "memfd_create"):  # needs no folder and no disk
            fd = os.memfd_create("tidemill-liveness")
            os.truncate(fd, _PAGE.size)
            return fd
        with tempfile.TemporaryFile() as file:
            file.write(bytes(_PAGE.size))
            file.flush()
            return os.dup(file.fileno())

    def read(self) -> Life:
        """Return what was last written."""
        return Life(*_PAGE.unpack_from(self._memory))

    def write(self, life: Life) -> None:
        """Replace what stands there."""
        _PAGE.pack_into(self._memory, 0, *life)


class Heartbeat:
    """Writes the page from a thread; the loop counts its own `turns`."""

    def __init__(self, page: LivenessPage) -> None:
        self._page = page
        self._stats: Callable[[], EngineStats] | None = None
        self.turns = 0

    def start(self) -> None:
        """Begin; it goes on until the process ends."""
        threading.Thread(target=self._beat, name="tidemill-heartbeat", daemon=True).start()

    def follow(self, stats: Callable[[], EngineStats]) -> None:
        """Write the steps of an engine from now on."""
        self._stats = stats

    def _beat(self) -> None:
        pause, life = threading.Event(), Life()
        while True:
            stats = EngineStats()
            if self._stats is not None:
                try:
                    stats = self._stats()
                except EngineError:
                    return  # the engine is gone, which its loop says
            life = Life(life.beats + 1, self.turns, stats.steps, stats.layers)
            self._page.write(life)
            pause.wait(BEAT_SECONDS)

"""Liveness page: heartbeat counters in memory that the engine process shares with its parent.

A separate thread writes them, which distinguishes a slow event loop from a hung process.
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
import tempfile
import threading
from collections.abc import Callable
from typing import NamedTuple

from tidemill.protocol.contract import EngineError, EngineStats
from tidemill.protocol.stall import BEAT_SECONDS

STACKS_SIGNAL = signal.SIGUSR1
"""Signal that makes an engine process print the stacks of its threads, for a bug report."""

_PAGE = struct.Struct("=QQQQ")


class LivenessCounts(NamedTuple):
    """Growing counters: `beats` of the thread, `turns` of the event loop, the engine's steps.

    `turns` stops while the event loop is blocked, `steps` and `layers` while no step runs.
    """

    beats: int = 0
    turns: int = 0
    steps: int = 0
    layers: int = 0


class LivenessPage:
    """Shared memory page behind a file descriptor, which may be closed once mapped."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, _PAGE.size)

    @staticmethod
    def new_fd() -> int:
        """Return the descriptor of an empty page, for a child process to inherit."""
        if hasattr(os, "memfd_create"):  # needs neither a folder nor a disk
            fd = os.memfd_create("tidemill-liveness")
            os.truncate(fd, _PAGE.size)
            return fd
        with tempfile.TemporaryFile() as file:
            file.write(bytes(_PAGE.size))
            file.flush()
            return os.dup(file.fileno())

    def read(self) -> LivenessCounts:
        """Return the last written counters."""
        return LivenessCounts(*_PAGE.unpack_from(self._memory))

    def write(self, life: LivenessCounts) -> None:
        """Write the counters."""
        _PAGE.pack_into(self._memory, 0, *life)


class LivenessWriter:
    """Writes the heartbeat to the page from a thread; the event loop counts its own `turns`."""

    def __init__(self, page: LivenessPage) -> None:
        self._page = page
        self._stats: Callable[[], EngineStats] | None = None
        self.turns = 0

    def start(self) -> None:
        """Start the thread, which runs until the process ends."""
        threading.Thread(target=self._beat, name="tidemill-heartbeat", daemon=True).start()

    def follow(self, stats: Callable[[], EngineStats]) -> None:
        """Write the steps of this engine from now on."""
        self._stats = stats

    def _beat(self) -> None:
        pause, life = threading.Event(), LivenessCounts()
        while True:
            stats = EngineStats()
            if self._stats is not None:
                try:
                    stats = self._stats()
                except EngineError:
                    return  # the engine is gone; the loop reports it
            life = LivenessCounts(life.beats + 1, self.turns, stats.steps, stats.layers)
            self._page.write(life)
            pause.wait(BEAT_SECONDS)

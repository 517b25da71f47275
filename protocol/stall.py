"""Stall: an engine with requests and without progress, defined once for all commands."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

STALL_SECONDS: Final = 600.0
"""Default of `--stall-seconds`. A healthy engine is silent for less: 300 s in which ranks wait for
one that compiles kernels, or three attempts of a minute each to fetch an audio file."""

START_SECONDS: Final = 3600.0
"""Default limit for loading a model. Workers have another one, because they fetch weights first."""

SLOW_LOOP_FACTOR: Final = 5
"""Factor of the limit for a blocked event loop in a live process, which is slow but not dead."""

BEAT_SECONDS: Final = 0.25
"""Interval of the heartbeat of an engine process."""

_LIVE_SECONDS: Final = 4 * BEAT_SECONDS
_BLOCKED_SECONDS: Final = BEAT_SECONDS
_MAX_TICK_SECONDS: Final = 1.0


class StallClock:
    """Decides when an engine has stalled, from the observations at each tick.

    It counts ticks instead of reading a clock: an engine is not to blame for the time in which its
    observer was stopped or busy.
    """

    def __init__(self, stall_seconds: float) -> None:
        self.tick_seconds = min(_MAX_TICK_SECONDS, stall_seconds / 4)
        self._stall_seconds = stall_seconds
        self._stalled = self._slow = 0.0
        self._since_beat = self._since_turn = 0.0
        self._beats = self._turns = 0
        self._work: Hashable = None

    def note_tick(self, num_requests: int, work: Hashable, *, beats: int, turns: int) -> str | None:
        """Count one tick; return the reason if the engine has stalled, else None.

        `work` changes with any progress: a row, a part of a stream, a step, or a layer of a step.
        `beats` increases while the engine's process is alive, `turns` while its event loop runs.
        """
        tick = self.tick_seconds
        self._since_beat = 0.0 if beats != self._beats else self._since_beat + tick
        self._since_turn = 0.0 if turns != self._turns else self._since_turn + tick
        self._beats, self._turns = beats, turns
        if not num_requests or work != self._work:
            self._stalled = self._slow = 0.0
            self._work = work
        elif self._since_beat < tick + _LIVE_SECONDS and self._since_turn >= _BLOCKED_SECONDS:
            self._slow += tick
        else:
            self._stalled += tick
        requests = f"{num_requests:,} request{'s' * (num_requests != 1)} in the engine"
        if self._stalled > self._stall_seconds:
            return f"no step has finished for {self._stall_seconds:g} s, with {requests}"
        if self._slow > SLOW_LOOP_FACTOR * self._stall_seconds:
            seconds = SLOW_LOOP_FACTOR * self._stall_seconds
            return f"its event loop has been blocked for {seconds:g} s, with {requests}"
        return None

"""How long to go on after faults that may pass."""

from __future__ import annotations

import time
from collections.abc import Callable

from cli.errors import Unreachable
from cli.terminal import duration, say

# Of one request of a command that a person waits for, and of a batch that runs for hours.
SHORT_SECONDS = 15.0
LONG_SECONDS = 900.0

_FIRST_SECONDS = 0.5
_MOST_SECONDS = 15.0
_TOLD_SECONDS = 2.0

Pause = Callable[[float], object]


def pause(seconds: float) -> None:
    """Sleep; tests put something else in its place."""
    time.sleep(seconds)


class Patience:
    """Waits between tries, twice as long each time, until it has waited `seconds` in all.

    Where a server says how long to wait, that counts; for longer than an hour nobody waits.
    """

    def __init__(self, seconds: float, wait: Pause | None = None) -> None:
        self._seconds = seconds
        self._wait = wait or pause
        self._waited = 0.0
        self._next = _FIRST_SECONDS

    def reset(self) -> None:
        """Begin anew: something went well."""
        self._waited, self._next = 0.0, _FIRST_SECONDS

    def bear(self, fault: str, asked_seconds: float | None = None) -> None:
        """Wait until the next try; raises Unreachable with the fault when it lasts too long."""
        fault = fault.rstrip(".")  # more is said behind it
        if asked_seconds is not None:
            self._bear_what_is_asked(fault, asked_seconds)
            return
        if self._waited + self._next > self._seconds:
            raise Unreachable(fault)
        self._pause(fault, self._next)
        self._waited += self._next
        self._next = min(2 * self._next, _MOST_SECONDS)

    def _bear_what_is_asked(self, fault: str, seconds: float) -> None:
        """Wait as the server says, whose saying so shows that it is there."""
        if self._waited + seconds > max(self._seconds, LONG_SECONDS):
            raise Unreachable(f"{fault}; it asks to come back in {duration(seconds)}")
        self._pause(fault, max(seconds, _FIRST_SECONDS))
        self._waited += seconds

    def _pause(self, fault: str, seconds: float) -> None:
        if seconds >= _TOLD_SECONDS:
            say(f"{fault}; trying again in {seconds:g} s")
        self._wait(seconds)

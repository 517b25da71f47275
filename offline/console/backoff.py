"""Retry with exponential backoff, honouring `Retry-After`."""

from __future__ import annotations

import time
from collections.abc import Callable

from tidemill.net.backoff import exponential_delay

from .errors import Unreachable
from .terminal import duration, log

# Retry limits for an interactive request, and for a batch that runs for hours.
SHORT_SECONDS = 15.0
LONG_SECONDS = 900.0

_FIRST_SECONDS = 0.5
_MOST_SECONDS = 15.0
_LOGGED_SECONDS = 2.0

Pause = Callable[[float], object]


def sleep(seconds: float) -> None:
    """Sleep; replaced in tests."""
    time.sleep(seconds)


class Backoff:
    """Exponential backoff between attempts, `seconds` in total.

    The server's `Retry-After` replaces the delay, within a separate limit.
    """

    def __init__(self, seconds: float, wait: Pause | None = None) -> None:
        self._seconds = seconds
        self._wait = wait or sleep
        self._waited = 0.0
        self._num_delays = 0

    def reset(self) -> None:
        """Start over, after a success."""
        self._waited, self._num_delays = 0.0, 0

    def wait(self, fault: str, retry_after: float | None = None) -> None:
        """Wait before the next attempt; raises Unreachable when the time is used up."""
        fault = fault.rstrip(".")  # the message continues after it
        if retry_after is not None:
            self._wait_retry_after(fault, retry_after)
            return
        delay = exponential_delay(self._num_delays, _FIRST_SECONDS, most=_MOST_SECONDS)
        if self._waited + delay > self._seconds:
            raise Unreachable(fault)
        self._pause(fault, delay)
        self._waited += delay
        self._num_delays += 1

    def _wait_retry_after(self, fault: str, seconds: float) -> None:
        """Wait for `Retry-After`, up to `LONG_SECONDS` in total, because the server is alive."""
        if self._waited + seconds > max(self._seconds, LONG_SECONDS):
            raise Unreachable(f"{fault}; it requests a retry after {duration(seconds)}")
        self._pause(fault, max(seconds, _FIRST_SECONDS))
        self._waited += seconds

    def _pause(self, fault: str, seconds: float) -> None:
        if seconds >= _LOGGED_SECONDS:
            log(f"{fault}; retrying in {seconds:g} s")
        self._wait(seconds)

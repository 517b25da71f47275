"""Attempts at a step that fails: again as it was, then in halves, until one request is to blame."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Literal

from engine.errors import MachineFailed

# So many failures that passed among so many steps are no accidents any more.
MAX_PASSING_FAILURES = 8
PASSING_WINDOW_STEPS = 64


@dataclass(frozen=True, slots=True)
class Attempts:
    """Failures of one step so far; `is_half` where it is a half of one that failed.

    `num_failures` are those in a row with nothing run in between: that every second run fails, of
    whatever it may be, must not look like anybody's fault.
    """

    num_failures: int = 0
    has_failed: bool = False
    is_half: bool = False

    def failed(self) -> Attempts:
        """Count one more."""
        return replace(self, num_failures=self.num_failures + 1, has_failed=True)

    def next_for(self, num_requests: int) -> Literal["again", "halves", "blame"]:
        """Return what follows for a step of so many requests."""
        if num_requests > 1:
            return "halves" if self.is_half or self.num_failures > 1 else "again"
        return "blame" if self.num_failures > 1 else "again"


HALF = Attempts(is_half=True)


class Reliability:
    """Judges a device by the failures that pass: each costs nobody anything, many are a verdict."""

    def __init__(self) -> None:
        self._num_good = 0
        self._passed_at: deque[int] = deque(maxlen=MAX_PASSING_FAILURES)  # after so many good steps

    def note_good(self, attempts: Attempts | None = None) -> None:
        """Count a step that went well, after such attempts at it."""
        self._num_good += 1
        if attempts is not None and attempts.has_failed:
            self._passed_at.append(self._num_good)

    def check(self) -> None:
        """Raise `MachineFailed` where too many failures passed: numbers may be wrong as well."""
        passed = self._passed_at
        if len(passed) < MAX_PASSING_FAILURES or passed[-1] - passed[0] >= PASSING_WINDOW_STEPS:
            return
        raise MachineFailed(
            f"the device cannot be relied on: {MAX_PASSING_FAILURES} steps failed within "
            f"{PASSING_WINDOW_STEPS}, and went well when they were run again"
        )

"""What a local cloud does about those of its processes that end by themselves."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from localstack.processes import Processes

MAX_TRIES = 5
# What has worked for so long starts anew with its tries.
_STEADY_SECONDS = 120.0
_CANNOT_WORK = 2  # the exit status of a setting that cannot be: it will not be better next time


@dataclass(slots=True)
class Tries:
    """How often in a row something has ended; it is started again later each time."""

    started_at: float
    num_ended: int = 0
    start_at: float | None = None

    def seconds_to_next(self, now: float) -> float | None:
        """Take note of an end; return how long to wait before the next start, None for none."""
        if now - self.started_at >= _STEADY_SECONDS:
            self.num_ended = 0
        self.num_ended += 1
        if self.num_ended > MAX_TRIES:
            return None
        seconds = 2.0 ** (self.num_ended - 1)
        self.start_at = now + seconds
        return seconds

    def is_due(self, now: float) -> bool:
        """Say whether it is time for the next start, and take note of that start."""
        if self.start_at is None or now < self.start_at:
            return False
        self.started_at, self.start_at = now, None
        return True


@dataclass(slots=True)
class Workers:
    """The workers of a cloud, each of which is started again when it ends, and then given up.

    `say` is told in one line each time; `given_up` says why, by name.
    """

    processes: Processes
    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    given_up: dict[str, str] = field(default_factory=dict)
    _tries: dict[str, Tries] = field(default_factory=dict)

    def tend(self) -> None:
        """Look after all of them; called about every second."""
        now = self.clock()
        for name, process in list(self.processes.processes.items()):
            tries = self._tries.setdefault(name, Tries(now))
            if name in self.given_up or process.poll() is None:
                continue
            if tries.start_at is None:
                self._take_note(name, process.returncode, tries)
            elif tries.is_due(now):
                self.processes.start(name, *map(str, process.args))  # type: ignore[arg-type]

    def _take_note(self, name: str, status: int, tries: Tries) -> None:
        reason = why_ended(status, self.processes.log_of(name))
        seconds = tries.seconds_to_next(self.clock()) if status != _CANNOT_WORK else None
        if seconds is not None:
            self.say(f"{name} ended: {reason}; starting it again in {seconds:g} s")
            return
        self.given_up[name] = reason
        often = "" if status == _CANNOT_WORK else f" {tries.num_ended} times in a row"
        log = self.processes.folder / f"{name}.log"
        self.say(
            f"{name} ended{often} and is not started again: {reason}. Batches of its model wait; "
            f"API and dashboard go on. Its log is {log}"
        )


def why_ended(status: int, log: str) -> str:
    """Return why a process ended in a few words: the signal, or what it last complained of."""
    if status < 0:
        with suppress(ValueError):
            return f"killed by {signal.Signals(-status).name}"
    complaint = ""
    for line in log.splitlines():
        with suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, dict) and event.get("level") in {"ERROR", "CRITICAL"}:
                reason = event.get("reason")
                complaint = str(event.get("message")) + (f": {reason}" if reason else "")
        if line.startswith("tidemill: "):
            complaint = line.removeprefix("tidemill: ")
    return complaint or f"exited with status {status}"

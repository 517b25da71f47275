"""Watchdog process: ends the child processes of an owner that was killed.

    python localstack/watchdog.py SECONDS < PIPE

The owner writes a line for each process group: `+PID` when it has started one and `-PID` when that
has ended. When the pipe closes, the owner has ended: the remaining processes are terminated, and
killed if that takes longer than SECONDS. It uses the standard library only, to start fast and
stay small.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

_POLL_SECONDS = 0.1


class Watchdog:
    """Context manager whose registered process groups end with this process, in any case."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(  # noqa: S603 - our own command
            [sys.executable, "-S", str(Path(__file__).resolve()), str(self._seconds)],
            stdin=subprocess.PIPE,
            # Signals to the owner's group must not reach it.
            start_new_session=True,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def register(self, pid: int) -> None:
        """Register a process group."""
        self._send(f"+{pid}")

    def unregister(self, pid: int) -> None:
        """Unregister a group that has ended: its number may be reused."""
        self._send(f"-{pid}")

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the watchdog was killed
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()


def kill_process_groups(groups: set[int], seconds: float) -> None:
    """Terminate process groups, and kill them after `seconds`."""
    left = _signal_groups(groups, signal.SIGTERM)
    deadline = time.monotonic() + seconds
    while left and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        left = _signal_groups(left, 0)
    _signal_groups(left, signal.SIGKILL)


def _signal_groups(groups: set[int], number: int) -> set[int]:
    """Send a signal to each group; return those that existed."""
    there = set()
    for group in groups:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)
            there.add(group)
    return there


def main() -> None:
    """Read the owner's lines until the pipe closes, then end the remaining groups."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    kill_process_groups(groups, float(sys.argv[1]))


if __name__ == "__main__":
    main()

"""Ends processes whose owner was killed, which could not do it any more.

    python localstack/guard.py SECONDS < PIPE

The owner writes a line for each process group: `+PID` when it has started one and `-PID` when that
has ended. When the pipe ends, so has the owner: what is left is told to end, and is killed when
that takes longer than SECONDS. Standard library only, so that it starts at once and stays small.
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

_LOOK_SECONDS = 0.1


class Guard:
    """A context manager: what it was told of ends when this process does, however that happens."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(  # noqa: S603 - our own command
            [sys.executable, "-S", str(Path(__file__).resolve()), str(self._seconds)],
            stdin=subprocess.PIPE,
            # Signals for the owner's group are not for it.
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

    def watch(self, pid: int) -> None:
        """Take the process group of this number into the guard."""
        self._tell(f"+{pid}")

    def forget(self, pid: int) -> None:
        """Leave it alone from now on: it has ended, and its number may be another's."""
        self._tell(f"-{pid}")

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # somebody has killed the guard
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()


def end_groups(groups: set[int], seconds: float) -> None:
    """End process groups: politely, and by force after so many seconds."""
    left = _signalled(groups, signal.SIGTERM)
    deadline = time.monotonic() + seconds
    while left and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
        left = _signalled(left, 0)
    _signalled(left, signal.SIGKILL)


def _signalled(groups: set[int], number: int) -> set[int]:
    """Send a signal to each; return those that were there to get it."""
    there = set()
    for group in groups:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)
            there.add(group)
    return there


def main() -> None:
    """Follow what the owner says to its end, and end what it has left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    end_groups(groups, float(sys.argv[1]))


if __name__ == "__main__":
    main()

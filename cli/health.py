"""Health check of a worker's container: `python -m tidemill.cli.health`.

A worker with `--health-file` touches that file every few seconds from the thread that does its
work. A hanging, frozen or dead process does not touch it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

VARIABLE = "TIDEMILL_HEALTH_FILE"
MAX_AGE_SECONDS = 60.0

_BEAT_SECONDS = 5.0


class Heartbeat:
    """Heartbeat of a process: `beat` touches a file, if there is one."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._beat_at = -_BEAT_SECONDS

    def beat(self) -> None:
        """Touch the file unless it was touched seconds ago; ignore disk errors."""
        now = time.monotonic()
        if self._path is None or now < self._beat_at + _BEAT_SECONDS:
            return
        self._beat_at = now
        with suppress(OSError):
            self._path.touch()

    @asynccontextmanager
    async def beating(self) -> AsyncIterator[None]:
        """Beat inside the context, as long as the event loop is not blocked."""
        import asyncio  # imported late: every command loads this module

        task = asyncio.create_task(self._beat_for_ever())
        try:
            yield
        finally:
            task.cancel()

    async def _beat_for_ever(self) -> None:
        import asyncio

        while True:
            self.beat()
            await asyncio.sleep(_BEAT_SECONDS)


def find_problem(path: Path, now: float) -> str | None:
    """Return the problem of the worker that touches a file, or None."""
    try:
        age = now - path.stat().st_mtime
    except OSError as exc:
        return f"no worker has touched {path}: {exc.strerror}"
    if age > MAX_AGE_SECONDS:
        return f"the worker has not touched {path} for {age:.0f} s"
    return None


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Print the worker's state; return 0 if it is alive, otherwise 1."""
    name = next(iter(arguments), environment.get(VARIABLE))
    words = find_problem(Path(name), time.time()) if name else f"{VARIABLE} is not set"
    sys.stdout.write(f"{words or 'alive'}\n")
    return 0 if words is None else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))

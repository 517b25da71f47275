"""Child processes that end together, each with a separate log file."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from localstack.watchdog import Watchdog
from tidemill.handler.fleet.last_error import last_error

ROOT = Path(__file__).parent.parent
_STOP_SECONDS = 70


class Processes:
    """A context manager that ends every process it has started.

    `environment` is added to our own for each; each logs to `folder/<name>.log`. With a
    `watchdog` they also end when this process is killed.
    """

    def __init__(
        self, environment: Mapping[str, str], folder: Path, watchdog: Watchdog | None = None
    ) -> None:
        self.environment = dict(environment)
        self._watchdog = watchdog
        self.folder = folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self, name: str, *command: str, **environment: str) -> subprocess.Popen[bytes]:
        """Start or restart a process of this name; its log is continued."""
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(  # noqa: S603 - our own command
                command,
                cwd=ROOT,
                env={**os.environ, **self.environment, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C is for the user's process, which ends its own processes.
                start_new_session=True,
            )
        if self._watchdog is not None:
            self._watchdog.register(process.pid)
        self.processes[name] = process
        return process

    def read_log(self, name: str) -> str:
        """Return what a process has logged so far."""
        return (self.folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")

    def forget(self, name: str) -> None:
        """Stop tracking a process that has ended; its log stays."""
        process = self.processes.pop(name)
        if self._watchdog is not None:
            self._watchdog.unregister(process.pid)

    def stop(self) -> None:
        """End every process: politely, and by force if that takes long or is interrupted."""
        for process in self.processes.values():
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + _STOP_SECONDS
        try:
            for process in self.processes.values():
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.1, deadline - time.monotonic()))
        finally:
            for process in self.processes.values():
                process.kill()
                process.wait()


def exit_reason(status: int, log: str) -> str:
    """Return the reason of a process's exit in a few words: the signal, or its last error."""
    if status < 0:
        with suppress(ValueError):
            return f"killed by {signal.Signals(-status).name}"
    return last_error(log.splitlines()) or f"exited with status {status}"

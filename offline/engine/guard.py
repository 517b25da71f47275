"""Guard: starts a guard process and sends it heartbeats as long as this process can run Python."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Self

from ..console.terminal import log
from .guard_process import LIMIT

_STDERR = 2
_EXIT_SECONDS = 5.0


class Guard:
    """Guard of this process; it exits on `close`, or when this process exits.

    `advice` is printed if the guard has to kill this process with SIGKILL (exit status 137).
    """

    def __init__(self, advice: str) -> None:
        self._advice = advice
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        script = Path(__file__).with_name("guard_process.py")
        command = [sys.executable, "-I", "-S", str(script), str(os.getpid()), self._advice]
        try:
            faulthandler.register(signal.SIGUSR1, file=_STDERR)
            self._process = subprocess.Popen(  # noqa: S603 - our own script
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, bufsize=0
            )
            assert self._process.stdin is not None
            os.set_blocking(self._process.stdin.fileno(), False)
        except OSError as exc:
            log(f"note: a call that blocks the whole process will not be detected: {exc}")
        return self

    def beat(self, limit: float) -> None:
        """Send a heartbeat, with the time in seconds until the next one is due."""
        process = self._process
        if process is not None and process.stdin is not None:
            with suppress(OSError, ValueError):  # the guard was killed, or is closed
                process.stdin.write(LIMIT.pack(limit))

    def close(self) -> None:
        """End the guard process. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        faulthandler.unregister(signal.SIGUSR1)
        assert process.stdin is not None
        with suppress(OSError):
            process.stdin.close()
        try:
            process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def __exit__(self, *_: object) -> None:
        self.close()

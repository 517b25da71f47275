"""Guard process: kills its parent when that process can no longer run Python code.

Native code that holds the interpreter lock blocks every thread of its process, including signal
handlers. Run as a script that imports nothing from this package, it starts in milliseconds.
"""

from __future__ import annotations

import os
import select
import signal
import struct
import sys
import time
from pathlib import Path
from typing import NoReturn

LIMIT = struct.Struct("=d")
"""A heartbeat: the seconds without another one after which the parent is killed."""

_TICK_SECONDS = 0.5
_INTERRUPTED_SECONDS = 10.0
_STACKS_SECONDS = 1.0
_STOPPED = "Tt"


def guard(parent: int, advice: str) -> None:
    """Wait until standard input is closed, or the next heartbeat is overdue."""
    limit, silent, is_interrupted = float("inf"), 0.0, False

    def interrupt(*_: object) -> None:
        nonlocal is_interrupted
        is_interrupted = True

    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while silent < (min(limit, _INTERRUPTED_SECONDS) if is_interrupted else limit):
        if select.select([0], [], [], min(_TICK_SECONDS, limit / 4))[0]:
            beats = os.read(0, 512 * LIMIT.size)
            if not beats:
                return
            [limit] = LIMIT.unpack(beats[-LIMIT.size :])
            silent = 0.0
        elif not _is_stopped(parent):
            silent += min(_TICK_SECONDS, limit / 4)
    if os.getppid() == parent:
        _end(parent, silent, advice)


def _is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, for example by Ctrl-Z; such time does not count."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        return False
    return stat.rpartition(")")[2].split()[0] in _STOPPED


def _end(parent: int, seconds: float, advice: str) -> None:
    words = (
        f"tidemill: the engine has stopped: native code has held Python's interpreter lock for "
        f"{seconds:g} s, so nothing else can run. {advice}\n"
    )
    os.write(2, words.encode())
    os.kill(parent, signal.SIGUSR1)  # it then prints its stacks
    time.sleep(_STACKS_SECONDS)
    os.kill(parent, signal.SIGKILL)


def main() -> NoReturn:
    """Guard the process that started this one."""
    guard(int(sys.argv[1]), sys.argv[2])
    sys.exit(0)


if __name__ == "__main__":
    main()

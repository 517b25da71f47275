"""Faults: every call that a piece of work makes in given source folders fails in turn.

A first run of the work lists its calls, including C functions. Each is then made to raise once in a
separate process, before or after its work, and the process exits as an interrupted program does:
its memory is lost.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dis import opmap
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple

ROOT: Final = Path(__file__).parent.parent
EXCEPTIONS: Final[Sequence[Callable[[], BaseException]]] = (
    MemoryError,
    lambda: RuntimeError("can't start new thread"),
    lambda: OSError(5, "Input/output error"),
    lambda: SystemExit(0),
)
HANGS: Final = 99
"""Status of work that did not end."""

_SECONDS: Final = 120.0
"""Time after which work hangs, also on a busy machine."""
_EVENTS: Final = {"call": "start", "return": "end", "c_call": "start", "c_return": "end"}


_RESUME, _YIELD = opmap["RESUME"], opmap["YIELD_VALUE"]
_STARTS: Final = (0, 1)
"""Arguments of RESUME where a function starts and where a generator continues."""


class Call(NamedTuple):
    """A called function: its file and name, and whether its start or its end fails."""

    file: str
    function: str
    event: str


class Fault(NamedTuple):
    """The call that fails, by its number from 0, and the exception."""

    call: Call
    number: int
    exception: Callable[[], BaseException]

    def __str__(self) -> str:
        name = f"{self.call.file}:{self.call.function} {self.call.event}"
        return f"{name} {self.number} {self.exception()!r}"


def run_profiled(
    work: Callable[[], int], folders: Sequence[str], fault: Fault | None = None
) -> tuple[int, Counter[Call]]:
    """Run work, and return its status and its calls in files of these folders; raise a fault in it.

    Threads that it starts are included.
    """
    with profiled(folders, fault) as counts:
        return work(), counts


@contextmanager
def profiled(folders: Sequence[str], fault: Fault | None = None) -> Iterator[Counter[Call]]:
    """Count the calls in files of these folders while entered.

    With a fault, only the calls of its function are counted, and one of them fails.
    """
    paths = tuple(str(ROOT / folder) for folder in folders)
    calls: dict[tuple[CodeType, str, str], Call | None] = {}
    codes: dict[CodeType, str | None] = {}
    counts = Counter[Call]()
    target, number = (None, 0) if fault is None else fault[:2]

    def profile(frame: FrameType, event: str, value: Any) -> None:
        code = frame.f_code
        if code in codes:
            file = codes[code]
        else:
            real = os.path.realpath(code.co_filename)
            is_ours = real.startswith(paths) and code.co_name != "<module>"
            file = codes[code] = os.path.relpath(real, ROOT) if is_ours else None
        if file is None or event not in _EVENTS or _is_await(frame, event):
            return
        function = value.__name__ if event.startswith("c_") else ""
        key = (code, event, function)
        call = calls.get(key)
        if call is None:
            name = f"{code.co_qualname} > {function}" if function else code.co_qualname
            call = calls[key] = Call(file, name, _EVENTS[event])
        counts[call] += 1
        if call == target and fault is not None and counts[call] == number + 1:
            raise fault.exception()

    caller, _, called = ("", "", "") if target is None else target.function.partition(" > ")

    def profile_target(frame: FrameType, event: str, value: Any) -> None:
        # Few instructions: it runs for every call of the process.
        if frame.f_code.co_qualname == caller and event.startswith("c_") == bool(called):
            profile(frame, event, value)

    profiling = profile if fault is None else profile_target
    threading.setprofile(profiling)
    sys.setprofile(profiling)
    try:
        yield counts
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def _is_await(frame: FrameType, event: str) -> bool:
    """Say whether an event is a wait within a call instead of its start or end."""
    code, place = frame.f_code.co_code, frame.f_lasti
    if event == "return":  # of a yield, Python 3.13 names the instruction that follows
        return code[place] in (_YIELD, _RESUME)
    is_start = code[place] == _RESUME and code[place + 1] & 3 in _STARTS  # else it goes on, or ends
    return event == "call" and not is_start


def faults_of(counts: Counter[Call], *, one_in: int = 1) -> Iterator[Fault]:
    """Yield faults at the first, a middle and the last of each call's numbers, or at some of them.

    The exceptions take turns.
    """
    place = 0
    for call, count in sorted(counts.items()):
        for number in sorted({0, count // 2, count - 1}):
            if place % one_in == 0:
                yield Fault(call, number, EXCEPTIONS[place // one_in % len(EXCEPTIONS)])
            place += 1


def in_process(work: Callable[[], int], stderr: Path) -> int:
    """Return the exit status of work in a separate process; HANGS if it does not end."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork with threads
        pid = os.fork()
    if pid == 0:
        status = 98
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            fd = os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(fd, 2)
            sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
            status = work()
        except SystemExit as exc:
            status = exc.code if isinstance(exc.code, int) else 1
        except BaseException:  # noqa: BLE001 - an exception that nothing has caught, as in a program
            import traceback

            os.write(2, traceback.format_exc().encode())
            status = 97
        finally:
            os._exit(status)
    return _wait(pid)


def _wait(pid: int) -> int:
    deadline = time.monotonic() + _SECONDS
    fd = os.pidfd_open(pid)
    try:
        ends = select.poll()  # select() takes no descriptor above 1023
        ends.register(fd, select.POLLIN)
        ended = ends.poll(1000 * max(0.0, deadline - time.monotonic()))
        if not ended:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    finally:
        os.close(fd)
    return HANGS if not ended else os.waitstatus_to_exitcode(status)

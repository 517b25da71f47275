"""SIGINT and SIGTERM: the first asks the run to end well, the second ends it at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, NoReturn, Self, TypeVar

from cli.errors import Stopped

if TYPE_CHECKING:
    from concurrent.futures import Future

_Made = TypeVar("_Made")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Python may miss a signal that comes right before it begins to wait, and waits on.
_HEARD_WITHIN_SECONDS = 0.5


def hear_from_the_start() -> None:
    """Let a signal end this process at once and in one line, until a command has its own way.

    Python's would be a traceback of whatever was being imported. One that was ignored when the
    process started stays ignored, as under nohup.
    """
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _frame: _end_at_once(number))
    told = sys.unraisablehook

    def tell(unraisable: sys.UnraisableHookArgs) -> None:
        # Raised where Python cannot raise, such as in a destructor: it would be lost.
        if isinstance(unraisable.exc_value, Stopped):
            _end_at_once(unraisable.exc_value.signum)
        told(unraisable)

    sys.unraisablehook = tell


def leave(status: int) -> NoReturn:
    """End this process without waiting for threads, or for destructors of what they still use.

    Libraries of models abort when they are taken apart while one of their threads runs.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def interruptible(make: Callable[[], _Made]) -> _Made:
    """Return what a function makes in a thread of its own, which a signal does not wait for.

    Raised in the middle of native code, as when a model loads, Stopped would be lost or abort; and
    a read that never ends may begin right after the signal came.
    """
    from concurrent.futures import Future, wait

    made: Future[_Made] = Future()

    def work() -> None:
        try:
            made.set_result(make())
        except BaseException as exc:  # noqa: BLE001 - raised again where it is waited for
            made.set_exception(exc)

    threading.Thread(target=work, name="interruptible", daemon=True).start()
    while not made.done():
        wait((made,), _HEARD_WITHIN_SECONDS)
    return made.result()


def _end_at_once(number: int) -> NoReturn:
    with suppress(OSError):
        os.write(2, f"tidemill: stopped by {signal.Signals(number).name}\n".encode())
    # A worker without work has been stopped in order; docs/worker.md.
    os._exit(0 if sys.argv[1:2] == ["worker"] else 128 + number)


class StopSignals:
    """While entered, the first signal raises Stopped in the main thread, or calls a listener.

    In the middle of an import it ends the process instead: native code that is being set up
    swallows what is raised in it, or aborts. `answer` is said at once, `words` when all has ended.
    """

    def __init__(self, words: str | None = None, *, answer: str | None = None) -> None:
        self.received: int | None = None
        self._words = words
        self._answer = answer
        self._listener: Callable[[], object] | None = None
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            previous = signal.getsignal(number)
            if previous is not signal.SIG_IGN:
                self._previous[number] = previous
                signal.signal(number, self._receive)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)  # type: ignore[arg-type]

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            os._exit(128 + number)
        self.received = number
        if self._answer is not None:
            with suppress(OSError):  # not by `sys.stderr`, which may be in the middle of a write
                os.write(2, f"tidemill: {self._answer}\n".encode())
        if self._listener is not None:
            self._listener()
        elif _is_importing(frame):
            _end_at_once(number)
        elif self._words is None:
            raise Stopped(number)
        else:
            raise Stopped(number, self._words)

    @contextmanager
    def heard_by(self, listener: Callable[[], object]) -> Iterator[None]:
        """Call `listener` at the first signal instead of raising; it runs inside the handler."""
        self._listener = listener
        try:
            yield
        finally:
            self._listener = None


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False

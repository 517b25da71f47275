"""SIGINT and SIGTERM: the first starts a graceful stop, the second ends the process."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, NoReturn, Self, TypeVar

from .errors import Stopped

if TYPE_CHECKING:
    from concurrent.futures import Future

_Made = TypeVar("_Made")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Python may miss a signal right before a wait starts, so waits are short.
_POLL_SECONDS = 0.5


def install_early_handlers() -> None:
    """Install handlers that end the process with one line, until a command installs its own.

    Python's default prints a traceback of the current import. A signal that was ignored at startup
    stays ignored, as under nohup.
    """
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _frame: _end_at_once(number))
    previous = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        # Raised in a destructor, for example, where Python would swallow it.
        if isinstance(unraisable.exc_value, Stopped):
            _end_at_once(unraisable.exc_value.signum)
        previous(unraisable)

    sys.unraisablehook = hook


def end_process(status: int) -> NoReturn:
    """Exit without waiting for threads or destructors.

    Model libraries abort if they are torn down while one of their threads runs.
    """
    for stream in filter(None, (sys.stdout, sys.stderr)):  # one that is closed is None
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def interruptible(
    make: Callable[[], _Made], on_poll: Callable[[float], None] = lambda _seconds: None
) -> _Made:
    """Call a function in a thread and return its result; signals interrupt the wait.

    If Stopped were raised inside native code, as in a model load, it would be lost or abort; and an
    endless read may start right after the signal. `on_poll` is called during the wait with the
    seconds since its last call; if it raises, the wait ends, but the thread continues.
    """
    from concurrent.futures import Future, wait

    made: Future[_Made] = Future()

    def work() -> None:
        try:
            made.set_result(make())
        except BaseException as exc:  # noqa: BLE001 - raised again by the waiting thread
            made.set_exception(exc)

    threading.Thread(target=work, name="interruptible", daemon=True).start()
    while not made.done():
        wait((made,), _POLL_SECONDS)
        on_poll(_POLL_SECONDS)
    return made.result()


def _end_at_once(number: int) -> NoReturn:
    with suppress(OSError):
        os.write(2, f"tidemill: stopped by {signal.Signals(number).name}\n".encode())
    # An orderly stop for an idle worker and for a launcher; see docs/reference/worker.md.
    os._exit(0 if sys.argv[1:2] in (["worker"], ["launcher"]) else 128 + number)


class StopSignals:
    """Context in which the first signal raises Stopped in the main thread, or calls a listener.

    During an import, it ends the process instead, because native modules swallow exceptions or
    abort during initialisation. `answer` is printed immediately, `words` at the end.
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
            with suppress(OSError):  # not `sys.stderr`, which may be in the middle of a write
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
    def on_signal(self, listener: Callable[[], object]) -> Iterator[None]:
        """Call `listener` in the signal handler at the first signal, instead of raising."""
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

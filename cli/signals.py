"""SIGINT and SIGTERM: the first asks the run to end well, the second ends it at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Self

from cli.errors import Stopped

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """While entered, the first signal raises Stopped in the main thread, or calls a listener.

    A signal that was ignored when the process started stays ignored, as under nohup.
    """

    def __init__(self) -> None:
        self.received: int | None = None
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

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if self.received is not None:
            os._exit(128 + number)
        self.received = number
        if self._listener is None:
            raise Stopped(number)
        self._listener()

    @contextmanager
    def heard_by(self, listener: Callable[[], object]) -> Iterator[None]:
        """Call `listener` at the first signal instead of raising; it runs inside the handler."""
        self._listener = listener
        try:
            yield
        finally:
            self._listener = None

"""Hosted engine: an engine in a host process, shared by the processes of an executor."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, Final

from tidemill.engine.child_command import module_command
from tidemill.engine_process.frames import (
    Failed,
    FrameError,
    Ready,
    Row,
    Run,
    encode_frame,
)

from ..engine_process import max_inflight, too_long_row
from ..errors import EngineDied
from ..in_flight import Sent
from .sockets import Wire, connect, locked

_IDLE_SECONDS: Final = 60.0
_GONE: Final = "the host of the engine has ended"
# The host's engine has its own clock for the rows' timestamps.
_HOST_TIME: Final = 0


class HostedEngine:
    """A connection to the engine at a socket; starts a host if there is none.

    Methods may be called from any thread; they raise EngineDied once host or engine has ended.
    """

    def __init__(self, address: str, options: Mapping[str, Any], env: Mapping[str, str]) -> None:
        with locked(address):
            self._wire = _connect(address) or _start(address, options, env)
        self._tickets = count(1)
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[Row]] = {}
        self._started: Future[int] = Future()
        self._died: str | None = None
        threading.Thread(target=self._read_all, name="tidemill-host", daemon=True).start()

    @property
    def is_dead(self) -> bool:
        """Return whether its host or engine has ended."""
        return self._died is not None

    def max_inflight(self) -> int:
        """Wait for the model, and return the number of requests that keeps the engine busy."""
        return self._started.result()

    def send_line(self, number: int, data: bytes) -> Sent[Row]:
        """Send a line; its future gets the row, or EngineDied."""
        future: Future[Row] = Future()
        ticket = next(self._tickets)
        try:
            frame = encode_frame(Run(ticket, number, _HOST_TIME, data))
        except FrameError as exc:
            future.set_result(too_long_row(number, data, exc))
            return Sent(future, len(data))
        with self._lock:
            if self._died is not None:
                raise EngineDied(self._died)
            self._waiting[ticket] = future
            try:
                self._wire.send(frame)
            except OSError:  # the reader then ends the wait, with the reason if it is known
                self._wire.shut_down()
        return Sent(future, len(data))

    def _read_all(self) -> None:
        reason = _GONE
        try:
            reason = self._read_to_death()
        except OSError:
            pass
        except BaseException as exc:  # noqa: BLE001 - callers would wait forever
            reason = f"the answers of the engine cannot be read: {type(exc).__name__}: {exc}"
        self._end(reason)

    def _read_to_death(self) -> str:
        """Resolve the futures of answers until the engine dies; return the reason."""
        while (frame := self._wire.receive()) is not None:
            match frame:
                case Row():
                    self._resolve(frame)
                case Ready():
                    self._started.set_result(max_inflight(frame.info))
                case Failed():
                    return frame.message
                case _:
                    raise FrameError(f"unexpected {type(frame).__name__} frame")
        return _GONE

    def _end(self, reason: str) -> None:
        """Fail all waiting futures with the reason."""
        with self._lock:
            self._died = reason
            waiting, self._waiting = self._waiting, {}
        with suppress(InvalidStateError):  # it was started
            self._started.set_exception(EngineDied(reason))
        for future in waiting.values():
            with suppress(InvalidStateError):  # it was cancelled
                future.set_exception(EngineDied(reason))
        self._wire.close()

    def _resolve(self, row: Row) -> None:
        future = self._waiting.get(row.ticket)
        if future is None:  # the row that a caller waits for may be this one
            raise FrameError(f"a row for an unknown request, {row.ticket}")
        with suppress(InvalidStateError):  # it was cancelled
            future.set_result(row)
        with self._lock:  # only now: `_end` passes earlier failures to waiting futures
            del self._waiting[row.ticket]


def _connect(address: str) -> Wire | None:
    """Return a connection that the host has registered; None if there is no host."""
    try:
        wire = connect(address)
    except OSError:
        return None
    with suppress(OSError, FrameError):
        if wire.receive() is not None:
            return wire
    wire.close()
    return None


def _start(address: str, options: Mapping[str, Any], env: Mapping[str, str]) -> Wire:
    Path(address).unlink(missing_ok=True)  # left by a killed host
    command = module_command(
        "tidemill.sdk.integrations.engine_host", address, str(_IDLE_SECONDS), json.dumps(options)
    )
    host = subprocess.Popen(  # noqa: S603 - our own module
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env={**os.environ, **env}
    )
    assert host.stdout is not None
    with host.stdout as output:
        output.readline()
    wire = _connect(address)
    if wire is None:
        raise EngineDied("the engine's host did not start: its standard error contains the reason")
    return wire

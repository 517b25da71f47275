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
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any, Final

from tidemill.engine.child_command import module_command

from ..engine_process import AnsweredRow
from ..errors import EngineDied
from ..in_flight import Sent
from .engine_host import DIED, LINE, MESSAGE, READY, ROW
from .sockets import locked, shut_down

_IDLE_SECONDS: Final = 60.0
_GONE: Final = "the host of the engine has ended"


class HostedEngine:
    """A connection to the engine at a socket; starts a host if there is none.

    Methods may be called from any thread; they raise EngineDied once host or engine has ended.
    """

    def __init__(self, address: str, options: Mapping[str, Any], env: Mapping[str, str]) -> None:
        with locked(address):
            self._connection = _connect(address) or _start(address, options, env)
        self._tickets = count(1)
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[AnsweredRow]] = {}
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

    def send_line(self, number: int, data: bytes) -> Sent[AnsweredRow]:
        """Send a line; its future gets the row, or EngineDied."""
        future: Future[AnsweredRow] = Future()
        with self._lock:
            if self._died is not None:
                raise EngineDied(self._died)
            ticket = next(self._tickets)
            self._waiting[ticket] = future
            try:
                self._connection.send_bytes(LINE.pack(ticket, number) + data)
            except OSError:
                shut_down(
                    self._connection
                )  # the reader then ends the wait, with the reason if it is known
        return Sent(future, len(data))

    def _read_all(self) -> None:
        reason = _GONE
        try:
            reason = self._read_to_death()
        except (EOFError, OSError):
            pass
        except BaseException as exc:  # noqa: BLE001 - callers would wait forever
            reason = f"the answers of the engine cannot be read: {type(exc).__name__}: {exc}"
        self._end(reason)

    def _read_to_death(self) -> str:
        """Resolve the futures of answers until the engine dies; return the reason."""
        while True:
            message = self._connection.recv_bytes()
            kind, ticket = MESSAGE.unpack_from(message)
            data = message[MESSAGE.size :]
            if kind == DIED:
                return data.decode()
            if kind == READY:
                self._started.set_result(ticket)
            else:
                self._resolve(ticket, kind, data)

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
        self._connection.close()

    def _resolve(self, ticket: int, kind: int, data: bytes) -> None:
        future = self._waiting[ticket]
        with suppress(InvalidStateError):  # it was cancelled
            future.set_result(AnsweredRow(kind == ROW, data))
        with self._lock:  # only now: `_end` passes earlier failures to waiting futures
            del self._waiting[ticket]


def _connect(address: str) -> Connection | None:
    """Return a connection that the host has registered; None if there is no host."""
    try:
        connection: Connection = Client(address, family="AF_UNIX")
        connection.recv_bytes()
    except (OSError, EOFError):
        return None
    return connection


def _start(address: str, options: Mapping[str, Any], env: Mapping[str, str]) -> Connection:
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
    connection = _connect(address)
    if connection is None:
        raise EngineDied("the engine's host did not start: its standard error contains the reason")
    return connection

"""Engine host: a process with one engine, which several processes of a machine share over a socket.

Spark runs each task of an executor in a process, but the model is loaded only once. The host exits
when no process has been connected for a while, or its engine has died. In that case, each
connection gets the reason, and the next process to connect starts another host.
Messages of the host: an empty one after it has registered the connection; READY, with the number of
requests that keeps the engine busy, after the model is loaded; a row per line; finally DIED with a
reason.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, Listener
from queue import SimpleQueue
from typing import Final

from ..engine import Engine
from ..engine_process import AnsweredRow, EngineProcess
from ..errors import TidemillError
from .sockets import locked, shut_down

LINE: Final = struct.Struct("!QQ")
"""Ticket and number of a line, before its bytes."""

MESSAGE: Final = struct.Struct("!BQ")
"""Kind and ticket of a message, before its data; the ticket of READY is a number of requests."""

ROW, FAILED_ROW, READY, DIED = range(4)

_FLUSH_SECONDS: Final = 5.0


class EngineHost:
    """Answers the lines of all connections with one engine."""

    def __init__(self, process: EngineProcess) -> None:
        self._process = process
        self._changed = threading.Condition()
        self._served: set[ServedConnection] = set()
        self._died: str | None = None

    @property
    def is_needed(self) -> bool:
        """Return whether there are connections and the engine is alive."""
        with self._changed:
            return bool(self._served) and self._died is None

    def accept_all(self, listener: Listener) -> None:
        """Serve each connection in separate threads, until the listener is closed."""
        try:
            while (connection := _accept(listener)) is not None:
                served = ServedConnection(connection)
                with self._changed:
                    self._served.add(served)
                threading.Thread(target=self._serve, args=(served,), daemon=True).start()
        except BaseException as exc:  # noqa: BLE001 - a connecting process would wait forever
            self.end(f"its host no longer accepts connections: {type(exc).__name__}: {exc}")

    def wait_until_idle(self, idle_seconds: float) -> None:
        """Wait until there were no connections for `idle_seconds`, or the engine has died."""
        with self._changed:
            while self._died is None:
                if self._served:
                    self._changed.wait()
                elif not self._changed.wait(idle_seconds) and not self._served:
                    return

    def close(self) -> None:
        """Send the reason of the engine's death to every connection."""
        with self._changed:
            left = list(self._served)
        for served in left:
            served.send(MESSAGE.pack(DIED, 0) + (self._died or "it is closed").encode())
            served.close()

    def _serve(self, served: ServedConnection) -> None:
        try:
            served.send(b"")
            served.send(MESSAGE.pack(READY, self._process.max_inflight()))
            for line in served.lines():
                ticket, number = LINE.unpack_from(line)
                future = self._process.send_line(number, line[LINE.size :]).future
                served.answer_with(future, partial(self._message, ticket))
        except TidemillError as exc:
            self.end(str(exc))
            return
        except BaseException as exc:  # noqa: BLE001 - its process would wait forever
            self.end(f"its host failed: {type(exc).__name__}: {exc}")
            return
        served.close()
        with self._changed:
            self._served.discard(served)
            self._changed.notify_all()

    def _message(self, ticket: int, answered: Future[AnsweredRow]) -> bytes:
        """Return the message of a row."""
        try:
            row = answered.result()
            return MESSAGE.pack(ROW if row.is_success else FAILED_ROW, ticket) + row.data
        except CancelledError:
            return MESSAGE.pack(DIED, ticket) + b"its connection was closed"
        except TidemillError as exc:
            reason = str(exc)
        except BaseException as exc:  # noqa: BLE001 - without a message, its process would wait forever
            reason = f"a line has no row: {type(exc).__name__}: {exc}"
        self.end(reason)
        return MESSAGE.pack(DIED, ticket) + reason.encode()

    def end(self, reason: str) -> None:
        """Record the reason why no more lines can be answered; `wait_until_idle` then returns."""
        with self._changed:
            self._died = self._died or reason
            self._changed.notify_all()


class ServedConnection:
    """A connection, its running lines, and the thread that sends its messages.

    A client that does not read its messages does not delay other clients.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._outgoing: SimpleQueue[bytes | None] = SimpleQueue()
        self._running: set[Future[AnsweredRow]] = set()
        self._writer = threading.Thread(target=self._send_all, daemon=True)
        self._writer.start()

    def send(self, message: bytes) -> None:
        """Queue a message for sending."""
        self._outgoing.put(message)

    def lines(self) -> Iterator[bytes]:
        """Yield received messages, until the other process has ended."""
        with suppress(EOFError, OSError):
            while True:
                yield self._connection.recv_bytes()

    def answer_with(
        self, future: Future[AnsweredRow], message_of: Callable[[Future[AnsweredRow]], bytes]
    ) -> None:
        """Send the message of a row once it is available."""

        def pass_on(answered: Future[AnsweredRow]) -> None:
            try:
                self._running.discard(answered)
                self.send(message_of(answered))
            except BaseException:
                shut_down(self._connection)  # its process would wait for this row forever
                raise

        self._running.add(future)
        future.add_done_callback(pass_on)

    def close(self) -> None:
        """Cancel running lines, and send queued messages for up to five seconds."""
        for future in list(self._running):
            future.cancel()
        self._outgoing.put(None)
        self._writer.join(_FLUSH_SECONDS)

    def _send_all(self) -> None:
        try:
            with suppress(OSError):
                while (message := self._outgoing.get()) is not None:
                    self._connection.send_bytes(message)
        finally:
            shut_down(self._connection)  # `close` alone would not wake the reading thread
            self._connection.close()


def _accept(listener: Listener) -> Connection | None:
    """Return the next connection, None once the listener is closed."""
    with suppress(OSError):
        return listener.accept()
    return None


def main(address: str, idle_seconds: str, options: str) -> None:
    """Serve an engine with these options (JSON) on a socket, until no process needs it."""
    listener = Listener(address, family="AF_UNIX", backlog=64)
    os.write(sys.stdout.fileno(), b"\n")  # the process that started it may connect
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with Engine(**json.loads(options)) as engine:
        host = EngineHost(engine.process)
        # A failed thread would leave its connection waiting forever.
        threading.excepthook = lambda failed: host.end(f"a thread failed: {failed.exc_value!r}")
        threading.Thread(target=host.accept_all, args=(listener,), daemon=True).start()
        is_needed = True
        while is_needed:
            host.wait_until_idle(float(idle_seconds))
            # No process can connect in the meantime, because that requires the same lock.
            with locked(address):
                is_needed = host.is_needed
                if not is_needed:
                    listener.close()
        host.close()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Engine host: a process with one engine that several processes of a machine share by a socket.

Spark runs the tasks of an executor in a process each, and a model is loaded once. The host ends
when no process has been connected for a while, or its engine has died: then each connection is
told why, and whoever connects next starts another host.

Messages on a connection: the host greets with an empty one once it counts the connection, and sends
READY with how many requests keep the engine busy once the model is loaded. A client sends lines;
each comes back as a row. DIED with a reason is the last message.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from multiprocessing.connection import Connection, Listener
from queue import SimpleQueue
from typing import Final

from ..python.engine import Engine
from ..python.engine_process import AnsweredRow
from ..python.errors import RequestFailed, TidemillError
from .locks import locked

LINE: Final = struct.Struct("!QQ")
"""Ticket and number of a line, before its bytes."""

MESSAGE: Final = struct.Struct("!BQ")
"""Kind and ticket of a message, before its data; of READY the ticket is a number of requests."""

ROW, FAILED_ROW, REFUSED, READY, DIED = range(5)


class EngineHost:
    """Answers the lines of all connections by one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._changed = threading.Condition()
        self._num_connections = 0
        self._is_dead = False

    def add(self, connection: Connection) -> None:
        """Serve a connection in threads of its own."""
        with self._changed:
            self._num_connections += 1
        threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def wait_until_idle(self, idle_seconds: float) -> None:
        """Wait until there is no connection for so long, or the engine has died."""
        with self._changed:
            while not self._is_dead:
                if self._num_connections:
                    self._changed.wait()
                elif not self._changed.wait(idle_seconds) and not self._num_connections:
                    return

    @property
    def is_needed(self) -> bool:
        """Whether a connection is there, and an engine for it."""
        with self._changed:
            return bool(self._num_connections) and not self._is_dead

    def _serve(self, connection: Connection) -> None:
        outgoing: SimpleQueue[bytes | None] = SimpleQueue()
        writer = threading.Thread(target=_send_all, args=(connection, outgoing), daemon=True)
        running: set[Future[AnsweredRow]] = set()
        try:
            outgoing.put(b"")
            writer.start()
            limit = self._engine.process.max_inflight()
            outgoing.put(MESSAGE.pack(READY, limit))
            while True:
                self._answer(connection.recv_bytes(), outgoing, running)
        except (EOFError, OSError):
            pass  # its process has ended
        except TidemillError as exc:
            outgoing.put(MESSAGE.pack(DIED, 0) + str(exc).encode())
            self._end()
        finally:
            for future in list(running):
                future.cancel()
            outgoing.put(None)
            writer.join()
            connection.close()
            with self._changed:
                self._num_connections -= 1
                self._changed.notify_all()

    def _answer(
        self,
        message: bytes,
        outgoing: SimpleQueue[bytes | None],
        running: set[Future[AnsweredRow]],
    ) -> None:
        ticket, number = LINE.unpack_from(message)
        future = self._engine.process.send_line(number, message[LINE.size :]).future
        running.add(future)

        def pass_on(answered: Future[AnsweredRow]) -> None:
            running.discard(answered)
            outgoing.put(self._message_of(ticket, answered))

        future.add_done_callback(pass_on)

    def _message_of(self, ticket: int, answered: Future[AnsweredRow]) -> bytes:
        try:
            row = answered.result()
        except CancelledError:
            return MESSAGE.pack(REFUSED, ticket) + b"it was cancelled"
        except RequestFailed as exc:
            return MESSAGE.pack(REFUSED, ticket) + exc.message.encode()
        except TidemillError as exc:
            self._end()
            return MESSAGE.pack(DIED, ticket) + str(exc).encode()
        return MESSAGE.pack(ROW if row.is_success else FAILED_ROW, ticket) + row.data

    def _end(self) -> None:
        with self._changed:
            self._is_dead = True
            self._changed.notify_all()


def _send_all(connection: Connection, outgoing: SimpleQueue[bytes | None]) -> None:
    """Send messages until None; a client that stops reading keeps nobody else waiting."""
    with suppress(OSError):
        while (message := outgoing.get()) is not None:
            connection.send_bytes(message)


def _accept_all(listener: Listener, add: Callable[[Connection], None]) -> None:
    with suppress(OSError):  # it is closed
        while True:
            add(listener.accept())


def main(address: str, idle_seconds: str, options: str) -> None:
    """Serve an engine of these options (JSON) at a socket, until nobody needs it."""
    listener = Listener(address, family="AF_UNIX", backlog=64)
    os.write(sys.stdout.fileno(), b"\n")  # whoever started it may connect
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with Engine(**json.loads(options)) as engine:
        host = EngineHost(engine)
        threading.Thread(target=_accept_all, args=(listener, host.add), daemon=True).start()
        while True:
            host.wait_until_idle(float(idle_seconds))
            # Nobody can connect meanwhile, as that takes the same lock.
            with locked(address):
                if not host.is_needed:
                    listener.close()
                    return


if __name__ == "__main__":
    main(*sys.argv[1:])

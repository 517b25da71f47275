"""Engine host: a process with one engine, which several processes of a machine share over a socket.

Spark runs each task of an executor in a process, but the model is loaded only once. The host exits
when no process has been connected for a while, or its engine has died. In that case, each
connection gets the reason, and the next process to connect starts another host.
The wire is `engine_process.frames`: the host sends Stats once it has registered the connection,
Ready once the model is loaded, a Row for each Run, and finally Failed.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Final

from tidemill.engine_process.client import EngineDied
from tidemill.engine_process.frames import (
    Failed,
    Frame,
    FrameError,
    Ready,
    Row,
    Run,
    Stats,
    encode_frame,
)
from tidemill.protocol.contract import EngineStats

from ..engine import Engine
from ..engine_process import EngineProcess
from ..errors import TidemillError
from .sockets import Wire, listen, locked

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

    def accept_all(self, listener: socket.socket) -> None:
        """Serve each connection in separate threads, until the listener is closed."""
        try:
            while (connection := _accept(listener)) is not None:
                served = ServedConnection(Wire(connection))
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
            served.send(_failed(self._died or "it is closed"))
            served.close()

    def _serve(self, served: ServedConnection) -> None:
        try:
            served.send(Stats(EngineStats()))
            served.send(Ready(self._process.info()))
            for run in served.runs():
                future = self._process.send_line(run.number, run.data).future
                served.answer_with(future, partial(self._reply, run.ticket))
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

    def _reply(self, ticket: int, answered: Future[Row]) -> Frame:
        """Return the frame for a line's outcome."""
        try:
            return answered.result()._replace(ticket=ticket)
        except CancelledError:
            return _failed("its connection was closed")
        except TidemillError as exc:
            reason = str(exc)
        except BaseException as exc:  # noqa: BLE001 - without a frame, its process would wait forever
            reason = f"a line has no row: {type(exc).__name__}: {exc}"
        self.end(reason)
        return _failed(reason)

    def end(self, reason: str) -> None:
        """Record the reason why no more lines can be answered; `wait_until_idle` then returns."""
        with self._changed:
            self._died = self._died or reason
            self._changed.notify_all()


class ServedConnection:
    """A connection, its running lines, and the thread that sends its frames.

    A client that does not read its frames does not delay other clients.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._outgoing: SimpleQueue[Frame | None] = SimpleQueue()
        self._running: set[Future[Row]] = set()
        self._writer = threading.Thread(target=self._send_all, daemon=True)
        self._writer.start()

    def send(self, frame: Frame) -> None:
        """Queue a frame for sending."""
        self._outgoing.put(frame)

    def runs(self) -> Iterator[Run]:
        """Yield received lines, until the other process has ended or sends another frame."""
        with suppress(OSError, FrameError):
            while isinstance(frame := self._wire.receive(), Run):
                yield frame

    def answer_with(self, future: Future[Row], reply_of: Callable[[Future[Row]], Frame]) -> None:
        """Send the frame for a line's outcome once it is known."""

        def pass_on(answered: Future[Row]) -> None:
            try:
                self._running.discard(answered)
                self.send(reply_of(answered))
            except BaseException:
                self._wire.shut_down()  # its process would wait for this row forever
                raise

        self._running.add(future)
        future.add_done_callback(pass_on)

    def close(self) -> None:
        """Cancel running lines, and send queued frames for up to five seconds."""
        for future in list(self._running):
            future.cancel()
        self._outgoing.put(None)
        self._writer.join(_FLUSH_SECONDS)

    def _send_all(self) -> None:
        try:
            with suppress(OSError):
                while (frame := self._outgoing.get()) is not None:
                    self._wire.send(encode_frame(frame))
        finally:
            self._wire.close()


def _failed(reason: str) -> Failed:
    return Failed(reason, EngineDied.code)


def _accept(listener: socket.socket) -> socket.socket | None:
    """Return the next connection, None once the listener is closed."""
    try:
        return listener.accept()[0]
    except OSError:
        if listener.fileno() >= 0:
            raise
        return None


def main(address: str, idle_seconds: str, options: str) -> None:
    """Serve an engine with these options (JSON) on a socket, until no process needs it."""
    listener = listen(address)
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
                    Path(address).unlink(missing_ok=True)
        host.close()


if __name__ == "__main__":
    main(*sys.argv[1:])

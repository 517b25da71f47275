"""Connections: how long one may say nothing, how long its heads may be, how long it may stall."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from pydantic_core import to_json
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from engine.protocol.bodies import error_body
from engine.protocol.errors import RequestError
from server.settings import ServerSettings

MAX_HEAD_BYTES = 64 * 2**10
# Lingering: after an answer that came before the whole request, what is still sent is thrown away
# for so long, and so long without a byte. A connection that ends with unread bytes is reset, and
# its client, which reads only once it has sent all, loses the answer.
_LINGER_SECONDS: Final = 30.0
_LINGER_IDLE_SECONDS: Final = 5.0


class Connection(HttpToolsProtocol):
    """One connection: ended where no head comes, one is no HTTP, or its answer is not read."""

    def __init__(self, settings: ServerSettings, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._settings = settings
        self._timer: asyncio.TimerHandle | None = None  # of a head, or of what is thrown away
        self._stall: asyncio.TimerHandle | None = None
        self._idle_bytes = 0  # since the last byte of a body, or the last head
        self._is_in_message = False
        self._linger_ends: float | None = None
        self._is_closing = False  # as soon as the request has come
        self._is_refused = False  # it is no HTTP: nothing more is parsed
        self._unanswered: list[RequestResponseCycle] = []  # more than one where they are pipelined

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first head."""
        super().connection_made(transport)
        self._wait(self._settings.header_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing any more."""
        self._wait(None)
        if self._stall is not None:
            self._stall.cancel()
        self._drop_requests()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on, unless what comes is neither a head that ends nor a body."""
        if self._linger_ends is not None:
            self._wait_for_rest(self._linger_ends)
        elif not self._is_in_message and self._timer is None:
            self._wait(self._settings.header_seconds)
        if self._is_refused:
            return
        self._idle_bytes += len(data)
        super().data_received(data)
        if self._idle_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The head of the request is too long.")

    def on_headers_complete(self) -> None:
        """Begin with a request; one that wants another protocol is refused."""
        if self.transport.is_closing():
            raise ValueError("the connection has ended")
        self._is_in_message, self._idle_bytes = True, 0
        self._wait(None)
        if self.parser.should_upgrade():
            raise ValueError("this server speaks HTTP/1.1 alone")
        super().on_headers_complete()
        answers = _Lingering(self.transport, self.close_after_request)
        # It has all of a transport that an answer needs.
        self.cycle.transport = answers  # type: ignore[assignment]
        waiting = [cycle for cycle in self._unanswered if not cycle.response_complete]
        self._unanswered = [*waiting, self.cycle]

    def on_body(self, body: bytes) -> None:
        """Take more of a body."""
        self._idle_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Expect the next head once there is more."""
        self._is_in_message, self._idle_bytes, self._linger_ends = False, 0, None
        self._wait(None)
        if self._is_closing:
            self.transport.close()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Throw the rest of a request away that was answered before it had come."""
        super().on_response_complete()
        if self._is_in_message and not self.pipeline:
            self._linger()

    def close_after_request(self) -> None:
        """End the connection after its answer, once the whole request has come."""
        if not self._is_in_message:
            self.transport.close()
            return
        self._drop_requests()
        self._is_closing = True
        self._end_writing()
        self._linger()

    def pause_writing(self) -> None:
        """Begin to wait for a client that does not read."""
        super().pause_writing()
        self._stall = self.loop.call_later(self._settings.stall_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """Go on with one that does."""
        super().resume_writing()
        if self._stall is not None:
            self._stall.cancel()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, in OpenAI's form, and end the connection."""
        self._is_refused = True
        if self._is_closing or self.transport.is_closing():
            return  # after its answer
        body = to_json(error_body(RequestError(msg, code="invalid_http")))
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(STATUS_LINE[400] + head % len(body) + body)
        self._drop_requests()  # nobody reads what else would be answered
        self._is_closing = True
        self._end_writing()
        self._linger()

    def _drop_requests(self) -> None:
        """End the work on all requests of a client that reads no answer any more."""
        self.pipeline.clear()
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()
        self._unanswered = []

    def _end_writing(self) -> None:
        """Tell the client that no more comes, where that can be said before it has sent all."""
        if self.transport.can_write_eof():  # not under TLS
            self.transport.write_eof()

    def _linger(self) -> None:
        """Begin to throw away what comes."""
        self.flow.resume_reading()  # pipelined requests, or a large body, may have paused it
        self._unset_keepalive_if_required()
        self._linger_ends = self.loop.time() + _LINGER_SECONDS
        self._wait_for_rest(self._linger_ends)

    def _wait_for_rest(self, ends: float) -> None:
        self._wait(max(0.0, min(_LINGER_IDLE_SECONDS, ends - self.loop.time())))

    def _wait(self, seconds: float | None) -> None:
        """End the connection unless something comes within so many seconds."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._end)

    def _end(self) -> None:
        if self._linger_ends is None:
            self.transport.abort()
        else:
            self.transport.close()


class _Lingering:
    """The transport of one answer: closed by the connection, which may have more to read."""

    __slots__ = ("close", "is_closing", "write")

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write, self.is_closing, self.close = transport.write, transport.is_closing, close


def connections_of(settings: ServerSettings) -> Any:
    """Return what makes the connections of a server."""
    return partial(Connection, settings)

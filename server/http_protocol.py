"""HTTP protocol of a connection: timeouts for headers and stalled readers, lingering close."""

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

from tidemill.protocol.bodies import error_body
from tidemill.protocol.errors import RequestError

from .settings import ServerSettings

MAX_HEAD_BYTES = 64 * 2**10
# Lingering close: when a response is sent before the whole request has arrived, the rest of the
# request is discarded, up to the first limit in all and the second one without a byte. Closing with
# unread bytes would reset the connection, and a client that sends everything before it reads would
# lose the response.
_LINGER_SECONDS: Final = 30.0
_LINGER_IDLE_SECONDS: Final = 5.0


class Connection(HttpToolsProtocol):
    """One connection; closed on a header timeout, bad HTTP or a response that is not read."""

    def __init__(self, settings: ServerSettings, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._settings = settings
        self._timer: asyncio.TimerHandle | None = None  # of the headers, or of the lingering close
        self._stall: asyncio.TimerHandle | None = None
        self._idle_bytes = 0  # since the last byte of a body, or the last headers
        self._is_in_message = False
        self._linger_ends: float | None = None
        self._is_closing = False  # closes once the whole request has arrived
        self._is_refused = False  # bad HTTP: nothing more is parsed
        self._unanswered: list[RequestResponseCycle] = []  # more than one if pipelined

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the header timeout."""
        super().connection_made(transport)
        self._wait(self._settings.header_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers and cancel the requests."""
        self._wait(None)
        if self._stall is not None:
            self._stall.cancel()
        self._cancel_requests()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse more bytes; refuses headers that are too long."""
        if self._linger_ends is not None:
            self._wait_for_rest(self._linger_ends)
        elif not self._is_in_message and self._timer is None:
            self._wait(self._settings.header_seconds)
        if self._is_refused:
            return
        self._idle_bytes += len(data)
        super().data_received(data)
        if self._idle_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The request's headers are too long.")

    def on_headers_complete(self) -> None:
        """Start a request; refuses protocol upgrades."""
        if self.transport.is_closing():
            raise ValueError("the connection has ended")
        self._is_in_message, self._idle_bytes = True, 0
        self._wait(None)
        if self.parser.should_upgrade():
            raise ValueError("this server supports only HTTP/1.1")
        super().on_headers_complete()
        answers = _LingeringTransport(self.transport, self.close_after_request)
        # It implements the part of a transport that a response needs.
        self.cycle.transport = answers  # type: ignore[assignment]
        waiting = [cycle for cycle in self._unanswered if not cycle.response_complete]
        self._unanswered = [*waiting, self.cycle]

    def on_body(self, body: bytes) -> None:
        """Feed a chunk of the body."""
        self._idle_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Wait for the next request of a keep-alive connection."""
        self._is_in_message, self._idle_bytes, self._linger_ends = False, 0, None
        self._wait(None)
        if self._is_closing:
            self.transport.close()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Discard the rest of a request that was answered early."""
        super().on_response_complete()
        if self._is_in_message and not self.pipeline:
            self._linger()

    def close_after_request(self) -> None:
        """Close the connection after its response, once the whole request has arrived."""
        if not self._is_in_message:
            self.transport.close()
            return
        self._cancel_requests()
        self._is_closing = True
        self._end_writing()
        self._linger()

    def pause_writing(self) -> None:
        """Start the stall timeout for a client that does not read (backpressure)."""
        super().pause_writing()
        self._stall = self.loop.call_later(self._settings.stall_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop the stall timeout."""
        super().resume_writing()
        if self._stall is not None:
            self._stall.cancel()

    def send_400_response(self, msg: str) -> None:
        """Refuse bad HTTP in OpenAI's format, and close the connection."""
        self._is_refused = True
        if self._is_closing or self.transport.is_closing():
            return  # after its response
        body = to_json(error_body(RequestError(msg, code="invalid_http")))
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(STATUS_LINE[400] + head % len(body) + body)
        self._cancel_requests()  # the client reads no further responses
        self._is_closing = True
        self._end_writing()
        self._linger()

    def _cancel_requests(self) -> None:
        """Cancel all requests of a client that no longer reads responses."""
        self.pipeline.clear()
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()
        self._unanswered = []

    def _end_writing(self) -> None:
        """Send EOF to the client, where the transport can half-close."""
        if self.transport.can_write_eof():  # not under TLS
            self.transport.write_eof()

    def _linger(self) -> None:
        """Start to discard incoming bytes."""
        self.flow.resume_reading()  # pipelined requests, or a large body, may have paused it
        self._unset_keepalive_if_required()
        self._linger_ends = self.loop.time() + _LINGER_SECONDS
        self._wait_for_rest(self._linger_ends)

    def _wait_for_rest(self, ends: float) -> None:
        self._wait(max(0.0, min(_LINGER_IDLE_SECONDS, ends - self.loop.time())))

    def _wait(self, seconds: float | None) -> None:
        """Set the timer that closes the connection; None clears it."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._end)

    def _end(self) -> None:
        if self._linger_ends is None:
            self.transport.abort()
        else:
            self.transport.close()


class _LingeringTransport:
    """Transport of one response; closing it starts the lingering close."""

    __slots__ = ("close", "is_closing", "write")

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write, self.is_closing, self.close = transport.write, transport.is_closing, close


def protocol_factory(settings: ServerSettings) -> Any:
    """Return the protocol class for uvicorn, bound to the settings."""
    return partial(Connection, settings)

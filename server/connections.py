"""Connections: how long one may say nothing, how long its headers may be, how long it may stall."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from server.settings import ServerSettings

MAX_HEAD_BYTES = 64 * 2**10


class Connection(HttpToolsProtocol):
    """One connection, closed where a request's head does not come, or its answer is not read."""

    def __init__(self, settings: ServerSettings, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._settings = settings
        self._deadline: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._is_in_head = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first head."""
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing any more."""
        for timer in (self._deadline, self._stall):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on, unless a head is too long."""
        if self._is_in_head:
            if self._deadline is None:
                self._expect_head()
            self._head_bytes += len(data)
        super().data_received(data)
        if self._is_in_head and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse_head()

    def on_headers_complete(self) -> None:
        """Begin with a request."""
        self._is_in_head = False
        self._head_bytes = 0
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Expect the next head behind it."""
        super().on_message_complete()
        self._is_in_head = True

    def pause_writing(self) -> None:
        """Begin to wait for a client that does not read."""
        super().pause_writing()
        self._stall = self.loop.call_later(self._settings.stall_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """Go on with one that does."""
        super().resume_writing()
        if self._stall is not None:
            self._stall.cancel()

    def _expect_head(self) -> None:
        self._deadline = self.loop.call_later(self._settings.header_seconds, self.transport.abort)

    def _refuse_head(self) -> None:
        self.send_400_response("The request's head is too long.")


def connections_of(settings: ServerSettings) -> Any:
    """Return what makes the connections of a server."""
    return partial(Connection, settings)

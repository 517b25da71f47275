"""Answers in pieces: each is sent as soon as it is there, until nobody reads any more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from pydantic_core import to_json
from starlette.types import Message, Receive, Send

from server.clients import while_here

EVENTS = b"text/event-stream; charset=utf-8"
COMMENT = b": waiting\n\n"
DONE = b"data: [DONE]\n\n"


async def send_pieces(
    pieces: AsyncGenerator[bytes, None],
    media_type: bytes,
    receive: Receive,
    send: Send,
    *,
    comment_seconds: float | None = None,
) -> None:
    """Send an answer piece by piece.

    Where nothing was sent for `comment_seconds`, a comment of server-sent events is, so that
    proxies keep the connection. Raises `ClientGone`, with the pieces closed, once nobody reads.
    """
    headers = [
        (b"content-type", media_type),
        (b"cache-control", b"no-cache"),
        # Proxies would else wait for more before they pass anything on.
        (b"x-accel-buffering", b"no"),
    ]

    async def sent() -> None:
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async with _Commented(send, comment_seconds) as told:
            async for piece in pieces:
                await told(_body(piece))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async with aclosing(pieces):
        await while_here(receive, sent())


class _Commented:
    """Sends what it is given, and while it is entered a comment wherever nothing came for long."""

    def __init__(self, send: Send, seconds: float | None) -> None:
        self._send = send
        self._seconds = seconds
        self._clock = asyncio.get_running_loop().time
        self._sent_at = self._clock()
        self._is_sending = False
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Send:
        if self._seconds is not None:
            self._task = asyncio.create_task(self._comment(self._seconds))
        return self._tell

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _tell(self, message: Message) -> None:
        self._is_sending = True
        await self._send(message)
        self._sent_at, self._is_sending = self._clock(), False

    async def _comment(self, seconds: float) -> None:
        while True:
            left = self._sent_at + seconds - self._clock()
            if left > 0:
                await asyncio.sleep(left)
            elif self._is_sending:  # to somebody who reads slowly
                await asyncio.sleep(seconds)
            else:
                await self._tell(_body(COMMENT))


def _body(piece: bytes) -> Message:
    return {"type": "http.response.body", "body": piece, "more_body": True}


async def events(chunks: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[bytes, None]:
    """Yield each chunk as a server-sent event, and in the end the one that says so."""
    async with aclosing(chunks):
        async for chunk in chunks:
            is_long = any(choice.get("prompt_logprobs") for choice in chunk.get("choices", ()))
            yield await asyncio.to_thread(event, chunk) if is_long else event(chunk)
    yield DONE


def event(chunk: object) -> bytes:
    """Return a chunk as a server-sent event."""
    return b"data: %b\n\n" % to_json(chunk)

"""Answers in pieces: each is sent as soon as it is there, until nobody reads any more."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from pydantic_core import to_json
from starlette.types import Receive, Send

from server.clients import while_here

EVENTS = b"text/event-stream; charset=utf-8"
_DONE = b"data: [DONE]\n\n"


async def send_pieces(
    pieces: AsyncGenerator[bytes, None], media_type: bytes, receive: Receive, send: Send
) -> None:
    """Send an answer piece by piece.

    Raises `ClientGone`, with the pieces closed, once nobody reads.
    """
    headers = [
        (b"content-type", media_type),
        (b"cache-control", b"no-cache"),
        # Proxies would else wait for more before they pass anything on.
        (b"x-accel-buffering", b"no"),
    ]

    async def sent() -> None:
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async with aclosing(pieces):
        await while_here(receive, sent())


async def events(chunks: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[bytes, None]:
    """Yield each chunk as a server-sent event, and in the end the one that says so."""
    async with aclosing(chunks):
        async for chunk in chunks:
            yield b"data: %b\n\n" % to_json(chunk)
    yield _DONE

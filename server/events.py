"""Answers in pieces, as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from pydantic_core import to_json
from starlette.types import Receive, Send

from server.clients import while_here

_DONE = b"data: [DONE]\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Proxies would else wait for more before they pass anything on.
    (b"x-accel-buffering", b"no"),
]


async def send_events(
    chunks: AsyncGenerator[dict[str, Any], None], receive: Receive, send: Send
) -> None:
    """Send each chunk as an event as soon as it is there, then that all is done.

    Raises `ClientGone`, with the chunks closed, once nobody reads.
    """
    async with aclosing(chunks):
        await while_here(receive, _sent(chunks, send))


async def _sent(chunks: AsyncGenerator[dict[str, Any], None], send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
    async for chunk in chunks:
        event = b"data: %b\n\n" % to_json(chunk)
        await send({"type": "http.response.body", "body": event, "more_body": True})
    await send({"type": "http.response.body", "body": _DONE, "more_body": False})

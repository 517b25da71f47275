"""Server-sent events (SSE): streamed responses with keep-alive comments."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from pydantic_core import to_json
from starlette.types import Message, Receive, Send

from tidemill.batch.file.rows import escape_separators
from tidemill.protocol.json_printing import has_more_values, print_json
from tidemill.protocol.responses.response import failed_body

from .disconnect import run_until_disconnect

MEDIA_TYPE = b"text/event-stream; charset=utf-8"
COMMENT = b": waiting\n\n"
DONE = b"data: [DONE]\n\n"

_SHORT_VALUES = 1_000


async def stream_response(
    chunks: AsyncGenerator[bytes, None],
    media_type: bytes,
    receive: Receive,
    send: Send,
    *,
    comment_seconds: float | None = None,
) -> None:
    """Send a response chunk by chunk, without buffering.

    After `comment_seconds` of silence an SSE comment is sent, so that proxies keep the connection.
    Raises `ClientDisconnected`, with `chunks` closed, when the client disconnects.
    """
    headers = [
        (b"content-type", media_type),
        (b"cache-control", b"no-cache"),
        # Proxies would buffer the stream otherwise.
        (b"x-accel-buffering", b"no"),
    ]

    async def send_all() -> None:
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async with _KeepAliveComments(send, comment_seconds) as send_message:
            async for chunk in chunks:
                await send_message(_body(chunk))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async with aclosing(chunks):
        await run_until_disconnect(receive, send_all())


class _KeepAliveComments:
    """Sends messages, and a keep-alive comment after each silence while entered."""

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
        return self._send_message

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _send_message(self, message: Message) -> None:
        self._is_sending = True
        await self._send(message)
        self._sent_at, self._is_sending = self._clock(), False

    async def _comment(self, seconds: float) -> None:
        while True:
            left = self._sent_at + seconds - self._clock()
            if left > 0:
                await asyncio.sleep(left)
            elif self._is_sending:  # to a slow reader
                await asyncio.sleep(seconds)
            else:
                await self._send_message(_body(COMMENT))


def _body(chunk: bytes) -> Message:
    return {"type": "http.response.body", "body": chunk, "more_body": True}


async def named_events(
    chunks: AsyncGenerator[dict[str, Any], None],
) -> AsyncGenerator[bytes, None]:
    """Yield each event of a response as a server-sent event with the name of its type.

    An error after the headers is an event too, after a `response.failed`.
    """
    number, response = 0, dict[str, Any]()
    async with aclosing(chunks):
        async for chunk in chunks:
            events = [chunk]
            if "type" not in chunk:
                error = {name: chunk["error"][name] for name in ("code", "message", "param")}
                failed = {"type": "response.failed", "response": failed_body(response, error, 500)}
                events = [failed] if response else []
                events.append({"type": "error", **error})
            for event in events:
                event.setdefault("sequence_number", number)
                yield await named_event(event)
                number = event["sequence_number"] + 1
            response = chunk.get("response", response)


async def named_event(event: dict[str, Any]) -> bytes:
    """Return an event with its name; one with many log-probabilities is printed in a thread."""
    name = event["type"].encode()
    if has_more_values(event, _SHORT_VALUES):
        return b"event: %b\n%b" % (name, await asyncio.to_thread(format_event, event, is_long=True))
    return b"event: %b\n%b" % (name, format_event(event))


async def sse_events(chunks: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[bytes, None]:
    """Yield each chunk as a server-sent event, then `[DONE]`."""
    async with aclosing(chunks):
        async for chunk in chunks:
            yield (
                await asyncio.to_thread(format_event, chunk, is_long=True)
                if _is_long(chunk)
                else format_event(chunk)
            )
    yield DONE


def format_event(chunk: object, *, is_long: bool = False) -> bytes:
    """Return a chunk as a server-sent event; one that `is_long` is printed in parts."""
    return b"data: %b\n\n" % escape_separators((print_json if is_long else to_json)(chunk))


def _is_long(chunk: dict[str, Any]) -> bool:
    """Say whether a chunk has too many log-probabilities to print within a millisecond."""
    return any(
        (choice.get("logprobs") or choice.get("prompt_logprobs"))
        and has_more_values(choice, _SHORT_VALUES)
        for choice in chunk.get("choices", ())
    )

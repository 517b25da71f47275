"""Exchanges with an engine process: requests and replies as bytes, and answering."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any, Final, NamedTuple

from pydantic_core import from_json, to_json

from tidemill.batch.file.run_line import is_being_cancelled
from tidemill.protocol.contract import EngineError, Reply, Served, StreamedReply, Usage
from tidemill.protocol.in_thread import in_thread_if_long

from .frames import Answer, AnswerKind, Ask

_LENGTHS: Final = struct.Struct("!II")  # of the header and of the body


class ExchangeRequest(NamedTuple):
    """A request: the arguments of a Responder, except the time."""

    url: str
    body: dict[str, Any]
    request_id: str


def encode_request(request: ExchangeRequest) -> bytes:
    """Return the bytes of a request; bytes in its body, such as files, stay bytes."""
    files = {name: value for name, value in request.body.items() if isinstance(value, bytes)}
    header = to_json(
        {
            "url": request.url,
            "request_id": request.request_id,
            "files": {name: len(value) for name, value in files.items()},
        }
    )
    # Separate: in the header it would be nested deeper than a parser may allow.
    body = to_json({name: value for name, value in request.body.items() if name not in files})
    return b"".join((_LENGTHS.pack(len(header), len(body)), header, body, *files.values()))


def decode_request(data: bytes) -> ExchangeRequest:
    """Return the request in these bytes."""
    lengths = _LENGTHS.unpack_from(data)
    body_start = _LENGTHS.size + lengths[0]
    start = body_start + lengths[1]
    header = from_json(data[_LENGTHS.size : body_start])
    body = from_json(data[body_start:start])
    for name, size in header["files"].items():
        body[name] = data[start : start + size]
        start += size
    return ExchangeRequest(header["url"], body, header["request_id"])


def encode_reply(reply: Reply) -> bytes:
    """Return the bytes of a complete reply."""
    # Field by field: `asdict` would copy the body, deeply.
    return to_json(
        {
            "status_code": reply.status_code,
            "body": reply.body,
            "usage": reply.usage._asdict(),
            "bare_message": reply.bare_message,
            "is_long": reply.is_long,
            "is_reused": reply.is_reused,
        }
    )


def decode_reply(data: bytes) -> Reply:
    """Return the reply in these bytes."""
    fields = from_json(data)
    return Reply(**fields | {"usage": Usage(**fields["usage"])})


async def answer_request(
    served: Served, ask: Ask, send: Callable[[Answer], Awaitable[None]]
) -> None:
    """Answer a request in frames; raise EngineError if the engine can answer no more requests.

    An engine without interactive requests answers all as rows of files.
    """
    ticket = ask.ticket
    try:
        request = await in_thread_if_long(decode_request, ask.data)
        respond = getattr(served, "answer", served.respond) if ask.is_online else served.respond
        reply: Reply | StreamedReply = await respond(
            request.url, request.body, request.request_id, ask.created
        )
        if isinstance(reply, StreamedReply):
            async with aclosing(reply.chunks) as chunks:
                async for chunk in chunks:
                    is_long = any(one.get("prompt_logprobs") for one in chunk.get("choices", ()))
                    data = await asyncio.to_thread(to_json, chunk) if is_long else to_json(chunk)
                    await send(Answer(ticket, AnswerKind.CHUNK, data))
            await send(Answer(ticket, AnswerKind.END))
        else:
            data = await asyncio.to_thread(encode_reply, reply)
            await send(Answer(ticket, AnswerKind.REPLY, data))
    except EngineError:
        raise
    except (Exception, asyncio.CancelledError) as exc:  # one request's fault must not end others
        if isinstance(exc, asyncio.CancelledError) and is_being_cancelled():
            raise
        words = f"{type(exc).__name__}: {exc}".encode("utf-8", "replace")
        await send(Answer(ticket, AnswerKind.FAULT, words))

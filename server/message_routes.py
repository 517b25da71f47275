"""Message routes: Anthropic's Messages API, answered by the model's chat."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final

from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tidemill.protocol.contract import Reply
from tidemill.protocol.routes import CHAT_COMPLETIONS, TOKENIZE
from tidemill.protocol.vendors.anthropic import chat_of_message
from tidemill.protocol.vendors.anthropic_answers import (
    message_error,
    message_of_chat,
    streamed_error,
)
from tidemill.protocol.vendors.anthropic_stream import MessageEvents

from .context import ServerContext
from .errors import MESSAGES, json_response
from .inference_routes import InferenceRoute
from .sse import named_event

# The usage of the first chunk has the number of input tokens, which comes first here.
_STREAM_OPTIONS: Final = {"include_usage": True, "continuous_usage_stats": True}


def routes(context: ServerContext) -> list[Route]:
    """Return the routes of messages."""
    return [
        Route(MESSAGES, MessageRoute(context), methods=["POST"]),
        Route(f"{MESSAGES}/count_tokens", CountRoute(context), methods=["POST"]),
    ]


class MessageRoute(InferenceRoute):
    """ASGI endpoint that answers one request for a message."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body, run the chat on the engine and send the message or its events."""
        async with self.context.body_reader.read_object(scope, receive) as body:
            chat = await asyncio.to_thread(chat_of_message, body)
            if "stream" in chat:
                chat["stream_options"] = _STREAM_OPTIONS
            await self.answer(
                CHAT_COMPLETIONS.name,
                chat,
                scope,
                receive,
                send,
                to_response=_message_response,
                to_events=message_events,
            )


class CountRoute(InferenceRoute):
    """ASGI endpoint that counts the input tokens of a request for a message."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body, tokenize the chat and send the number of tokens."""
        async with self.context.body_reader.read_object(scope, receive) as body:
            chat = await asyncio.to_thread(chat_of_message, body)
            chat.pop("stream", None)
            await self.answer(
                TOKENIZE.name, chat, scope, receive, send, to_response=_count_response
            )


async def message_events(
    chunks: AsyncGenerator[dict[str, Any], None],
) -> AsyncGenerator[bytes, None]:
    """Yield the chunks of a chat as events of a message; an error ends them."""
    events = MessageEvents()
    async with aclosing(chunks):
        async for chunk in chunks:
            if "error" in chunk:
                yield await named_event(streamed_error(chunk["error"]))
                return
            for event in events.add(chunk):
                yield await named_event(event)
    for event in events.end():
        yield await named_event(event)


async def _message_response(reply: Reply) -> Response:
    if reply.status_code != 200:
        return _error_response(reply)
    return json_response(message_of_chat(reply.body))


async def _count_response(reply: Reply) -> Response:
    if reply.status_code != 200:
        return _error_response(reply)
    return json_response({"input_tokens": reply.body["count"]})


def _error_response(reply: Reply) -> Response:
    message = reply.body["error"]["message"]
    return json_response(message_error(reply.status_code, message), reply.status_code)

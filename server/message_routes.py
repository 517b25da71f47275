"""Message routes: Anthropic's Messages API, answered by the model's chat."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any, Final

from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tidemill.protocol.contract import Reply
from tidemill.protocol.routes import CHAT_COMPLETIONS, TOKENIZE
from tidemill.protocol.vendors.anthropic import chat_of_message, error_of_message
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
                to_response=partial(_response, body, message_of_chat),
                to_events=message_events,
            )


class CountRoute(InferenceRoute):
    """ASGI endpoint that counts the input tokens of a request for a message."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body, tokenize the chat and send the number of tokens."""
        async with self.context.body_reader.read_object(scope, receive) as body:
            chat = await asyncio.to_thread(chat_of_message, body)
            chat.pop("stream", None)
            count = partial(_response, body, _count)
            await self.answer(TOKENIZE.name, chat, scope, receive, send, to_response=count)


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


def _count(body: Mapping[str, Any]) -> dict[str, Any]:
    return {"input_tokens": body["count"]}


async def _response(
    request: Mapping[str, Any],
    answer_of: Callable[[Mapping[str, Any]], dict[str, Any]],
    reply: Reply,
) -> Response:
    """Return the answer, or the error with the names of the request."""
    if reply.status_code == 200:
        return json_response(answer_of(reply.body))
    message = error_of_message(reply.body["error"]["message"], request)
    return json_response(message_error(reply.status_code, message), reply.status_code)

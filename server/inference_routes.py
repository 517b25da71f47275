"""Inference routes: JSON bodies go to the engine; replies are whole or streamed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from typing import Any

from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tidemill.protocol.bodies import error_body
from tidemill.protocol.contract import Reply, StreamedReply
from tidemill.protocol.pooling import SparseEmbedRequest
from tidemill.protocol.requests import num_sequences
from tidemill.protocol.routes import (
    CHAT_COMPLETIONS,
    CLASSIFY,
    COHERE_EMBED,
    COMPLETIONS,
    DECISIONS,
    DETOKENIZE,
    EMBEDDINGS,
    GENERATIVE_SCORING,
    MODERATIONS,
    POOLING,
    RESPONSES,
    SYSTEM_ONE,
    TOKENIZE,
)
from tidemill.protocol.stream import is_stream
from tidemill.protocol.validation import parse

from .context import ServerContext
from .disconnect import run_until_disconnect
from .errors import internal_error, printed_response, reply_response
from .request_bodies import new_request_id
from .sse import COMMENT, MEDIA_TYPE, named_events, sse_events, stream_response

_ReplyCoroutine = Coroutine[Any, Any, Reply | StreamedReply]
_ReplyTask = asyncio.Task[Reply | StreamedReply]
_ToEvents = Callable[[AsyncGenerator[dict[str, Any], None]], AsyncGenerator[bytes, None]]

_GENERATION = (
    *(CHAT_COMPLETIONS, RESPONSES, COMPLETIONS),
    *(GENERATIVE_SCORING, DECISIONS, SYSTEM_ONE),
)
_OTHERS = (EMBEDDINGS, COHERE_EMBED, CLASSIFY, MODERATIONS, POOLING, TOKENIZE, DETOKENIZE)
# In batch files any URL may end in `/score` or `/rerank`; a server needs the full paths.
_SCORES = ("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank")

EMBED_SPARSE = "/embed_sparse"
"""Path of sparse vectors in text-embeddings-inference."""

PATHS = (*(url for route in (*_GENERATION, *_OTHERS) for url in sorted(route.exact)), *_SCORES)
"""URLs with JSON bodies, as in batch files; some clients use a base URL without `/v1`."""


def routes(context: ServerContext) -> list[Route]:
    """Return the inference routes with JSON bodies."""
    sparse = Route(EMBED_SPARSE, SparseRoute(context), methods=["POST"])
    return [*(Route(path, InferenceRoute(context), methods=["POST"]) for path in PATHS), sparse]


class SparseRoute:
    """ASGI endpoint of `/embed_sparse` in the form of text-embeddings-inference."""

    def __init__(self, context: ServerContext) -> None:
        self._route = InferenceRoute(context)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body, run it as one of `/pooling` and send the pairs."""
        async with self._route.context.body_reader.read_object(scope, receive) as body:
            request = await asyncio.to_thread(parse, SparseEmbedRequest, body)
            rest = (request.pooling(), scope, receive, send)
            await self._route.answer(POOLING.name, *rest, to_response=_sparse_response)


async def _sparse_response(reply: Reply) -> Response:
    if reply.status_code != 200:
        return await reply_response(reply)
    return await printed_response([item["data"] for item in reply.body["data"]], reply)


class InferenceRoute:
    """ASGI endpoint that answers one JSON request with the engine's reply."""

    def __init__(self, context: ServerContext) -> None:
        self.context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body, run the request on the engine and send the reply."""
        async with self.context.body_reader.read_object(scope, receive) as body:
            await self.answer(scope["path"], body, scope, receive, send)

    async def answer(
        self,
        url: str,
        body: dict[str, Any],
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        to_response: Callable[[Reply], Awaitable[Response]] = reply_response,
        to_events: _ToEvents | None = None,
    ) -> None:
        """Send the engine's reply to a body for a URL.

        `to_response` formats a whole reply, and `to_events` a streamed one.
        """
        with self.context.admission.admit(num_sequences(body)):
            coroutine = self.reply(url, body, new_request_id(), int(time.time()))
            reply: Reply | StreamedReply | None
            if "stream" in body and is_stream(body):
                if to_events is None:
                    to_events = named_events if url in RESPONSES.exact else sse_events
                reply = await self._stream(coroutine, to_events, receive, send)
            else:
                reply = await run_until_disconnect(receive, coroutine)
            if isinstance(reply, Reply):
                await (await to_response(reply))(scope, receive, send)

    async def reply(
        self, url: str, body: dict[str, Any], request_id: str, created: int
    ) -> Reply | StreamedReply:
        """Return the engine's reply."""
        return await self.context.engine.answer(url, body, request_id, created)

    async def _stream(
        self, coroutine: _ReplyCoroutine, to_events: _ToEvents, receive: Receive, send: Send
    ) -> Reply | None:
        """Send the stream; return a reply that turns out whole before the headers are sent."""
        started, comment_seconds = time.monotonic(), self.context.settings.comment_seconds
        async with _reply_task(coroutine) as task:
            await run_until_disconnect(receive, _wait(task, comment_seconds))
            if task.done() and isinstance(reply := task.result(), Reply):
                return reply
            stream = self._events(task, to_events, started)
            await stream_response(
                stream, MEDIA_TYPE, receive, send, comment_seconds=comment_seconds
            )
            task.result()  # raises an error that came before the headers
        return None

    async def _events(
        self, task: _ReplyTask, to_events: _ToEvents, started: float
    ) -> AsyncGenerator[bytes, None]:
        """Yield the server-sent events; an error after the headers is an event too.

        A stream that is slow to start starts with a keep-alive comment, so its status is 200.
        """
        if not task.done():
            yield COMMENT
            await asyncio.wait({task})
        async with aclosing(to_events(self._chunks(task, started))) as stream:
            async for piece in stream:
                yield piece

    async def _chunks(
        self, task: _ReplyTask, started: float
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the chunks of an answer; an error is one."""
        if isinstance(fault := task.exception(), Exception):
            yield error_body(internal_error(fault))
        elif isinstance(reply := task.result(), Reply):
            yield reply.body
        else:
            async with aclosing(self._timed(reply.chunks, started)) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def _timed(
        self, chunks: AsyncGenerator[dict[str, Any], None], started: float
    ) -> AsyncGenerator[dict[str, Any], None]:
        metrics, is_first = self.context.metrics, True
        async with aclosing(chunks):
            async for chunk in chunks:
                now = time.monotonic()
                (metrics.first_chunk if is_first else metrics.between_chunks).observe(now - started)
                started, is_first = now, False
                yield chunk


@asynccontextmanager
async def _reply_task(
    coroutine: _ReplyCoroutine,
) -> AsyncIterator[_ReplyTask]:
    """Run the coroutine as a task; on exit cancel it and close its stream."""
    task = asyncio.create_task(coroutine)
    try:
        yield task
    finally:
        task.cancel()
        left: object = (await asyncio.gather(task, return_exceptions=True))[0]
        if isinstance(left, StreamedReply):
            await left.chunks.aclose()


async def _wait(task: _ReplyTask, seconds: float) -> None:
    await asyncio.wait({task}, timeout=seconds)

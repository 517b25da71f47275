"""Routes whose bodies go to the engine: answered whole, or in pieces."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from typing import Any

from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from engine.contract import Reply, StreamedReply
from engine.protocol.bodies import error_body
from engine.protocol.prompts import num_sequences
from engine.protocol.stream import is_stream
from server.clients import while_here
from server.errors import answered, fault_of
from server.events import COMMENT, DONE, EVENTS, event, events, send_pieces
from server.means import Means, new_request_id

_Answer = Coroutine[Any, Any, Reply | StreamedReply]
_Answering = asyncio.Task[Reply | StreamedReply]

PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/score",
    "/v1/score",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
    "/tokenize",
    "/detokenize",
)


def routes(means: Means) -> list[Route]:
    """Return the routes of requests in JSON."""
    return [Route(path, Answers(means), methods=["POST"]) for path in PATHS]


class Answers:
    """Answers one request in JSON by what the engine says at its path."""

    def __init__(self, means: Means) -> None:
        self.means = means

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body, ask the engine, and send what it answers."""
        async with self.means.bodies.read_object(scope, receive) as body:
            await self.answer(scope["path"], body, scope, receive, send)

    async def answer(
        self,
        url: str,
        body: dict[str, Any],
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        shown: Callable[[Reply], Awaitable[Response]] = answered,
    ) -> None:
        """Send what the engine answers to a body at a url; `shown` is how a whole reply looks."""
        with self.means.gate.entered(num_sequences(body)):
            answering = self.means.engine.answer(url, body, new_request_id(), int(time.time()))
            reply: Reply | StreamedReply | None
            if is_stream(body):
                reply = await self._streamed(answering, receive, send)
            else:
                reply = await while_here(receive, answering)
            if isinstance(reply, Reply):
                await (await shown(reply))(scope, receive, send)

    async def _streamed(self, answering: _Answer, receive: Receive, send: Send) -> Reply | None:
        """Send the stream that was asked for; return what is known to be none in time for that."""
        begun, patience = time.monotonic(), self.means.settings.comment_seconds
        async with _begun(answering) as task:
            await while_here(receive, _waited(task, patience))
            if task.done() and isinstance(reply := task.result(), Reply):
                return reply
            pieces = self._pieces(task, begun)
            await send_pieces(pieces, EVENTS, receive, send, comment_seconds=patience)
            task.result()  # what was no answer ends here, as it would have before the head
        return None

    async def _pieces(self, task: _Answering, begun: float) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream; what is wrong is one too, where its head was sent before.

        A stream that takes long to begin is begun with a comment, and has its status then.
        """
        if not task.done():
            yield COMMENT
            await asyncio.wait({task})
        if isinstance(fault := task.exception(), Exception):
            yield event(error_body(fault_of(fault)))
            yield DONE
            return
        if isinstance(reply := task.result(), Reply):
            yield event(reply.body)
            yield DONE
            return
        async with aclosing(events(self._timed(reply.chunks, begun))) as pieces:
            async for piece in pieces:
                yield piece

    async def _timed(
        self, chunks: AsyncGenerator[dict[str, Any], None], begun: float
    ) -> AsyncGenerator[dict[str, Any], None]:
        figures, is_first = self.means.figures, True
        async with aclosing(chunks):
            async for chunk in chunks:
                now = time.monotonic()
                (figures.first_chunk if is_first else figures.between_chunks).observe(now - begun)
                begun, is_first = now, False
                yield chunk


@asynccontextmanager
async def _begun(
    answering: _Answer,
) -> AsyncIterator[_Answering]:
    """Begin to answer; whatever has come of it is ended when this is left."""
    task = asyncio.create_task(answering)
    try:
        yield task
    finally:
        task.cancel()
        [left] = await asyncio.gather(task, return_exceptions=True)
        if isinstance(left, StreamedReply):
            await left.chunks.aclose()


async def _waited(task: _Answering, seconds: float) -> None:
    await asyncio.wait({task}, timeout=seconds)

"""Routes whose bodies go to the engine: answered whole, or in pieces."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from engine.contract import Reply, StreamedReply
from server.clients import while_here
from server.errors import answered
from server.events import EVENTS, events, send_pieces
from server.means import Means, new_request_id

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
        self, url: str, body: dict[str, Any], scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Send what the engine answers to a body at a url."""
        begun = time.monotonic()
        with self.means.gate.entered():
            answering = self.means.engine.answer(url, body, new_request_id(), int(time.time()))
            match await while_here(receive, answering):
                case Reply() as reply:
                    await (await answered(reply))(scope, receive, send)
                case StreamedReply(chunks):
                    timed = self._timed(chunks, begun)
                    await send_pieces(events(timed), EVENTS, receive, send)

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

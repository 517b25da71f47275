"""SageMaker's routes: one request, told by its fields, or lines of a file and their rows."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from io import BytesIO
from itertools import islice
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from engine.batchfile.answer import Answer, run_line
from engine.batchfile.lines import RawLine, read_lines
from engine.protocol import routes as urls
from engine.protocol.errors import RequestError
from server.answers import Answers
from server.bodies import check_type, media_type, parsed
from server.errors import as_json
from server.events import send_pieces
from server.means import Means

_JSON = "application/json"
_LINES = ("application/jsonlines", "application/x-ndjson", "application/jsonl")
_MAX_PAYLOAD_MB = 25  # of what SageMaker lets through
_MOST_AT_ONCE = 64

# What a body without a url is, by the fields that no other has.
_URLS = {
    "messages": urls.CHAT_COMPLETIONS,
    "prompt": urls.COMPLETIONS,
    "input": urls.EMBEDDINGS,
    "query": urls.RERANK,
    "text_1": urls.SCORE,
    "data_1": urls.SCORE,
    "queries": urls.SCORE,
    "file_url": urls.TRANSCRIPTIONS,
}


def routes(means: Means) -> list[Route]:
    """Return the routes that SageMaker asks for."""

    async def parameters(_: Request) -> Response:
        return as_json(
            {
                "MaxConcurrentTransforms": min(means.engine.info().max_num_seqs, _MOST_AT_ONCE),
                "BatchStrategy": "MULTI_RECORD",
                "MaxPayloadInMB": _MAX_PAYLOAD_MB,
            }
        )

    return [
        Route("/invocations", Invocations(means), methods=["POST"]),
        Route("/execution-parameters", parameters),
    ]


class Invocations(Answers):
    """Answers what an endpoint of SageMaker is asked."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read a request or lines, ask the engine, and send what it answers."""
        check_type(scope, _JSON, *_LINES)
        if media_type(scope) not in _LINES:
            async with self.means.bodies.read(scope, receive, parsed) as asked:
                await self.answer(*_read(asked), scope, receive, send)
            return
        async with self.means.bodies.read(scope, receive, _lines) as lines:
            with self.means.gate.entered():
                rows = _rows(lines, self.means)
                await send_pieces(rows, _LINES[0].encode(), receive, send)


async def _lines(data: bytes) -> Iterator[RawLine]:
    return read_lines(BytesIO(data))


def _read(body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the url of a request and its body: they may stand there as in a line."""
    url, inner = body.get("url"), body.get("body")
    if isinstance(url, str) and isinstance(inner, dict):
        return url, inner
    for field, route in _URLS.items():
        if field in body:
            return route.name, body
    raise RequestError(
        f"What is asked for? Send a body with one of {', '.join(_URLS)}, or an object with `url`"
        " and `body`.",
        code="missing_required_parameter",
    )


async def _rows(lines: Iterator[RawLine], means: Means) -> AsyncGenerator[bytes, None]:
    """Yield the row of each line, in their order; some lines run at once."""
    created, has_more = int(time.time()), True
    running: deque[asyncio.Task[Answer]] = deque()
    most = min(2 * means.engine.info().max_num_seqs, _MOST_AT_ONCE)
    try:
        while has_more or running:
            if has_more and len(running) <= most // 2:
                # In a thread: millions of blank lines may stand before the next.
                some = await asyncio.to_thread(list, islice(lines, most - len(running)))
                has_more = bool(some)
                for raw in some:
                    line = run_line(raw, means.engine, created=created)
                    running.append(asyncio.create_task(line))
                continue
            yield (await running[0]).row
            running.popleft()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

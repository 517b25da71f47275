"""SageMaker routes: `/invocations` takes one request or JSON lines, for batch transform."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from io import BytesIO
from itertools import islice
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tidemill.batch.file.lines import RawLine, read_lines
from tidemill.batch.file.run_line import LineResult, run_line
from tidemill.protocol.errors import RequestError
from tidemill.protocol.routes import CLASSIFY, EMBEDDINGS, URLS_OF_FIELDS, url_of_body

from .context import ServerContext
from .errors import json_response
from .inference_routes import InferenceRoute
from .request_bodies import check_content_type, media_type, parse_object
from .sse import stream_response

_JSON = "application/json"
_LINES = ("application/jsonlines", "application/x-ndjson", "application/jsonl")
_MAX_PAYLOAD_MB = 25  # SageMaker's limit for a payload
_MOST_AT_ONCE = 64


def routes(context: ServerContext) -> list[Route]:
    """Return the routes that SageMaker calls."""

    async def parameters(_: Request) -> Response:
        return json_response(
            {
                "MaxConcurrentTransforms": min(context.engine.info().max_num_seqs, _MOST_AT_ONCE),
                "BatchStrategy": "MULTI_RECORD",
                "MaxPayloadInMB": _MAX_PAYLOAD_MB,
            }
        )

    return [
        Route("/invocations", Invocations(context), methods=["POST"]),
        Route("/execution-parameters", parameters),
    ]


class Invocations(InferenceRoute):
    """Answers invocations of a SageMaker endpoint or batch transform job."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read a request or lines, run them on the engine and send the reply or rows."""
        check_content_type(scope, _JSON, *_LINES)
        if media_type(scope) not in _LINES:
            async with self.context.body_reader.read(scope, receive, parse_object) as body:
                endpoints = self.context.engine.info().endpoints
                await self.answer(*_parse_request(body, endpoints), scope, receive, send)
            return
        async with self.context.body_reader.read(scope, receive, _lines) as lines:
            with self.context.admission.admit():
                rows = _rows(lines, self.context)
                await stream_response(rows, _LINES[0].encode(), receive, send)


async def _lines(data: bytes) -> Iterator[RawLine]:
    return read_lines(BytesIO(data))


def _parse_request(
    body: dict[str, Any], endpoints: Sequence[str] = ()
) -> tuple[str, dict[str, Any]]:
    """Return the URL and body of a request, from a bare body or a line of a batch file."""
    url, inner = body.get("url"), body.get("body")
    if isinstance(url, str) and isinstance(inner, dict):
        return url, inner
    found = url_of_body(body)
    if found == EMBEDDINGS.name and CLASSIFY.name in endpoints:
        found = CLASSIFY.name  # the `input` of a classifier, which has no embeddings, is labeled
    if found is not None:
        return found, body
    raise RequestError(
        f"The body matches no endpoint: it needs one of {', '.join(URLS_OF_FIELDS)}, or both `url`"
        " and `body`.",
        code="missing_required_parameter",
    )


async def _rows(lines: Iterator[RawLine], context: ServerContext) -> AsyncGenerator[bytes, None]:
    """Yield the row of each line in input order; several lines run at once."""
    created, has_more = int(time.time()), True
    running: deque[asyncio.Task[LineResult]] = deque()
    most = min(2 * context.engine.info().max_num_seqs, _MOST_AT_ONCE)
    try:
        while has_more or running:
            if has_more and len(running) <= most // 2:
                # In a thread: millions of blank lines may precede the next request.
                some = await asyncio.to_thread(list, islice(lines, most - len(running)))
                has_more = bool(some)
                for raw in some:
                    line = run_line(raw, context.engine, created=created)
                    running.append(asyncio.create_task(line))
                continue
            yield (await running[0]).row
            running.popleft()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

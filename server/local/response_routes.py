"""Response routes: `/v1/responses` with responses that are stored, continued or run later."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tidemill.protocol.bodies import response_id
from tidemill.protocol.contract import EngineError, Reply, StreamedReply
from tidemill.protocol.errors import RequestError
from tidemill.protocol.requests import read_body
from tidemill.protocol.responses.request import ResponsesRequest
from tidemill.protocol.responses.response import response_body
from tidemill.protocol.routes import RESPONSES
from tidemill.protocol.stream import is_stream

from ..context import ServerContext
from ..errors import Refused, json_response
from ..inference_routes import InferenceRoute
from ..request_bodies import new_request_id
from .query_params import not_found
from .responses import ResponseTable, StoredResponse

_logger = logging.getLogger(__name__)

MAX_OPEN: Final = 10_000
"""Background responses that wait or run at once; further ones are refused."""

_RUNNING_PER_SEQUENCE: Final = 4


class ResponseRoutes:
    """The Responses API over a server's engine and its stored responses."""

    def __init__(self, context: ServerContext, table: ResponseTable) -> None:
        self._context = context
        self._table = table
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._running: set[str] = set()
        self._slots = asyncio.Semaphore(_RUNNING_PER_SEQUENCE * context.engine.info().max_num_seqs)

    def routes(self) -> list[Route]:
        """Return the routes."""
        create = CreateRoute(self._context, self, self._table)
        own = "/v1/responses/{response_id}"
        return [
            *(Route(path, create, methods=["POST"]) for path in sorted(RESPONSES.exact)),
            Route(own, self.retrieve, methods=["GET"]),
            Route(own, self.delete, methods=["DELETE"]),
            Route(f"{own}/cancel", self.cancel, methods=["POST"]),
            Route(f"{own}/input_items", self.list_input, methods=["GET"]),
        ]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run background responses while entered; open ones are run again at the next start."""
        await asyncio.to_thread(self._table.delete_expired, time.time())
        for each in await asyncio.to_thread(self._table.open_ids):
            self.start(each)
        try:
            yield
        finally:
            tasks = [*self._tasks.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def start(self, name: str) -> None:
        """Run a stored response in the background."""
        task = asyncio.create_task(self._run(name))
        self._tasks[name] = task
        task.add_done_callback(lambda _: self._tasks.pop(name, None))

    def admit(self) -> None:
        """Refuse a background response if too many are open."""
        if len(self._tasks) >= MAX_OPEN:
            raise Refused(
                f"{MAX_OPEN:,} background responses are open: try again later, or send a batch.",
                status_code=429,
                code="queue_full",
                type="rate_limit_error",
            )

    async def retrieve(self, request: Request) -> Response:
        """Return a stored response."""
        if request.query_params.get("stream") == "true":
            raise RequestError(
                "`stream` is not supported for stored responses: poll without it.", param="stream"
            )
        response = (await self._found(request)).response
        is_running = response["id"] in self._running
        return json_response(response | ({"status": "in_progress"} if is_running else {}))

    async def list_input(self, request: Request) -> Response:
        """Return the input items of a stored response, those of earlier responses included."""
        stored = await self._found(request)
        items = enumerate(_items(stored.request["input"]))
        shown = [{"type": "message", "id": f"item_{i}", **_with_parts(item)} for i, item in items]
        ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]}
        return json_response({"object": "list", "data": shown, "has_more": False, **ends})

    async def delete(self, request: Request) -> Response:
        """Delete a stored response; one that runs is stopped."""
        name = request.path_params["response_id"]
        await self._found(request)
        self._stop(name)
        await asyncio.to_thread(self._table.delete, name)
        return json_response({"id": name, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        """Cancel a background response; one that has ended is returned unchanged."""
        stored = await self._found(request)
        if not stored.response["background"]:
            raise RequestError(
                "Only background responses can be cancelled: this one was not sent with"
                " `background`.",
                param="response_id",
            )
        if stored.is_open:
            self._stop(stored.response["id"])
            cancelled = {**stored.response, "status": "cancelled"}
            await asyncio.to_thread(self._table.end, cancelled)
        return json_response((await self._found(request)).response)

    def _stop(self, name: str) -> None:
        if (task := self._tasks.get(name)) is not None:
            task.cancel()

    async def _found(self, request: Request) -> StoredResponse:
        name = request.path_params["response_id"]
        return await self.find(name)

    async def find(self, name: str, param: str | None = None) -> StoredResponse:
        """Return a stored response; raises the 404 for an unknown one."""
        stored = await asyncio.to_thread(self._table.get, name)
        if stored is None:
            error = not_found("response", name, param)
            error.message += " Only responses with `store: true` or `background: true` are stored."
            raise error
        return stored

    async def _run(self, name: str) -> None:
        """Run a stored response as a row of a file, so that interactive requests go first."""
        async with self._slots:
            stored = await asyncio.to_thread(self._table.get, name)
            if stored is None or not stored.is_open:
                return
            response = stored.response
            self._running.add(name)
            try:
                reply = await self._context.engine.respond(
                    RESPONSES.name,
                    stored.request,
                    name.removeprefix(response_id("resp", "")),
                    response["created_at"],
                )
            except EngineError:
                _logger.exception("%s is run again after a restart", name)
                return
            finally:
                self._running.discard(name)
            ended = {
                **(reply.body if reply.status_code == 200 else failed_body(response, reply)),
                **_kept_fields(response),
            }
            await asyncio.to_thread(self._table.end, ended)


class CreateRoute(InferenceRoute):
    """ASGI endpoint that answers a request for a response, now or in the background."""

    def __init__(
        self, context: ServerContext, responses: ResponseRoutes, table: ResponseTable
    ) -> None:
        super().__init__(context)
        self._responses = responses
        self._table = table

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body, and run the request or store it."""
        async with self.context.body_reader.read_object(scope, receive) as body:
            if body.get("background") is True:
                response = await self._start(body)
                await response(scope, receive, send)
            else:
                await self.answer(scope["path"], body, scope, receive, send)

    async def reply(
        self, url: str, body: dict[str, Any], request_id: str, created: int
    ) -> Reply | StreamedReply:
        """Return the engine's reply; a response is stored on request."""
        is_stored = body.get("store") is True
        if not is_stored and body.get("previous_response_id") is None:
            return await super().reply(url, body, request_id, created)
        request = await self._continued(body)
        kept = {"previous_response_id": body.get("previous_response_id"), "store": is_stored}
        reply = await super().reply(url, request, request_id, created)
        if isinstance(reply, StreamedReply):
            return StreamedReply(self._kept_chunks(request, reply.chunks, kept))
        if reply.status_code == 200:
            reply.body.update(kept)
            if is_stored:
                await self._keep(request, reply.body)
        return reply

    async def _kept_chunks(
        self,
        request: dict[str, Any],
        chunks: AsyncGenerator[dict[str, Any], None],
        kept: dict[str, Any],
    ) -> AsyncGenerator[dict[str, Any], None]:
        async with aclosing(chunks):
            async for chunk in chunks:
                if "response" in chunk:
                    chunk["response"] = {**chunk["response"], **kept}
                    if kept["store"] and chunk["response"]["usage"] is not None:
                        await self._keep(request, chunk["response"])
                yield chunk

    async def _keep(self, request: dict[str, Any], response: dict[str, Any]) -> None:
        await asyncio.to_thread(self._table.put, StoredResponse(request, response))

    async def _start(self, body: dict[str, Any]) -> Response:
        """Store a background response and start it."""
        if is_stream(body):
            raise RequestError(
                "`stream` is not supported with `background`: poll the response by its ID.",
                param="stream",
            )
        if body.get("store") is False:
            raise RequestError(
                "`background` needs a stored response: remove `store: false`.", param="store"
            )
        self._responses.admit()
        request = await self._continued(body)
        parsed = await asyncio.to_thread(read_body, ResponsesRequest, request)
        created = int(time.time())
        response = {
            **response_body(
                parsed,
                response_id("resp", new_request_id()),
                created=created,
                model=body.get("model") or self.context.names[0],
            ),
            "background": True,
            "status": "queued",
            "store": True,
            "previous_response_id": body.get("previous_response_id"),
        }
        await self._keep(request, response)
        self._responses.start(response["id"])
        return json_response(response)

    async def _continued(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return a body with the conversation of the response that it continues."""
        request = {**body}
        for name in ("background", "store"):
            request.pop(name, None)
        previous = request.pop("previous_response_id", None)
        if previous is None or "input" not in body:
            return request
        if not isinstance(previous, str):
            raise RequestError(
                "`previous_response_id` must be a string.", param="previous_response_id"
            )
        stored = await self._responses.find(previous, "previous_response_id")
        if stored.is_open:
            raise RequestError(
                f"The response {previous} has not ended: poll it first.",
                param="previous_response_id",
            )
        items = [_items(stored.request["input"]), stored.response["output"], _items(body["input"])]
        return {**request, "input": [item for each in items for item in each]}


def failed_body(response: dict[str, Any], reply: Reply) -> dict[str, Any]:
    """Return a background response that the engine has refused."""
    error = reply.body["error"]
    shown = {"code": error["code"], "message": error["message"]}
    return {**response, "status": "failed", "error": shown}


def _kept_fields(response: dict[str, Any]) -> dict[str, Any]:
    names = ("background", "store", "previous_response_id")
    return {name: response[name] for name in names}


def _with_parts(item: dict[str, Any]) -> dict[str, Any]:
    """Return an item whose content is a list of parts, as clients expect it."""
    content = item.get("content")
    if not isinstance(content, str):
        return item
    kind = "output_text" if item.get("role") == "assistant" else "input_text"
    return {**item, "content": [{"type": kind, "text": content}]}


def _items(given: Any) -> list[Any]:
    if isinstance(given, list):
        return given
    return [{"role": "user", "content": given}]

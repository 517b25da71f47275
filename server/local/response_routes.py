"""Response routes: `/v1/responses` with responses that are stored, continued or run later."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tidemill.protocol.bodies import error_body
from tidemill.protocol.contract import EngineError, Reply, StreamedReply, Usage
from tidemill.protocol.errors import RequestError
from tidemill.protocol.names import name_of_model
from tidemill.protocol.requests import read_body
from tidemill.protocol.responses.request import ResponsesRequest
from tidemill.protocol.responses.response import failed_body, response_body, response_id
from tidemill.protocol.routes import RESPONSES
from tidemill.protocol.stream import is_stream
from tidemill.protocol.validation import short_repr

from ..context import ServerContext
from ..errors import Refused, internal_error, json_response, stopping
from ..inference_routes import InferenceRoute
from ..request_bodies import new_request_id
from .folder import is_full
from .query_params import choice_param, int_param, not_found
from .referenced_items import ReferencedItems, is_reference
from .responses import ResponseTable, StoredResponse, input_items
from .upload import disk_full

_logger = logging.getLogger(__name__)

MAX_OPEN: Final = 10_000
"""Background responses that wait or run at once; further ones are refused."""

_RUNNING_PER_SEQUENCE: Final = 4
_PAGE, _MAX_PAGE = 20, 100
_MAX_DIGITS = 9
_MAX_SHORT = 1_000  # items that are searched without a thread
_STORED_FIELDS: Final = ("background", "store", "previous_response_id")
_ValueT = TypeVar("_ValueT")


class ResponseRoutes:
    """The Responses API over a server's engine and its stored responses.

    Disk errors of background responses are retried after `retry_seconds`.
    """

    def __init__(
        self, context: ServerContext, table: ResponseTable, *, retry_seconds: float = 5.0
    ) -> None:
        self._context = context
        self._table = table
        self._retry_seconds = retry_seconds
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._num_starting = 0
        self._running: set[str] = set()
        self._has_lost_engine = False
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

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Hold a place until a background response is started; refuse it if too many are open."""
        if self._context.admission.is_closed:
            raise stopping(1)
        if len(self._tasks) + self._num_starting >= MAX_OPEN:
            raise Refused(
                f"{MAX_OPEN:,} background responses are open: try again later, or send a batch.",
                status_code=429,
                code="queue_full",
                type="rate_limit_error",
            )
        self._num_starting += 1
        try:
            yield
        finally:
            self._num_starting -= 1

    async def retrieve(self, request: Request) -> Response:
        """Return a stored response."""
        if request.query_params.get("stream") == "true":
            raise RequestError(
                "`stream` is not supported for stored responses: poll without it.", param="stream"
            )
        is_running = request.path_params["response_id"] in self._running
        stored = await self._find(request)
        shown = {"status": "in_progress"} if is_running and stored.is_open else {}
        return json_response(stored.response | shown)

    async def list_input(self, request: Request) -> Response:
        """Return a page of a stored response's input items, including earlier responses."""
        stored = await self.find(request.path_params["response_id"], is_whole=True)
        params, items = request.query_params, input_items(stored.request)
        limit = int_param(params, "limit", 1, _MAX_PAGE, _PAGE)
        order = range(len(items))
        if choice_param(params, "order", {"asc": False, "desc": True}, default=True):
            order = order[::-1]
        if (after := params.get("after")) is not None:
            place = _place_of(after)
            if place not in order:
                raise not_found("item", after, "after")
            order = order[order.index(place) + 1 :]
        page = [
            {"type": "message", **_with_parts(items[place]), "id": f"item_{place}"}
            for place in order[:limit]
        ]
        ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {}
        has_more = len(page) < len(order)
        return json_response({"object": "list", "data": page, "has_more": has_more, **ends})

    async def delete(self, request: Request) -> Response:
        """Delete a stored response; one that runs is stopped."""
        name = request.path_params["response_id"]
        await self._find(request)
        self._stop(name)
        await asyncio.to_thread(self._table.delete, name)
        return json_response({"id": name, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        """Cancel a background response; one that has ended is returned unchanged."""
        stored = await self._find(request)
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
        return json_response((await self._find(request)).response)

    def _stop(self, name: str) -> None:
        if (task := self._tasks.get(name)) is not None:
            task.cancel()

    async def _find(self, request: Request) -> StoredResponse:
        name = request.path_params["response_id"]
        return await self.find(name)

    async def find(
        self, name: str, param: str | None = None, *, is_whole: bool = False
    ) -> StoredResponse:
        """Return a stored response, with its whole conversation if `is_whole`; raises the 404."""
        get = self._table.conversation if is_whole else self._table.get
        stored = await asyncio.to_thread(get, name)
        if stored is None:
            error = not_found("response", name, param)
            error.message += " Only responses with `store: true` or `background: true` are stored."
            raise error
        return stored

    async def _run(self, name: str) -> None:
        """Run a stored response as a row of a file, so that interactive requests go first."""
        async with self._slots:
            stored = await self._retried(lambda: self._table.conversation(name))
            if stored is None or not stored.is_open:
                return
            self._running.add(name)
            try:
                ended = await self._ended(stored)
                await self._retried(lambda: self._table.end(ended))
            except EngineError as exc:
                if not self._has_lost_engine:
                    self._has_lost_engine = True
                    _logger.error("background responses run again after a restart: %s", exc)  # noqa: TRY400 - the cause is known
            finally:
                self._running.discard(name)

    async def _ended(self, stored: StoredResponse) -> dict[str, Any]:
        """Return the end of a stored response; only a lost engine raises an error."""
        response = stored.response
        name, created = response["id"], response["created_at"]
        request_id = name.removeprefix(response_id(""))
        try:
            reply = await self._context.engine.respond(
                RESPONSES.name, stored.request, request_id, created
            )
        except EngineError:
            raise
        except Exception as exc:
            _logger.exception("%s failed", name)
            reply = Reply(500, error_body(internal_error(exc)), Usage(0, 0))
        if reply.status_code != 200:
            return failed_body(response, reply.body["error"], reply.status_code)
        return {**reply.body, **{field: response[field] for field in _STORED_FIELDS}}

    async def _retried(self, call: Callable[[], _ValueT]) -> _ValueT:
        """Return the value of a call of the table, which is repeated after disk errors."""
        while True:
            try:
                return await asyncio.to_thread(call)
            except (OSError, sqlite3.Error) as exc:
                _logger.warning("a response cannot be stored yet: %s", exc)
                await asyncio.sleep(self._retry_seconds)


@dataclass(frozen=True, slots=True)
class _Turn:
    """A request, and the items of the conversation before it."""

    request: dict[str, Any]
    earlier: Sequence[Any] = ()

    @property
    def whole_request(self) -> dict[str, Any]:
        """Return the request with the whole conversation."""
        if not self.earlier:
            return self.request
        return {**self.request, "input": [*self.earlier, *input_items(self.request)]}


class CreateRoute(InferenceRoute):
    """ASGI endpoint that answers a request for a response, now or in the background."""

    def __init__(
        self, context: ServerContext, responses: ResponseRoutes, table: ResponseTable
    ) -> None:
        super().__init__(context)
        self._responses = responses
        self._table = table
        self._items = ReferencedItems(table)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body, and run the request or store it."""
        async with self.context.body_reader.read_object(scope, receive) as given:
            body = await self._resolved(given)
            if not isinstance(background := body.get("background"), bool | None):
                words = f"must be a valid boolean; got {short_repr(background)}"
                raise RequestError(f"`background` {words}.", param="background")
            if background:
                response = await self._start(body)
                await response(scope, receive, send)
            else:
                await self.answer(scope["path"], body, scope, receive, send)

    async def reply(
        self, url: str, body: dict[str, Any], request_id: str, created: int
    ) -> Reply | StreamedReply:
        """Return the engine's reply; a response is stored on request."""
        store = body.get("store")
        turn = await self._continued(body)
        previous = body.get("previous_response_id")
        fields = {"previous_response_id": previous, "store": store is True}
        reply = await super().reply(url, turn.whole_request, request_id, created)
        if isinstance(reply, StreamedReply):
            return StreamedReply(self._stored_chunks(turn, reply.chunks, fields, store))
        if reply.status_code == 200:
            reply.body.update(fields)
            await self._retain(turn, reply.body, store)
        return reply

    async def _stored_chunks(
        self,
        turn: _Turn,
        chunks: AsyncGenerator[dict[str, Any], None],
        fields: dict[str, Any],
        store: object,
    ) -> AsyncGenerator[dict[str, Any], None]:
        async with aclosing(chunks):
            async for chunk in chunks:
                if "response" in chunk:
                    response = chunk["response"] = {**chunk["response"], **fields}
                    if response["usage"] is not None:
                        await self._retain(turn, response, store)
                yield chunk

    async def _retain(self, turn: _Turn, response: dict[str, Any], store: object) -> None:
        """Store a response on request; otherwise retain its items, unless `store` is false."""
        response["store"] = store is True and await self._store(turn, response)
        if store is None:
            self._items.remember(response)

    async def _store(self, turn: _Turn, response: dict[str, Any]) -> bool:
        """Store a response; False after a disk error, which must not lose the answer."""
        try:
            stored = StoredResponse(turn.request, response)
            await asyncio.to_thread(self._table.put, stored, turn.earlier)
        except (OSError, sqlite3.Error) as exc:
            _logger.warning("%s is not stored: %s", response["id"], exc)
            return False
        return True

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
        names = (*self.context.names, *self.context.engine.info().adapters)
        model = name_of_model(body, names)
        with self._responses.admit():
            turn = await self._continued(body)
            parsed = await asyncio.to_thread(read_body, ResponsesRequest, turn.whole_request)
            response = {
                **response_body(parsed, new_request_id(), created=int(time.time()), model=model),
                "background": True,
                "status": "queued",
                "store": True,
                "previous_response_id": body.get("previous_response_id"),
            }
            try:
                stored = StoredResponse(turn.request, response)
                await asyncio.to_thread(self._table.put, stored, turn.earlier)
            except (OSError, sqlite3.Error) as exc:
                if is_full(exc):
                    raise disk_full() from exc
                raise
            self._responses.start(response["id"])
        return json_response(response)

    async def _resolved(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return a body with the items that it refers to."""
        items = body.get("input")
        if not isinstance(items, list):
            return body
        if len(items) <= _MAX_SHORT and not any(map(is_reference, items)):
            return body
        return await asyncio.to_thread(
            self._items.resolved, body, self.context.settings.max_body_bytes
        )

    async def _continued(self, body: dict[str, Any]) -> _Turn:
        """Return a body as the next turn of the conversation that it continues."""
        request = {**body}
        for name in ("background", "store"):
            if isinstance(request.get(name), bool):  # other values are refused
                del request[name]
        previous = request.pop("previous_response_id", None)
        if previous is None or "input" not in body:
            return _Turn(request)
        if not isinstance(previous, str):
            raise RequestError(
                "`previous_response_id` must be a string.", param="previous_response_id"
            )
        stored = await self._responses.find(previous, "previous_response_id", is_whole=True)
        if stored.is_open:
            raise RequestError(
                f"The response {previous} has not ended: poll it first.",
                param="previous_response_id",
            )
        await asyncio.to_thread(
            read_body, ResponsesRequest, request
        )  # its indexes are the client's
        turn = _Turn(request, [*input_items(stored.request), *stored.response["output"]])
        num_bytes = len(await asyncio.to_thread(to_json, turn.whole_request))
        if num_bytes > (most := self.context.settings.max_body_bytes):
            raise Refused(
                f"The conversation has {num_bytes:,} bytes; the limit is {most:,}: send a shorter"
                " `input` without `previous_response_id`.",
                status_code=413,
                code="body_too_large",
                param="previous_response_id",
            )
        return turn


def _with_parts(item: dict[str, Any]) -> dict[str, Any]:
    """Return an item whose content is a list of parts, as clients expect it."""
    content = item.get("content")
    if not isinstance(content, str):
        return item
    kind = "output_text" if item.get("role") == "assistant" else "input_text"
    return {**item, "content": [{"type": kind, "text": content}]}


def _place_of(name: str) -> int:
    """Return the place of an item with this ID; -1 for other IDs."""
    kind, _, place = name.partition("_")
    is_place = kind == "item" and place.isascii() and place.isdigit() and len(place) <= _MAX_DIGITS
    return int(place) if is_place else -1

"""Message batch routes: Anthropic's Message Batches API over the server's own batches.

A batch's requests are stored as a file of Anthropic's lines, and its endpoint marks it.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from datetime import UTC, datetime
from typing import IO, Any, Final
from uuid import uuid4

from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from tidemill.batch.batch_request import BatchParams
from tidemill.batch.errors import InvalidMove
from tidemill.batch.file.formats import detect_file, open_lines, stream_of
from tidemill.batch.file.json_array import elements_as_lines
from tidemill.batch.file.lines import FormatError, LineError, RawLine, parse_line, read_lines
from tidemill.batch.file.rows import escape_separators
from tidemill.batch.file.vendor_rows import vendor_row
from tidemill.batch.model import Batch, Options
from tidemill.batch.object_keys import DROP_TENANT, batch_id_of_request
from tidemill.batch.results_object import GONE_CODE, MAX_LISTED_ROWS, rows_deleted_message
from tidemill.batch.states import Status
from tidemill.batch.stored_file import File
from tidemill.protocol.errors import RequestError
from tidemill.protocol.json_bodies import TooManyValues, load_json
from tidemill.protocol.json_printing import print_json
from tidemill.protocol.validation import short_repr
from tidemill.protocol.vendors.anthropic_answers import message_error

from ..context import ServerContext
from ..errors import MESSAGES, Refused, json_response, too_large
from ..request_bodies import check_content_type
from .batch_routes import BatchRoutes
from .batches import StoredBatch
from .query_params import int_param, not_found
from .results import RowPage
from .rows import RowsGone
from .runner import Runner
from .store import Store
from .upload import incoming_file

_PATH: Final = f"{MESSAGES}/batches"
_MEDIA_TYPE: Final = "application/x-jsonl"
_PREFIXES: Final = ("batch_", "msgbatch_")  # of our IDs, and of Anthropic's
_MAX_REQUESTS: Final = 100_000
_REQUESTS: Final = f"a list of 1 to {_MAX_REQUESTS:,} requests"
_MAX_ID_CHARS: Final = 64
_BEGINNING: Final = re.compile(rb'[ \t\r\n]*+\{[ \t\r\n]*+"requests"[ \t\r\n]*+:[ \t\r\n]*+\[')
_END: Final = re.compile(rb"\}[ \t\r\n]*+\Z")
_MAX_END_BYTES: Final = 1_000
_PIECE_BYTES: Final = 2**18
_STATUSES: Final = {Status.CANCELLING: "canceling"}
# Results of requests without a row, by the status of a batch that has ended.
_NOT_RUN: Final = {Status.CANCELLED: "canceled", Status.EXPIRED: "expired"}
_ERRORED: Final = "errored"


class MessageBatchRoutes:
    """The Message Batches API over a store and its runner."""

    def __init__(
        self, store: Store, runner: Runner, batches: BatchRoutes, context: ServerContext
    ) -> None:
        self._store = store
        self._runner = runner
        self._batches = batches
        self._context = context

    def routes(self) -> list[Route]:
        """Return the routes."""
        one = f"{_PATH}/{{batch_id}}"
        return [
            Route(_PATH, self.create, methods=["POST"]),
            Route(_PATH, self.list, methods=["GET"]),
            Route(one, self.retrieve, methods=["GET"]),
            Route(one, self.delete, methods=["DELETE"]),
            Route(f"{one}/cancel", self.cancel, methods=["POST"]),
            Route(f"{one}/results", self.send_results, methods=["GET"]),
        ]

    async def create(self, request: Request) -> Response:
        """Create a batch of the requests in the body."""
        check_content_type(request.scope, "application/json")
        reader = self._context.body_reader
        # Its requests are parsed one by one, so only its bytes are held.
        async with reader.read(request.scope, request.receive, _same, is_json=False) as data:
            batch = await self._batches.start(lambda: self._create(data))
        return await self._respond(request, batch.id)

    async def list(self, request: Request) -> Response:
        """List the batches, newest first."""
        params = request.query_params
        limit = int_param(params, "limit", 1, 1000, 20)
        ids = {name: params.get(f"{name}_id") for name in ("after", "before")}
        if all(ids.values()):
            raise RequestError("`after_id` and `before_id` cannot be combined: send one of them.")
        own = {name: None if each is None else _own_id(each) for name, each in ids.items()}
        try:
            page, has_more = await asyncio.to_thread(
                lambda: self._store.batches.list(limit=limit, endpoint=MESSAGES, **own)
            )
        except KeyError as exc:
            raise not_found("batch", _shown_id(exc.args[0])) from None
        data = [_message_batch(stored, request) for stored in page]
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
        none = {"first_id": None, "last_id": None}
        return json_response({"data": data, "has_more": has_more, **none, **ends})

    async def retrieve(self, request: Request) -> Response:
        """Return one batch."""
        return await self._respond(request, (await self._stored(request)).batch.id)

    async def cancel(self, request: Request) -> Response:
        """Cancel a batch; its finished requests keep their results."""
        batch_id = (await self._stored(request)).batch.id
        try:
            await self._runner.cancel(batch_id)
        except InvalidMove:
            stored = await self._batches.stored(batch_id)
            if stored.batch.is_terminal:
                words = f"Batch {_shown_id(batch_id)} cannot be canceled: it has ended."
                raise RequestError(words, code="not_cancellable") from None
        return await self._respond(request, batch_id)

    async def delete(self, request: Request) -> Response:
        """Delete a batch that has ended, with its requests and results."""
        stored = await self._stored(request)
        shown = _shown_id(stored.batch.id)
        if not stored.batch.is_terminal:
            words = f"Batch {shown} cannot be deleted before it has ended: cancel it first."
            raise RequestError(words)
        await asyncio.to_thread(self._store.delete_batch, stored.batch.id)
        return json_response({"id": shown, "type": "message_batch_deleted"})

    async def send_results(self, request: Request) -> Response:
        """Stream the results of a batch that has ended: those with a row in line order."""
        stored = await self._stored(request)
        if not stored.batch.is_terminal:
            words = f"Batch {_shown_id(stored.batch.id)} has no results before it has ended."
            raise RequestError(words)
        try:
            first = await asyncio.to_thread(self._page, stored.batch, 0)
            requests = await asyncio.to_thread(self._requests_if_needed, stored)
        except (RowsGone, FileNotFoundError) as exc:
            words = rows_deleted_message(stored.batch)
            raise RequestError(words, code=GONE_CODE, status_code=410) from exc
        return StreamingResponse(self._results(stored, first, requests), media_type=_MEDIA_TYPE)

    def _requests_if_needed(self, stored: StoredBatch) -> IO[bytes] | None:
        """Return the open input of a batch that has requests without a row.

        It may be deleted while results are sent. Raises FileNotFoundError if a row is missing.
        """
        done = stored.batch.final or stored.progress
        path = self._store.folder.file(stored.batch.input_file_id)
        if done.num_rows >= stored.batch.num_rows:
            return None
        return path.open("rb")

    def _results(
        self, stored: StoredBatch, page: RowPage, requests: IO[bytes] | None
    ) -> Iterator[bytes]:
        """Yield the results of rows, then those of the requests without one."""
        lines: set[int] = set()
        with requests or nullcontext() as file:
            while page.rows:
                lines.update(line for line, _ in page.rows)
                results = (vendor_row("anthropic", {}, from_json(row)) for _, row in page.rows)
                yield b"".join(map(_printed, results))
                page = self._page(stored.batch, page.rows[-1][0])
            if file is not None:
                file.seek(0)
                for raw in read_lines(open_lines(detect_file(file), file)):
                    if raw.number not in lines:
                        result = _result_of_end(stored.batch, raw.number)
                        yield _printed({"custom_id": _custom_id(raw), "result": result})

    def _page(self, batch: Batch, after_line: int) -> RowPage:
        return self._store.results.page(batch, after_line, MAX_LISTED_ROWS)

    async def _stored(self, request: Request) -> StoredBatch:
        """Return the batch of a path; raises `RequestError` for an unknown one."""
        name = request.path_params["batch_id"]
        stored = await asyncio.to_thread(self._store.batches.get, _own_id(name))
        if stored is None or stored.batch.endpoint != MESSAGES:
            raise not_found("batch", name)
        return stored

    async def _respond(self, request: Request, batch_id: str) -> Response:
        return json_response(_message_batch(await self._batches.stored(batch_id), request))

    def _create(self, data: bytes) -> Batch:
        """Store the requests of a body as a file, and add a batch of it; raises `RequestError`."""
        with incoming_file(self._store.folder) as path:
            with path.open("wb") as out:
                try:
                    num_requests = _write_requests(out, _elements(data))
                except FormatError:  # a body with other fields, or one that is not JSON
                    out.seek(0)
                    out.truncate()
                    num_requests = _write_requests(out, _values(data))
                num_bytes = out.tell()
                out.flush()
                os.fsync(out.fileno())
            file_id, now = f"file-{uuid4().hex}", int(time.time())
            name = "messages.jsonl"
            file = File(file_id, DROP_TENANT, file_id, num_bytes, now, name, "batch")
            self._store.add_file(path, file)
        batch_id = batch_id_of_request(DROP_TENANT, uuid4().hex)
        # An invalid request gets an error in its result, as with Anthropic.
        params = BatchParams(file_id, MESSAGES, Options(on_invalid_line="skip"))
        return self._batches.add(batch_id, params, num_rows=num_requests)


async def _same(data: bytes) -> bytes:
    return data


def _elements(data: bytes) -> Iterator[object]:
    """Yield the elements of `requests`, which is the only field of a body.

    Each may have as many values as a request. Raises FormatError for other bodies, and
    `RequestError` for an element that is too large or not JSON.
    """
    begun, end = _BEGINNING.match(data), _END.search(data, max(0, len(data) - _MAX_END_BYTES))
    if begun is None or end is None:
        raise FormatError("The body has other fields.")
    starts = range(begun.end() - 1, end.start(), _PIECE_BYTES)
    pieces = (data[start : min(start + _PIECE_BYTES, end.start())] for start in starts)
    for place, raw in enumerate(read_lines(stream_of(elements_as_lines(pieces)))):
        if raw.overlong is not None:
            raise too_large(raw.overlong.limit)
        yield _parsed(raw.data, f"`requests.{place}`")


def _values(data: bytes) -> Iterator[object]:
    """Yield the elements of `requests` of any body, which has as many values as a request."""
    body = _parsed(data, "The body")
    if not isinstance(body, dict):
        raise RequestError("The body must be a JSON object.", code="invalid_json")
    given = body.get("requests")
    if not isinstance(given, list):
        raise _bad_field("requests", _REQUESTS, given)
    yield from given


def _parsed(data: bytes, name: str) -> object:
    try:
        return load_json(data, in_slices=True)
    except TooManyValues as exc:
        words = f"{name} {exc}: send less in one request."
        raise Refused(words, status_code=413, code="body_too_large") from None
    except ValueError as exc:
        raise RequestError(f"{name} is not JSON: {exc}.", code="invalid_json") from None


def _write_requests(out: IO[bytes], elements: Iterable[object]) -> int:
    """Write requests, with unchecked parameters; return their number; raises `RequestError`."""
    places: dict[str, int] = {}
    for place, each in enumerate(elements):
        get = each.get if isinstance(each, dict) else {}.get
        custom_id, params, param = get("custom_id"), get("params"), f"requests.{place}"
        if place == _MAX_REQUESTS:
            words = f"`requests` must be {_REQUESTS}; got more."
            raise RequestError(words, param="requests")
        if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _MAX_ID_CHARS:
            kind = f"a string of 1 to {_MAX_ID_CHARS} characters"
            raise _bad_field(f"{param}.custom_id", kind, custom_id)
        if not isinstance(params, dict):
            raise _bad_field(f"{param}.params", "an object", params)
        if (first := places.setdefault(custom_id, place)) != place:
            param = f"{param}.custom_id"
            words = f"`{param}` must be unique: `requests.{first}` has the same one."
            raise RequestError(words, param=param)
        out.write(_printed({"custom_id": custom_id, "params": params}))
    if not places:
        raise _bad_field("requests", _REQUESTS, [])
    return len(places)


def _bad_field(param: str, kind: str, value: object) -> RequestError:
    return RequestError(f"`{param}` must be {kind}; got {short_repr(value)}.", param=param)


def _message_batch(stored: StoredBatch, request: Request) -> dict[str, Any]:
    """Return Anthropic's object of a batch."""
    batch, done = stored.batch, stored.batch.final or stored.progress
    shown = _shown_id(batch.id)
    counts = dict.fromkeys(("processing", "succeeded", _ERRORED, "canceled", "expired"), 0)
    counts |= {"succeeded": done.completed, _ERRORED: done.failed}
    rest = "processing" if not batch.is_terminal else _NOT_RUN.get(batch.status, _ERRORED)
    counts[rest] += max(0, batch.num_rows - done.completed - done.failed)
    status = "ended" if batch.is_terminal else _STATUSES.get(batch.status, "in_progress")
    url = f"{str(request.base_url).rstrip('/')}{_PATH}/{shown}/results"
    return {
        "id": shown,
        "type": "message_batch",
        "processing_status": status,
        "request_counts": counts,
        "created_at": _time(batch.created_at),
        "expires_at": _time(batch.expires_at),
        "ended_at": _time(batch.end_at),
        "cancel_initiated_at": _time(batch.cancelling_at),
        "archived_at": None,
        "results_url": url if batch.is_terminal else None,
    }


def _result_of_end(batch: Batch, line: int) -> dict[str, Any]:
    """Return the result of a request without a row in a batch that has ended."""
    if batch.status in _NOT_RUN:
        return {"type": _NOT_RUN[batch.status]}
    errors = sorted(batch.errors, key=lambda error: error.line != line)
    message = errors[0].message if errors else "The request did not run."
    return {"type": _ERRORED, "error": message_error(400 if errors else 500, message)}


def _custom_id(raw: RawLine) -> str | None:
    try:
        return parse_line(raw).custom_id
    except LineError as exc:
        return exc.custom_id


def _printed(value: dict[str, Any]) -> bytes:
    """Return a value as a line of JSON."""
    return escape_separators(print_json(value)) + b"\n"


def _time(seconds: int | None) -> str | None:
    """Return a time as text in RFC 3339."""
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _own_id(name: str) -> str:
    """Return our ID of a batch with Anthropic's prefix; another name stays as it is."""
    own, other = _PREFIXES
    return own + name.removeprefix(other) if name.startswith(other) else name


def _shown_id(batch_id: str) -> str:
    own, other = _PREFIXES
    return other + batch_id.removeprefix(own)

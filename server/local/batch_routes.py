"""Batch routes: `/v1/batches` creates, lists, retrieves and cancels batches, and lists rows."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable
from typing import Any, Final
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tidemill.batch.batch_body import BatchRequest
from tidemill.batch.batch_object import BatchObject
from tidemill.batch.batch_request import (
    S3,
    BatchParams,
    invalid_input_file,
    parse_request,
    window_seconds,
)
from tidemill.batch.errors import InvalidMove
from tidemill.batch.history_object import HistoryObject
from tidemill.batch.model import Batch, Retry, Source
from tidemill.batch.object_keys import DROP_TENANT, batch_id_of_request, outputs_of_request
from tidemill.batch.pagination import Page, make_page
from tidemill.batch.results_object import (
    GONE_CODE,
    MAX_LINE,
    MAX_LISTED_ROWS,
    ResultsObject,
    result_row,
    rows_deleted_message,
)
from tidemill.batch.retry import NotRetryable, check_no_retry, check_retryable
from tidemill.batch.retry_request import RetryParams, RetryRequest, parse_retry
from tidemill.protocol.errors import RequestError

from ..errors import json_response
from ..request_bodies import BodyReader
from .batches import StoredBatch
from .folder import is_full
from .history import list_history
from .query_params import int_param, not_found, options_as_request_errors, parse_model
from .retry import FileGone, make_input
from .rows import RowsGone
from .runner import Runner
from .store import Store
from .upload import disk_full

_BODY_READER: Final = BodyReader(2**20, 30.0)
_OF_CLOUD: Final = {
    **dict.fromkeys(("output_url", "error_url", "webhook_url"), "download the files instead"),
    "max_cost": "a local server has no price",
    **dict.fromkeys(
        ("escalate", "escalate_below", "target_accuracy", "escalate_by"),
        "a local server has one model",
    ),
    "recipe": "render the table with `tidemill submit`",
}


class BatchRoutes:
    """The Batches API over a store and its runner."""

    def __init__(self, store: Store, runner: Runner) -> None:
        self._store = store
        self._runner = runner

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route("/v1/batches", self.create, methods=["POST"]),
            Route("/v1/batches", self.list, methods=["GET"]),
            Route("/v1/batches/{batch_id}", self.retrieve, methods=["GET"]),
            Route("/v1/batches/{batch_id}/cancel", self.cancel, methods=["POST"]),
            Route("/v1/batches/{batch_id}/history", self.list_history, methods=["GET"]),
            Route("/v1/batches/{batch_id}/retry", self.retry, methods=["POST"]),
            Route("/v1/batches/{batch_id}/results", self.list_results, methods=["GET"]),
        ]

    async def create(self, request: Request) -> Response:
        """Create a batch from a file, or return the one with the same idempotency key."""
        async with _BODY_READER.read_object(request.scope, request.receive) as body:
            fields = _fields_of(body, request.headers.get("idempotency-key"))
        batch = await self.start(lambda: self._create(parse_request(fields)))
        return await self._respond(batch.id)

    async def retry(self, request: Request) -> Response:
        """Create a batch of the requests of another that failed or did not run."""
        old = (await self.stored(request.path_params["batch_id"])).batch
        earlier = old.retry
        if earlier is not None:  # its rows are merged into those of the first batch
            old = (await self.stored(earlier.of)).batch
        async with _BODY_READER.read_object(request.scope, request.receive) as body:
            wanted = parse_model(RetryRequest, body)
        _check_supported(wanted.fields())
        key = _one_key(wanted.idempotency_key, request.headers.get("idempotency-key"))
        batch = await self.start(lambda: self._retry(old, parse_retry(old, wanted, earlier), key))
        return await self._respond(batch.id)

    async def start(self, create: Callable[[], Batch]) -> Batch:
        """Create a batch in a thread, start it and return it; raises `RequestError`."""
        try:
            with options_as_request_errors():
                batch = await asyncio.to_thread(create)
        except (OSError, sqlite3.Error) as exc:
            if is_full(exc):
                raise disk_full() from exc
            raise
        if not batch.is_terminal:
            self._runner.start(batch.id)
        return batch

    async def list(self, request: Request) -> Response:
        """List the batches, newest first."""
        limit = int_param(request.query_params, "limit", 1, 100, 20)
        return json_response(await self.page(limit, request.query_params.get("after")))

    async def page(self, limit: int, after: str | None) -> Page[BatchObject]:
        """Return a page of the batches older than `after`, or the newest."""
        try:
            page, has_more = await asyncio.to_thread(
                lambda: self._store.batches.list(limit=limit, after=after)
            )
        except KeyError:
            raise not_found("batch", str(after), param="after") from None
        shown = [self._runner.describe(stored) for stored in page]
        return make_page(BatchObject, shown, has_more=has_more)

    async def retrieve(self, request: Request) -> Response:
        """Return one batch."""
        return await self._respond(request.path_params["batch_id"])

    async def cancel(self, request: Request) -> Response:
        """Cancel a batch; its finished rows are kept."""
        stored = await self.stored(request.path_params["batch_id"])
        try:
            await self._runner.cancel(stored.batch.id)
        except InvalidMove:
            now = (await self.stored(stored.batch.id)).batch
            raise RequestError(
                f"Batch {now.id} cannot be cancelled: it is {now.status}.", code="not_cancellable"
            ) from None
        return await self._respond(stored.batch.id)

    async def list_results(self, request: Request) -> Response:
        """List finished rows after a line, within seconds of their completion."""
        after_line = int_param(request.query_params, "after_line", 0, MAX_LINE, 0)
        limit = int_param(request.query_params, "limit", 1, MAX_LISTED_ROWS, 100)
        batch = (await self.stored(request.path_params["batch_id"])).batch
        # Read before the page, so that the page has the rows of all these lines.
        through = self._runner.complete_through(batch.id)
        return await asyncio.to_thread(self._results, batch, after_line, limit, through)

    async def list_history(self, request: Request) -> Response:
        """List the progress per minute, or per quarter of an hour for an older batch."""
        batch = (await self.stored(request.path_params["batch_id"])).batch
        found = await asyncio.to_thread(list_history, self._store.database, batch.id)
        return json_response(HistoryObject(data=found))

    def _results(self, batch: Batch, after_line: int, limit: int, through: int) -> Response:
        try:
            rows, has_more = self._store.results.page(batch, after_line, limit)
        except RowsGone as exc:
            raise RequestError(
                rows_deleted_message(batch), code=GONE_CODE, status_code=410
            ) from exc
        last = rows[-1][0] if rows else after_line
        if batch.is_terminal or has_more:
            through = last if batch.is_terminal else min(through, last)
        return json_response(
            ResultsObject(
                data=[result_row(line, row) for line, row in rows],
                complete_through=max(after_line, through),
                has_more=has_more,
            )
        )

    async def stored(self, batch_id: str) -> StoredBatch:
        """Return a batch as stored; raises `RequestError` for an unknown ID."""
        stored = await asyncio.to_thread(self._store.batches.get, batch_id)
        if stored is None:
            raise not_found("batch", batch_id)
        return stored

    async def describe(self, batch_id: str) -> BatchObject:
        """Return the Batch object of an ID."""
        return self.describe_stored(await self.stored(batch_id))

    def describe_stored(self, stored: StoredBatch) -> BatchObject:
        """Return the Batch object of a stored batch."""
        return self._runner.describe(stored)

    async def _respond(self, batch_id: str) -> Response:
        return json_response(await self.describe(batch_id))

    def _create(self, parsed: BatchParams) -> Batch:
        """Create the batch of a request, or return the existing one; raises InvalidOption."""
        batch_id = batch_id_of_request(DROP_TENANT, parsed.idempotency_key or uuid4().hex)
        stored = self._store.batches.get(batch_id)
        made = stored.batch if stored is not None else self.add(batch_id, parsed)
        parsed.check_same(made)
        return made

    def _retry(self, old: Batch, params: RetryParams, key: str | None) -> Batch:
        batch_id = batch_id_of_request(DROP_TENANT, key or uuid4().hex)
        stored = self._store.batches.get(batch_id)
        if stored is None:
            try:
                check_retryable(old)
                other = self._store.batches.get(old.retried_by) if old.retried_by else None
                check_no_retry(other.batch if other else None)
                file = make_input(self._store, old, params.retry)
            except NotRetryable as exc:
                raise RequestError(str(exc), code=exc.code) from exc
            except FileGone as exc:
                raise RequestError(
                    f"The input or the rows of batch {old.id} were deleted ({exc}): submit its "
                    "file again.",
                    code="input_gone",
                    status_code=410,
                ) from exc
            parsed = BatchParams(file.id, old.endpoint, params.options)
            made = self.add(batch_id, parsed, retry=params.retry)
        else:
            made = stored.batch
        params.check_same(made)
        self._store.batches.change(old.id, retried_by=made.id)
        return made

    def add(
        self,
        batch_id: str,
        parsed: BatchParams,
        *,
        retry: Retry | None = None,
        num_rows: int = 0,
    ) -> Batch:
        """Add a batch to the store and return it; `num_rows` is 0 until its file is read."""
        now, file = int(time.time()), self._store.files.get(parsed.input_file_id)
        if file is None or not self._store.link_input(file.id, batch_id):
            raise invalid_input_file("was not found")
        batch = Batch(
            id=batch_id,
            tenant=DROP_TENANT,
            source=Source("", file.id, "", file.num_bytes),
            input_file_id=file.id,
            options=parsed.options,
            outputs=outputs_of_request(DROP_TENANT, batch_id),
            created_at=now,
            expires_at=now + window_seconds(parsed.options.completion_window),
            endpoint=parsed.endpoint,
            retry=retry,
            num_rows=num_rows,
        )
        return self._store.batches.create(batch)


def _fields_of(body: dict[str, Any], key: str | None) -> dict[str, Any]:
    """Return the parameters of a new batch; raises `RequestError` for unsupported ones."""
    fields = parse_model(BatchRequest, body).fields()
    _check_supported(fields)
    if fields["input_file_id"].startswith(S3):
        raise RequestError(
            "`input_file_id` must be a file ID: a local server cannot read from S3.",
            param="input_file_id",
            code="invalid_option",
        )
    fields["idempotency_key"] = _one_key(fields["idempotency_key"], key)
    return fields


def _check_supported(fields: dict[str, Any]) -> None:
    for name, instead in _OF_CLOUD.items():
        if fields[name] is not None:
            raise RequestError(
                f"`{name}` is supported only by a cloud deployment: {instead}.",
                param=name,
                code="invalid_option",
            )


def _one_key(field: str | None, header: str | None) -> str | None:
    if header is not None and field not in (None, header):
        raise RequestError(
            "`idempotency_key` and the `Idempotency-Key` header differ: send one of them.",
            param="idempotency_key",
        )
    return field if header is None else header

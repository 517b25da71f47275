"""`/v1/batches`: what runs, how far it is, and its end."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from typing import Any, Final
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engine.protocol.errors import RequestError
from handler.batch.keys import DROP_TENANT, batch_id_of_request, outputs_of_request
from handler.batch.model import Batch, Source
from handler.batch.page import page_of
from handler.batch.request import S3, Asked, BatchRequest, bad_input, read_request
from handler.batch.results_object import (
    GONE_CODE,
    MAX_LINE,
    MAX_LISTED_ROWS,
    ResultsObject,
    result_row,
    where_rows_are,
)
from handler.batch.window import window_seconds
from handler.batch.wire import BatchObject
from handler.errors import InvalidMove
from server.bodies import Bodies
from server.errors import as_json
from server.local.asking import not_found, number, refusing_options, validated
from server.local.batches import Kept
from server.local.folder import is_full
from server.local.receiving import no_room
from server.local.rows import RowsGone
from server.local.runner import Runner
from server.local.store import Store

_BODIES: Final = Bodies(2**20, 30.0)
_URLS: Final = ("output_url", "error_url", "webhook_url")


class BatchRoutes:
    """What clients ask of the batches of a store, which a runner carries."""

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
            Route("/v1/batches/{batch_id}/results", self.list_results, methods=["GET"]),
        ]

    async def create(self, request: Request) -> Response:
        """Make a batch of a file, or return the one that the same idempotency key has made."""
        async with _BODIES.read_object(request.scope, request.receive) as body:
            fields = _fields_of(body, request.headers.get("idempotency-key"))
        try:
            with refusing_options():
                batch = await asyncio.to_thread(self._create, read_request(fields))
        except (OSError, sqlite3.Error) as exc:
            if is_full(exc):
                raise no_room() from exc
            raise
        if not batch.is_terminal:
            self._runner.take(batch.id)
        return await self._shown(batch.id)

    async def list(self, request: Request) -> Response:
        """List the batches, newest first."""
        limit = number(request.query_params, "limit", 1, 100, 20)
        after = request.query_params.get("after")
        try:
            found, has_more = await asyncio.to_thread(
                lambda: self._store.batches.list(limit=limit, after=after)
            )
        except KeyError:
            raise not_found("batch", str(after), param="after") from None
        shown = [self._runner.describe(kept) for kept in found]
        return as_json(page_of(BatchObject, shown, has_more=has_more))

    async def retrieve(self, request: Request) -> Response:
        """Return one batch."""
        return await self._shown(request.path_params["batch_id"])

    async def cancel(self, request: Request) -> Response:
        """Cancel a batch; the rows that are finished by then are kept."""
        kept = await self._kept(request.path_params["batch_id"])
        try:
            await self._runner.cancel(kept.batch.id)
        except InvalidMove:
            now = (await self._kept(kept.batch.id)).batch
            words = "has ended: it is" if now.is_terminal else "is"
            raise RequestError(
                f"Batch {now.id} {words} {now.status}.", code="not_cancellable"
            ) from None
        return await self._shown(kept.batch.id)

    async def list_results(self, request: Request) -> Response:
        """List the rows behind a line that are finished, seconds after they were made."""
        after_line = number(request.query_params, "after_line", 0, MAX_LINE, 0)
        limit = number(request.query_params, "limit", 1, MAX_LISTED_ROWS, 100)
        batch = (await self._kept(request.path_params["batch_id"])).batch
        # First, so that the rows of all these lines are among those that are read then.
        through = self._runner.complete_through(batch.id)
        return await asyncio.to_thread(self._results, batch, after_line, limit, through)

    def _results(self, batch: Batch, after_line: int, limit: int, through: int) -> Response:
        try:
            rows, has_more = self._store.results.page(batch, after_line, limit)
        except RowsGone as exc:
            raise RequestError(where_rows_are(batch), code=GONE_CODE, status_code=410) from exc
        last = rows[-1][0] if rows else after_line
        if batch.is_terminal or has_more:
            through = last if batch.is_terminal else min(through, last)
        return as_json(
            ResultsObject(
                data=[result_row(line, row) for line, row in rows],
                complete_through=max(after_line, through),
                has_more=has_more,
            )
        )

    async def _kept(self, batch_id: str) -> Kept:
        kept = await asyncio.to_thread(self._store.batches.get, batch_id)
        if kept is None:
            raise not_found("batch", batch_id)
        return kept

    async def _shown(self, batch_id: str) -> Response:
        return as_json(self._runner.describe(await self._kept(batch_id)))

    def _create(self, asked: Asked) -> Batch:
        """Return the batch that a request makes, or has made; raises InvalidOption."""
        batch_id = batch_id_of_request(DROP_TENANT, asked.idempotency_key or uuid4().hex)
        kept = self._store.batches.get(batch_id)
        made = kept.batch if kept is not None else self._made(batch_id, asked)
        asked.refuse_another(made)
        return made

    def _made(self, batch_id: str, asked: Asked) -> Batch:
        now, file = int(time.time()), self._store.files.get(asked.input_file_id)
        if file is None or not self._store.lend(file.id, batch_id):
            raise bad_input("names no file that is there")
        batch = Batch(
            id=batch_id,
            tenant=DROP_TENANT,
            source=Source("", file.id, "", file.num_bytes),
            input_file_id=file.id,
            options=asked.options,
            outputs=outputs_of_request(DROP_TENANT, batch_id),
            created_at=now,
            expires_at=now + window_seconds(asked.options.completion_window),
            endpoint=asked.endpoint,
        )
        return self._store.batches.create(batch)


def _fields_of(body: dict[str, Any], key: str | None) -> dict[str, Any]:
    """Return the parameters of a new batch; raises `RequestError` for those that cannot be."""
    fields = validated(BatchRequest, body).fields()
    for name in _URLS:
        if fields[name] is not None:
            raise RequestError(
                f"`{name}` is served by a deployment in the cloud only: fetch the files from here.",
                param=name,
                code="invalid_option",
            )
    if fields["input_file_id"].startswith(S3):
        raise RequestError(
            "`input_file_id` must be the id of a file: this server reads no bucket.",
            param="input_file_id",
            code="invalid_option",
        )
    if key is not None:
        if fields["idempotency_key"] not in (None, key):
            raise RequestError(
                "`idempotency_key` and the header `Idempotency-Key` are not the same.",
                param="idempotency_key",
            )
        fields["idempotency_key"] = key
    return fields

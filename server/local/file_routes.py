"""`/v1/files`: inputs of batches, and their results."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any, Final, Literal
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from engine.protocol.errors import RequestError
from handler.batch.file_object import (
    FileDeleted,
    FileObject,
    check_purpose,
    disposition_of,
    file_object,
    name_of,
)
from handler.batch.keys import DROP_TENANT
from handler.batch.model import File
from handler.batch.page import page_of
from handler.batch.request import MAX_EXPIRY_SECONDS, MIN_EXPIRY_SECONDS
from server.errors import as_json
from server.local.asking import chosen, not_found, number, refusing_options
from server.local.receiving import Received, received
from server.local.store import Store

MAX_FILE_BYTES: Final = 16 * 2**30
_MAX_LISTED: Final = 10_000
_ORDERS: Final[Mapping[str, Literal["asc", "desc"]]] = {"asc": "asc", "desc": "desc"}


class FileRoutes:
    """What clients ask of the files of a store."""

    def __init__(self, store: Store, max_file_bytes: int = MAX_FILE_BYTES) -> None:
        self._store = store
        self._max_file_bytes = max_file_bytes

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route("/v1/files", self.create, methods=["POST"]),
            Route("/v1/files", self.list, methods=["GET"]),
            Route("/v1/files/{file_id}", self.retrieve, methods=["GET"]),
            Route("/v1/files/{file_id}", self.delete, methods=["DELETE"]),
            Route("/v1/files/{file_id}/content", self.content, methods=["GET"]),
        ]

    async def create(self, request: Request) -> Response:
        """Keep a file for batches to read."""
        async with received(request, self._store.folder, "file", self._max_file_bytes) as form:
            made = _file_of(form)
            await asyncio.to_thread(self._store.keep, form.path, made)
        return as_json(file_object(made))

    def list(self, request: Request) -> Response:
        """List the files, the newest or the oldest first."""
        asked = request.query_params
        limit = number(asked, "limit", 1, _MAX_LISTED, _MAX_LISTED)
        after = asked.get("after")
        try:
            found, has_more = self._store.files.list(
                limit=limit,
                after=after,
                order=chosen(asked, "order", _ORDERS, "desc"),
                purpose=asked.get("purpose"),
            )
        except KeyError:
            raise not_found("file", str(after), param="after") from None
        shown = [file_object(file) for file in found]
        return as_json(page_of(FileObject, shown, has_more=has_more))

    def retrieve(self, request: Request) -> Response:
        """Return what is known of one file."""
        return as_json(file_object(self._file(request)))

    def delete(self, request: Request) -> Response:
        """Delete a file; a batch that reads it goes on."""
        file = self._file(request)
        self._store.files.delete(file.id)
        return as_json(FileDeleted(id=file.id))

    def content(self, request: Request) -> Response:
        """Send the bytes of a file, or a range of them."""
        file = self._file(request)
        path = self._store.folder.file(file.id)
        if not path.is_file():
            raise RequestError(
                f"The bytes of {file.id} are no longer in the server's folder.",
                code="content_gone",
                status_code=410,
            )
        headers = {"Content-Disposition": disposition_of(file.filename)}
        return FileResponse(path, headers=headers, media_type="application/octet-stream")

    def _file(self, request: Request) -> File:
        file_id: str = request.path_params["file_id"]
        file = self._store.files.get(file_id)
        if file is None:
            raise not_found("file", file_id)
        return file


def _file_of(form: Received) -> File:
    """Return the file that a form makes; raises `RequestError` for a form that makes none."""
    for name, is_there in (("file", form.has_file), ("purpose", "purpose" in form.fields)):
        if not is_there:
            raise RequestError(
                f"`{name}` is missing.", param=name, code="missing_required_parameter"
            )
    with refusing_options():
        purpose = check_purpose(form.fields["purpose"])
    if not form.num_bytes:
        raise RequestError("`file` is empty.", param="file", code="empty_file")
    now, file_id = int(time.time()), f"file-{uuid4().hex}"
    seconds = _seconds_to_keep(form.fields)
    return File(
        id=file_id,
        tenant=DROP_TENANT,
        key=file_id,
        num_bytes=form.num_bytes,
        created_at=now,
        filename=name_of(form.filename),
        purpose=purpose,
        expires=None if seconds is None else now + seconds,
    )


def _seconds_to_keep(fields: Mapping[str, Any]) -> int | None:
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at" or seconds is None:
        raise RequestError(
            '`expires_after` needs `anchor`, which is "created_at", and `seconds`.',
            param="expires_after",
        )
    return number(
        {"expires_after[seconds]": seconds},
        "expires_after[seconds]",
        MIN_EXPIRY_SECONDS,
        MAX_EXPIRY_SECONDS,
        0,
    )

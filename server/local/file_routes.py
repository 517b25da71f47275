"""File routes: `/v1/files` stores batch inputs and results."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from tidemill.batch.batch_request import MAX_EXPIRY_SECONDS, MIN_EXPIRY_SECONDS
from tidemill.batch.file_object import (
    FileDeleted,
    FileObject,
    check_purpose,
    content_disposition,
    display_name,
    file_object,
)
from tidemill.batch.object_keys import DROP_TENANT
from tidemill.batch.pagination import make_page
from tidemill.batch.stored_file import File
from tidemill.protocol.errors import RequestError

from ..errors import json_response
from .query_params import choice_param, int_param, not_found, options_as_request_errors
from .store import Store
from .upload import ReceivedForm, receive_form

MAX_FILE_BYTES: Final = 16 * 2**30
_MAX_LISTED: Final = 10_000
_ORDERS: Final[Mapping[str, Literal["asc", "desc"]]] = {"asc": "asc", "desc": "desc"}


class FileRoutes:
    """The Files API over a store."""

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
        """Create a file from a multipart upload."""
        async with receive_form(request, self._store.folder, "file", self._max_file_bytes) as form:
            new_file = _file_of(form)
            await asyncio.to_thread(self._store.add_file, form.path, new_file)
        return json_response(file_object(new_file))

    def list(self, request: Request) -> Response:
        """List the files, newest or oldest first."""
        params = request.query_params
        limit = int_param(params, "limit", 1, _MAX_LISTED, _MAX_LISTED)
        after = params.get("after")
        try:
            page, has_more = self._store.files.list(
                limit=limit,
                after=after,
                order=choice_param(params, "order", _ORDERS, "desc"),
                purpose=params.get("purpose"),
            )
        except KeyError:
            raise not_found("file", str(after), param="after") from None
        shown = [file_object(file) for file in page]
        return json_response(make_page(FileObject, shown, has_more=has_more))

    def retrieve(self, request: Request) -> Response:
        """Return one file object."""
        return json_response(file_object(self._file(request)))

    def delete(self, request: Request) -> Response:
        """Delete a file; batches that use it continue."""
        file = self._file(request)
        self._store.files.delete(file.id)
        return json_response(FileDeleted(id=file.id))

    def content(self, request: Request) -> Response:
        """Send the content of a file, or a range of it."""
        file, path = self.stored(request)
        headers = {"Content-Disposition": content_disposition(file.filename)}
        return FileResponse(path, headers=headers, media_type="application/octet-stream")

    def stored(self, request: Request) -> tuple[File, Path]:
        """Return the file of a request and its path; raises `RequestError` if it is gone."""
        file = self._file(request)
        path = self._store.folder.file(file.id)
        if not path.is_file():
            raise RequestError(
                f"The content of {file.id} is no longer in the server's data folder.",
                code="content_gone",
                status_code=410,
            )
        return file, path

    def _file(self, request: Request) -> File:
        file_id: str = request.path_params["file_id"]
        file = self._store.files.get(file_id)
        if file is None:
            raise not_found("file", file_id)
        return file


def _file_of(form: ReceivedForm) -> File:
    """Return the file object of an upload form; raises `RequestError`."""
    for name, is_there in (("file", form.has_file), ("purpose", "purpose" in form.fields)):
        if not is_there:
            raise RequestError(
                f"`{name}` is required.", param=name, code="missing_required_parameter"
            )
    with options_as_request_errors():
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
        filename=display_name(form.filename),
        purpose=purpose,
        expires=None if seconds is None else now + seconds,
    )


def _seconds_to_keep(fields: Mapping[str, Any]) -> int | None:
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at" or seconds is None:
        raise RequestError(
            '`expires_after` requires `anchor` ("created_at") and `seconds`.',
            param="expires_after",
        )
    return int_param(
        {"expires_after[seconds]": seconds},
        "expires_after[seconds]",
        MIN_EXPIRY_SECONDS,
        MAX_EXPIRY_SECONDS,
        0,
    )

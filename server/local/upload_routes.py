"""Upload routes: `/v1/uploads`, multipart uploads by forms or by PUT to this server's URLs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Final
from uuid import uuid4
from weakref import WeakValueDictionary

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tidemill.batch.file_object import check_purpose, display_name, file_object
from tidemill.batch.object_keys import DROP_TENANT
from tidemill.batch.stored_file import Upload
from tidemill.batch.upload_object import (
    CompleteRequest,
    PartUrl,
    PartUrls,
    UploadObject,
    UploadPartObject,
    UploadRequest,
    UrlsRequest,
    check_numbers,
    check_pending,
    check_sent_to_urls,
    check_uploaded,
    file_of_upload,
    parse_part_number,
    part_bytes_of,
    parts_mismatch,
    size_of_part,
    sizes_of_parts,
    upload_object,
    wrong_md5,
)
from tidemill.protocol.errors import RequestError

from ..errors import json_response, too_large
from ..request_bodies import BodyReader
from .query_params import not_found, options_as_request_errors, parse_model
from .store import Store
from .upload import incoming_file, receive_body, receive_form

_HOUR: Final = 3600
_OPEN_SECONDS: Final = 24 * _HOUR
_REMEMBERED_SECONDS: Final = 8 * 24 * _HOUR
_BODY_READER: Final = BodyReader(2**20, 30.0)
# Prefixes of part names: by id when sent as a form, by number when PUT.
_BY_ID, _BY_NUMBER = "part_", "number_"


class UploadRoutes:
    """The Uploads API; a lock per upload serialises complete and cancel."""

    def __init__(self, store: Store, max_file_bytes: int) -> None:
        self._store = store
        self._max_file_bytes = max_file_bytes
        self._ending: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def routes(self) -> list[Route]:
        """Return the routes."""
        own = "/v1/uploads/{upload_id}"
        return [
            Route("/v1/uploads", self.create, methods=["POST"]),
            Route(own, self.retrieve, methods=["GET"]),
            Route(f"{own}/parts", self.add_part, methods=["POST"]),
            Route(f"{own}/parts/{{number}}", self.put_part, methods=["PUT"]),
            Route(f"{own}/urls", self.name_urls, methods=["POST"]),
            Route(f"{own}/complete", self.complete, methods=["POST"]),
            Route(f"{own}/cancel", self.cancel, methods=["POST"]),
        ]

    async def create(self, request: Request) -> Response:
        """Create an upload."""
        async with _BODY_READER.read_object(request.scope, request.receive) as body:
            parsed = parse_model(UploadRequest, body)
        if parsed.bytes > self._max_file_bytes:
            raise too_large(self._max_file_bytes)
        with options_as_request_errors():
            check_purpose(parsed.purpose)
        now = int(time.time())
        upload = Upload(
            id=f"upload_{uuid4().hex}",
            tenant=DROP_TENANT,
            num_bytes=parsed.bytes,
            filename=display_name(parsed.filename),
            purpose=parsed.purpose,
            created_at=now,
            expires_at=now + _OPEN_SECONDS,
            file_id=f"file-{uuid4().hex}",
            file_seconds=parsed.expires_after.seconds if parsed.expires_after else None,
            expires=now + _REMEMBERED_SECONDS,
        )
        await asyncio.to_thread(self._store.uploads.create, upload)
        return await self._respond(upload)

    async def retrieve(self, request: Request) -> Response:
        """Return an upload with its uploaded numbered parts, so that a client can resume."""
        return await self._respond(await self._upload(request))

    async def add_part(self, request: Request) -> Response:
        """Add a part sent as a form."""
        upload = await self._pending(request)
        async with receive_form(request, self._store.folder, "data", self._max_file_bytes) as form:
            if not form.has_file:
                raise RequestError(
                    "`data` is required.", param="data", code="missing_required_parameter"
                )
            if not form.num_bytes:
                raise RequestError("`data` is empty.", param="data", code="empty_part")
            part_id = f"{_BY_ID}{uuid4().hex}"
            await self._keep(upload, part_id, form.path)
        new_part = UploadPartObject(id=part_id, created_at=int(time.time()), upload_id=upload.id)
        return json_response(new_part)

    async def name_urls(self, request: Request) -> Response:
        """Return the URLs to PUT numbered parts to, relative to this one."""
        async with _BODY_READER.read_object(request.scope, request.receive) as body:
            parsed = parse_model(UrlsRequest, body)
        async with self._lock_of(request):
            upload = await self._pending(request)
            with options_as_request_errors():
                check_numbers(upload, parsed.part_numbers)
            if upload.way is None:
                upload = await asyncio.to_thread(self._store.uploads.change, upload, way="urls")
        data = [
            PartUrl(part_number=number, url=f"parts/{number}", expires_at=upload.expires_at)
            for number in parsed.part_numbers
        ]
        return json_response(PartUrls(part_bytes=part_bytes_of(upload.num_bytes), data=data))

    async def put_part(self, request: Request) -> Response:
        """Add a numbered part sent as a raw body; it replaces an earlier one."""
        upload, typed = await self._pending(request), request.path_params["number"]
        with options_as_request_errors():
            number = parse_part_number(typed)
            check_numbers(upload, [number])
        size = size_of_part(upload.num_bytes, number)
        async with receive_body(request, self._store.folder, size) as (path, num_bytes):
            if num_bytes != size:
                raise RequestError(
                    f"Part {number} must have {size:,} bytes; got {num_bytes:,}.",
                    code="wrong_bytes",
                )
            await self._keep(upload, f"{_BY_NUMBER}{number}", path)
        return Response()

    async def complete(self, request: Request) -> Response:
        """Complete an upload: join its parts into a file. Idempotent."""
        async with _BODY_READER.read_object(request.scope, request.receive) as body:
            parsed = parse_model(CompleteRequest, body)
        async with self._lock_of(request):
            upload = await self._upload(request)
            digest = sha256("\n".join(parsed.part_ids).encode()).hexdigest()
            if upload.status != "completed" or upload.digest != digest:
                upload = await self._complete(upload, parsed, digest)
            return await self._respond(upload)

    async def cancel(self, request: Request) -> Response:
        """Cancel an upload and delete its parts."""
        async with self._lock_of(request):
            upload = await self._upload(request)
            if upload.status == "completed":
                raise RequestError(
                    "The upload is already completed: delete its file instead.",
                    code="upload_completed",
                )
            return await self._respond(await asyncio.to_thread(self._store.uploads.cancel, upload))

    async def _complete(self, upload: Upload, parsed: CompleteRequest, digest: str) -> Upload:
        table = self._store.uploads
        with options_as_request_errors():
            check_pending(upload, time.time())
            names = await asyncio.to_thread(self._names, upload, parsed.part_ids)
            with incoming_file(self._store.folder) as path:
                md5 = await asyncio.to_thread(table.join, upload, names, path)
                if parsed.md5 is not None and md5 != parsed.md5.lower():
                    await asyncio.to_thread(table.cancel, upload)
                    raise wrong_md5()
                file = file_of_upload(upload, upload.file_id, int(time.time()), kept_until=None)
                return await asyncio.to_thread(table.complete, upload, path, file, digest)

    def _names(self, upload: Upload, part_ids: Sequence[str]) -> Sequence[str]:
        """Return the names of the parts in file order; raises UploadRefused."""
        sizes = self._store.uploads.sizes(upload)
        if part_ids:
            if upload.way is not None:
                raise parts_mismatch()
            by_id = {name: size for name, size in sizes.items() if name.startswith(_BY_ID)}
            sizes_of_parts(upload, part_ids, by_id)
            return part_ids
        check_sent_to_urls(upload)
        numbered = _numbered(sizes)
        check_uploaded(upload, numbered)
        return [f"{_BY_NUMBER}{number}" for number in sorted(numbered)]

    async def _keep(self, upload: Upload, name: str, path: Path) -> None:
        try:
            await asyncio.to_thread(self._store.uploads.add_part, upload, name, path)
        except FileNotFoundError:
            with options_as_request_errors():  # it ended while the part was being sent
                check_pending(self._store.uploads.get(upload.id) or upload, time.time())
            raise

    def _lock_of(self, request: Request) -> asyncio.Lock:
        return self._ending.setdefault(request.path_params["upload_id"], asyncio.Lock())

    async def _pending(self, request: Request) -> Upload:
        upload = await self._upload(request)
        with options_as_request_errors():
            check_pending(upload, time.time())
        return upload

    async def _upload(self, request: Request) -> Upload:
        upload_id: str = request.path_params["upload_id"]
        upload = await asyncio.to_thread(self._store.uploads.get, upload_id)
        if upload is None:
            raise not_found("upload", upload_id)
        return upload

    async def _respond(self, upload: Upload) -> Response:
        return json_response(await asyncio.to_thread(self._object_of, upload))

    def _object_of(self, upload: Upload) -> UploadObject:
        file, uploaded = None, []
        if upload.status == "completed":
            file = self._store.files.get(upload.file_id)
        elif upload.status == "pending" and upload.way == "urls":
            uploaded = sorted(_numbered(self._store.uploads.sizes(upload)))
        return upload_object(
            upload, time.time(), file=file_object(file) if file else None, uploaded=uploaded
        )


def _numbered(sizes: Mapping[str, int]) -> dict[int, int]:
    """Return the sizes of the numbered parts, by number."""
    return {
        int(name.removeprefix(_BY_NUMBER)): size
        for name, size in sizes.items()
        if name.startswith(_BY_NUMBER)
    }

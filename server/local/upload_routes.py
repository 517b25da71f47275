"""`/v1/uploads`: files that come in parts, as forms or as whole bodies at urls of this server."""

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

from engine.protocol.errors import RequestError
from handler.batch.file_object import check_purpose, file_object, name_of
from handler.batch.keys import DROP_TENANT
from handler.batch.model import Upload
from handler.batch.upload_object import (
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
    number_of,
    other_parts,
    part_bytes_of,
    size_of_part,
    sizes_of_parts,
    upload_object,
    wrong_md5,
)
from server.bodies import Bodies
from server.errors import as_json, too_large
from server.local.asking import not_found, refusing_options, validated
from server.local.receiving import incoming, received, received_body
from server.local.store import Store

_HOUR: Final = 3600
_OPEN_SECONDS: Final = 24 * _HOUR
_REMEMBERED_SECONDS: Final = 8 * 24 * _HOUR
_BODIES: Final = Bodies(2**20, 30.0)
# Names of parts: those that came as forms are named by their ids, the others by their numbers.
_BY_ID, _BY_NUMBER = "part_", "number_"


class UploadRoutes:
    """What clients ask of uploads; one request at a time ends one."""

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
        """Begin a file that comes in parts."""
        async with _BODIES.read_object(request.scope, request.receive) as body:
            asked = validated(UploadRequest, body)
        if asked.bytes > self._max_file_bytes:
            raise too_large(self._max_file_bytes)
        with refusing_options():
            check_purpose(asked.purpose)
        now = int(time.time())
        upload = Upload(
            id=f"upload_{uuid4().hex}",
            tenant=DROP_TENANT,
            num_bytes=asked.bytes,
            filename=name_of(asked.filename),
            purpose=asked.purpose,
            created_at=now,
            expires_at=now + _OPEN_SECONDS,
            file_id=f"file-{uuid4().hex}",
            file_seconds=asked.expires_after.seconds if asked.expires_after else None,
            expires=now + _REMEMBERED_SECONDS,
        )
        await asyncio.to_thread(self._store.uploads.create, upload)
        return await self._shown(upload)

    async def retrieve(self, request: Request) -> Response:
        """Return an upload with its numbered parts that are there: a client goes on behind them."""
        return await self._shown(await self._upload(request))

    async def add_part(self, request: Request) -> Response:
        """Keep a part that comes as a form, until the upload is completed with it or given up."""
        upload = await self._pending(request)
        async with received(request, self._store.folder, "data", self._max_file_bytes) as form:
            if not form.has_file:
                raise RequestError(
                    "`data` is missing.", param="data", code="missing_required_parameter"
                )
            if not form.num_bytes:
                raise RequestError("`data` is empty.", param="data", code="empty_part")
            part_id = f"{_BY_ID}{uuid4().hex}"
            await self._keep(upload, part_id, form.path)
        made = UploadPartObject(id=part_id, created_at=int(time.time()), upload_id=upload.id)
        return as_json(made)

    async def name_urls(self, request: Request) -> Response:
        """Return where to PUT numbered parts: addresses on this server, beside that of this."""
        async with _BODIES.read_object(request.scope, request.receive) as body:
            asked = validated(UrlsRequest, body)
        async with self._lock_of(request):
            upload = await self._pending(request)
            with refusing_options():
                check_numbers(upload, asked.part_numbers)
            if upload.way is None:
                upload = await asyncio.to_thread(self._store.uploads.change, upload, way="urls")
        data = [
            PartUrl(part_number=number, url=f"parts/{number}", expires_at=upload.expires_at)
            for number in asked.part_numbers
        ]
        return as_json(PartUrls(part_bytes=part_bytes_of(upload.num_bytes), data=data))

    async def put_part(self, request: Request) -> Response:
        """Keep a numbered part, which comes as it is; one that was there is replaced."""
        upload, typed = await self._pending(request), request.path_params["number"]
        with refusing_options():
            number = number_of(typed)
            check_numbers(upload, [number])
        size = size_of_part(upload.num_bytes, number)
        async with received_body(request, self._store.folder, size) as (path, num_bytes):
            if num_bytes != size:
                raise RequestError(
                    f"Part {number} has {num_bytes:,} bytes, and must have {size:,}.",
                    code="wrong_bytes",
                )
            await self._keep(upload, f"{_BY_NUMBER}{number}", path)
        return Response()

    async def complete(self, request: Request) -> Response:
        """Make the parts a file; repeated it changes nothing."""
        async with _BODIES.read_object(request.scope, request.receive) as body:
            asked = validated(CompleteRequest, body)
        async with self._lock_of(request):
            upload = await self._upload(request)
            digest = sha256("\n".join(asked.part_ids).encode()).hexdigest()
            if upload.status != "completed" or upload.digest != digest:
                upload = await self._complete(upload, asked, digest)
            return await self._shown(upload)

    async def cancel(self, request: Request) -> Response:
        """Give an upload up; what came of it is thrown away."""
        async with self._lock_of(request):
            upload = await self._upload(request)
            if upload.status == "completed":
                raise RequestError(
                    "The upload is completed: delete its file.", code="upload_completed"
                )
            return await self._shown(await asyncio.to_thread(self._store.uploads.cancel, upload))

    async def _complete(self, upload: Upload, asked: CompleteRequest, digest: str) -> Upload:
        table = self._store.uploads
        with refusing_options():
            check_pending(upload, time.time())
            names = await asyncio.to_thread(self._names, upload, asked.part_ids)
            with incoming(self._store.folder) as path:
                md5 = await asyncio.to_thread(table.join, upload, names, path)
                if asked.md5 is not None and md5 != asked.md5.lower():
                    await asyncio.to_thread(table.cancel, upload)
                    raise wrong_md5()
                file = file_of_upload(upload, upload.file_id, int(time.time()), kept_until=None)
                return await asyncio.to_thread(table.complete, upload, path, file, digest)

    def _names(self, upload: Upload, part_ids: Sequence[str]) -> Sequence[str]:
        """Return the parts of the file in their order; raises UploadRefused."""
        sizes = self._store.uploads.sizes(upload)
        if part_ids:
            if upload.way is not None:
                raise other_parts()
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
            with refusing_options():  # it has ended while the part was on its way
                check_pending(self._store.uploads.get(upload.id) or upload, time.time())
            raise

    def _lock_of(self, request: Request) -> asyncio.Lock:
        return self._ending.setdefault(request.path_params["upload_id"], asyncio.Lock())

    async def _pending(self, request: Request) -> Upload:
        upload = await self._upload(request)
        with refusing_options():
            check_pending(upload, time.time())
        return upload

    async def _upload(self, request: Request) -> Upload:
        upload_id: str = request.path_params["upload_id"]
        upload = await asyncio.to_thread(self._store.uploads.get, upload_id)
        if upload is None:
            raise not_found("upload", upload_id)
        return upload

    async def _shown(self, upload: Upload) -> Response:
        return as_json(await asyncio.to_thread(self._object_of, upload))

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
    """Return the sizes of the parts that have a number."""
    return {
        int(name.removeprefix(_BY_NUMBER)): size
        for name, size in sizes.items()
        if name.startswith(_BY_NUMBER)
    }

"""`/v1/uploads`: files too large for one request, in small parts or by presigned URLs."""

from __future__ import annotations

import re
import time
from typing import Annotated, Final
from uuid import uuid4

from aws_lambda_powertools.event_handler.openapi.params import Body, UploadFile
from aws_lambda_powertools.event_handler.openapi.params import File as FileParam
from aws_lambda_powertools.event_handler.router import APIGatewayHttpRouter

from tidemill.batch.file_object import check_purpose, display_name, file_object
from tidemill.batch.object_keys import file_key, upload_prefix
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
    part_bytes_of,
    size_of_part,
    upload_object,
)

from ...aws.calls import Call
from ...aws.sync import MAX_PRESIGNED_SECONDS
from ...deployment import deployment
from ...errors import NotThere
from ..envelope.caller import aws, tenant_of
from ..envelope.errors import NotFound, Refused
from .upload_complete import Completion

router = APIGatewayHttpRouter()  # type: ignore[no-untyped-call]

# Any other string cannot be an ID of ours, so the table is not queried (its keys have limits).
_ID: Final = re.compile(r"upload_[0-9a-f]{32}", re.ASCII)
_HOUR: Final = 3600
_SMALL_SECONDS, _LARGE_SECONDS = _HOUR, 24 * _HOUR
# How long the status of a finished upload is stored.
_REMEMBERED_SECONDS: Final = 8 * 24 * _HOUR


@router.post("/v1/uploads")
def create_upload(request: Annotated[UploadRequest, Body()]) -> UploadObject:
    """Start an upload in parts."""
    check_purpose(request.purpose)
    now = int(time.time())
    upload = Upload(
        id=f"upload_{uuid4().hex}",
        tenant=tenant_of(router.context),
        num_bytes=request.bytes,
        filename=display_name(request.filename),
        purpose=request.purpose,
        created_at=now,
        expires_at=now + _SMALL_SECONDS,
        file_id=f"file-{uuid4().hex}",
        file_seconds=request.expires_after.seconds if request.expires_after else None,
        expires=now + _REMEMBERED_SECONDS,
    )
    aws().run(deployment().uploads.create_upload(upload))
    return _upload_object(upload)


@router.get("/v1/uploads/<upload_id>")
def retrieve_upload(upload_id: str) -> UploadObject:
    """Return an upload with the parts that S3 has received, so that a client can resume it."""
    return _upload_object(own_upload(upload_id))


@router.post("/v1/uploads/<upload_id>/parts")
def add_part(
    upload_id: str, data: Annotated[UploadFile, FileParam(description="The bytes of the part.")]
) -> UploadPartObject:
    """Store a small part until the upload is completed or cancelled."""
    upload, now = own_upload(upload_id), int(time.time())
    check_pending(upload, now)
    if not data.content:
        raise Refused("`data` is empty.", param="data", code="empty_part")
    aws().run(deployment().limits.admit_bytes(upload.tenant, len(data.content), now))
    part_id = f"part_{uuid4().hex}"
    aws().run(deployment().bucket.put(f"{upload_prefix(upload.id)}{part_id}", data.content))
    return UploadPartObject(id=part_id, created_at=now, upload_id=upload.id)


@router.post("/v1/uploads/<upload_id>/urls")
def sign_urls(upload_id: str, request: Annotated[UrlsRequest, Body()]) -> PartUrls:
    """Return presigned URLs for parts, valid for an hour; the upload must end within a day."""
    upload, now = own_upload(upload_id), int(time.time())
    check_pending(upload, now)
    check_numbers(upload, request.part_numbers)
    upload = _by_urls(upload, now)
    seconds = min(MAX_PRESIGNED_SECONDS, upload.expires_at - now)
    data = [
        PartUrl(
            part_number=number,
            url=aws().presign(_part_url(upload, number), seconds),
            expires_at=now + seconds,
        )
        for number in request.part_numbers
    ]
    return PartUrls(part_bytes=part_bytes_of(upload.num_bytes), data=data)


@router.post("/v1/uploads/<upload_id>/complete")
def complete_upload(upload_id: str, request: Annotated[CompleteRequest, Body()]) -> UploadObject:
    """Join the parts to a file; a repeated call resumes the work, or returns the result."""
    completion = Completion(aws(), deployment(), own_upload(upload_id), _time_left)
    return _upload_object(completion.complete(request.part_ids, request.md5))


@router.post("/v1/uploads/<upload_id>/cancel")
def cancel_upload(upload_id: str) -> UploadObject:
    """Cancel an upload and delete its parts."""
    upload = aws().run(deployment().uploads.cancel_upload(own_upload(upload_id)))
    if upload.status == "completed":
        raise Refused("The upload is completed: delete its file instead.", code="upload_completed")
    Completion(aws(), deployment(), upload, _time_left).clear()
    return _upload_object(upload)


def own_upload(upload_id: str) -> Upload:
    """Return an upload of the caller's tenant; raises NotFound for any other."""
    is_id = _ID.fullmatch(upload_id) is not None
    upload = aws().run(deployment().uploads.get_upload(upload_id)) if is_id else None
    if upload is None or upload.tenant != tenant_of(router.context):
        raise NotFound(f"Upload {upload_id[:100]} not found.", code="upload_not_found")
    return upload


def _by_urls(upload: Upload, now: int) -> Upload:
    """Return the upload as one whose parts go to S3 directly; raises Refused for any other."""
    if upload.way is None:
        aws().run(deployment().limits.admit_bytes(upload.tenant, upload.num_bytes, now))
    return Completion(aws(), deployment(), upload, _time_left).begin(
        "urls", "", upload.created_at + _LARGE_SECONDS
    )


def _part_url(upload: Upload, number: int) -> Call:
    key, num_bytes = file_key(upload.tenant, upload.file_id), size_of_part(upload.num_bytes, number)
    return deployment().bucket.part_url(key, str(upload.multipart_id), number, num_bytes)


def _time_left() -> float:
    left: int = router.lambda_context.get_remaining_time_in_millis()
    return left / 1000


def _upload_object(upload: Upload) -> UploadObject:
    file = None
    if upload.status == "completed":
        file = aws().run(deployment().files.get_file(upload.file_id))
    return upload_object(
        upload,
        time.time(),
        file=file_object(file) if file else None,
        uploaded=_uploaded(upload),
    )


def _uploaded(upload: Upload) -> list[int]:
    if upload.status != "pending" or upload.way != "urls" or upload.multipart_id is None:
        return []
    key = file_key(upload.tenant, upload.file_id)
    try:
        found = aws().run(deployment().bucket.list_uploaded(key, upload.multipart_id))
    except NotThere:
        return []
    return sorted(
        number
        for number, (_, num_bytes) in found.items()
        if num_bytes == size_of_part(upload.num_bytes, number)
    )

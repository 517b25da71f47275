"""An upload as OpenAI's clients know it, with what ours need to go on with one."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from handler.batch.file_object import BATCH, ExpiresAfter, FileObject
from handler.batch.model import Upload
from handler.objects.upload_plan import MAX_PARTS

MAX_UPLOAD_BYTES: Final = 5 * 2**40  # S3's own limit of one object
MAX_URLS: Final = 100
_MIN_PART_BYTES: Final = 8 * 2**20
_MIB: Final = 2**20


class UploadRequest(BaseModel):
    """What `POST /v1/uploads` takes; `mime_type` is for other services to choose by."""

    model_config = ConfigDict(strict=True)

    bytes: Annotated[int, Field(ge=1, le=MAX_UPLOAD_BYTES)]
    filename: Annotated[str, Field(min_length=1, max_length=1024)]
    mime_type: Annotated[str, Field(max_length=255)] = "application/jsonl"
    purpose: Annotated[str, Field(json_schema_extra={"enum": [BATCH]})]
    expires_after: ExpiresAfter | None = None


class UrlsRequest(BaseModel):
    """Parts, from 1 on, that a client is about to send."""

    model_config = ConfigDict(strict=True)

    part_numbers: Annotated[
        list[Annotated[int, Field(ge=1, le=MAX_PARTS)]], Field(min_length=1, max_length=MAX_URLS)
    ]


class CompleteRequest(BaseModel):
    """The parts in their order, none for those that were sent to urls; `md5` is hexadecimal."""

    model_config = ConfigDict(strict=True)

    part_ids: Annotated[list[str], Field(max_length=MAX_PARTS)]
    md5: Annotated[str | None, Field(pattern="^[0-9a-fA-F]{32}$")] = None


class UploadProgress(BaseModel):
    """What S3 has of the parts that are sent to urls, each of `part_bytes` but the last."""

    part_bytes: int
    uploaded: list[int]


class UploadObject(BaseModel):
    """OpenAI's Upload: every key is present."""

    id: str
    object: Literal["upload"] = "upload"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["pending", "completed", "cancelled", "expired"]
    file: FileObject | None
    tidemill: UploadProgress


class UploadPartObject(BaseModel):
    """A small part that is kept."""

    id: str
    object: Literal["upload.part"] = "upload.part"
    created_at: int
    upload_id: str


class PartUrl(BaseModel):
    """Where a part is to be PUT, and until when (Unix seconds)."""

    part_number: int
    url: str
    expires_at: int


class PartUrls(BaseModel):
    """Urls of parts, in the order in which they were asked for."""

    object: Literal["list"] = "list"
    part_bytes: int
    data: list[PartUrl]


def part_bytes_of(num_bytes: int) -> int:
    """Return the size of the parts of such a file: whole MiB, and no more parts than S3 takes."""
    at_least = -(-num_bytes // MAX_PARTS)
    return max(_MIN_PART_BYTES, -(-at_least // _MIB) * _MIB)


def size_of_part(num_bytes: int, number: int) -> int:
    """Return the bytes of a part; less than 1 for one behind the end."""
    part_bytes = part_bytes_of(num_bytes)
    return min(part_bytes, num_bytes - (number - 1) * part_bytes)


def upload_object(
    upload: Upload, now: float, *, file: FileObject | None, uploaded: list[int]
) -> UploadObject:
    """Return an upload as clients see it."""
    is_late = upload.status == "pending" and upload.expires_at <= now
    return UploadObject(
        id=upload.id,
        bytes=upload.num_bytes,
        created_at=upload.created_at,
        expires_at=upload.expires_at,
        filename=upload.filename,
        purpose=upload.purpose,
        status="expired" if is_late else upload.status,
        file=file,
        tidemill=UploadProgress(part_bytes=part_bytes_of(upload.num_bytes), uploaded=uploaded),
    )

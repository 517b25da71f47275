"""An upload as OpenAI's clients see it, and how ours can resume one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from .creation_order import creation_ns
from .errors import InvalidOption
from .file_object import BATCH, ExpiresAfter, FileObject
from .parts import MAX_PARTS
from .stored_file import File, Upload

MAX_UPLOAD_BYTES: Final = 5 * 2**40  # S3's limit for one object
MAX_URLS: Final = 100
# Key in the metadata of the object that an upload becomes.
UPLOAD_ID: Final = "upload-id"
_MIN_PART_BYTES: Final = 8 * 2**20
_MIB: Final = 2**20


class UploadRequest(BaseModel):
    """Body of `POST /v1/uploads`; `mime_type` is ignored."""

    model_config = ConfigDict(strict=True)

    bytes: Annotated[int, Field(ge=1, le=MAX_UPLOAD_BYTES)]
    filename: Annotated[str, Field(min_length=1, max_length=1024)]
    mime_type: Annotated[str, Field(max_length=255)] = "application/jsonl"
    purpose: Annotated[str, Field(json_schema_extra={"enum": [BATCH]})]
    expires_after: ExpiresAfter | None = None


class UrlsRequest(BaseModel):
    """Numbers of the parts that a client is about to send, from 1 on."""

    model_config = ConfigDict(strict=True)

    part_numbers: Annotated[
        list[Annotated[int, Field(ge=1, le=MAX_PARTS)]], Field(min_length=1, max_length=MAX_URLS)
    ]


class CompleteRequest(BaseModel):
    """The part IDs in order, empty if parts were sent to URLs; `md5` is hexadecimal."""

    model_config = ConfigDict(strict=True)

    part_ids: Annotated[list[str], Field(max_length=MAX_PARTS)]
    md5: Annotated[str | None, Field(pattern="^[0-9a-fA-F]{32}$")] = None


class UploadProgress(BaseModel):
    """Parts that S3 has received by URL, each of `part_bytes` except the last."""

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
    """A received small part."""

    id: str
    object: Literal["upload.part"] = "upload.part"
    created_at: int
    upload_id: str


class PartUrl(BaseModel):
    """Presigned URL to PUT a part to, and its expiry (Unix seconds)."""

    part_number: int
    url: str
    expires_at: int


class PartUrls(BaseModel):
    """URLs of parts, in the order of the request."""

    object: Literal["list"] = "list"
    part_bytes: int
    data: list[PartUrl]


class UploadRefused(InvalidOption):
    """A request that conflicts with the state of an upload; `code` says why."""

    def __init__(self, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.code = code


def part_bytes_of(num_bytes: int) -> int:
    """Return the part size for a file: whole MiB, and within S3's limit on parts."""
    at_least = -(-num_bytes // MAX_PARTS)
    return max(_MIN_PART_BYTES, -(-at_least // _MIB) * _MIB)


def size_of_part(num_bytes: int, number: int) -> int:
    """Return the bytes of a part; less than 1 for a part after the end."""
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


def file_of_upload(
    upload: Upload, key: str, now: int, *, kept_until: int | None, version_id: str | None = None
) -> File:
    """Return the file that an upload becomes; it expires at `kept_until` or earlier on request."""
    return File(
        id=upload.file_id,
        tenant=upload.tenant,
        key=key,
        num_bytes=upload.num_bytes,
        created_at=now,
        created_ns=creation_ns(),
        filename=upload.filename,
        purpose=upload.purpose,
        version_id=version_id,
        expires=now + upload.file_seconds if upload.file_seconds else kept_until,
    )


def check_pending(upload: Upload, now: float) -> None:
    """Raise UploadRefused for an upload that accepts no more parts."""
    if upload.status != "pending":
        raise UploadRefused(
            f"The upload is already {upload.status}.", code=f"upload_{upload.status}"
        )
    if upload.expires_at <= now:
        raise UploadRefused("The upload has expired: create a new one.", code="upload_expired")


def parse_part_number(typed: str) -> int:
    """Return the part number in a URL; raises UploadRefused for an invalid one."""
    if not (typed.isascii() and typed.isdigit() and len(typed) <= len(str(MAX_PARTS))):
        raise _no_part(typed[:100])
    return int(typed)


def check_numbers(upload: Upload, numbers: Sequence[int]) -> None:
    """Raise UploadRefused for a part number that the file does not have."""
    for number in numbers:
        if number < 1 or size_of_part(upload.num_bytes, number) < 1:
            raise _no_part(number)


def sizes_of_parts(upload: Upload, part_ids: Sequence[str], sizes: Mapping[str, int]) -> list[int]:
    """Return the sizes of the listed parts, out of all uploaded ones.

    Raises UploadRefused unless each part exists, is listed once, and the total is the file's size.
    """
    if len(set(part_ids)) < len(part_ids):
        raise _bad_parts("lists a part twice")
    for part_id in part_ids:
        if part_id not in sizes:
            raise _bad_parts(f"lists an unknown part: {part_id[:100]}")
    part_sizes = [sizes[part_id] for part_id in part_ids]
    if sum(part_sizes) != upload.num_bytes:
        raise UploadRefused(
            f"The parts have {sum(part_sizes):,} bytes, but the upload was created with "
            f"{upload.num_bytes:,}.",
            param="part_ids",
            code="wrong_bytes",
        )
    return part_sizes


def check_sent_to_urls(upload: Upload) -> None:
    """Raise UploadRefused unless parts were sent to URLs, so that no IDs are needed."""
    if upload.way != "urls":
        raise UploadRefused(
            "`part_ids` is empty, and no part was sent to a URL.",
            param="part_ids",
            code="wrong_bytes",
        )


def check_uploaded(upload: Upload, sizes: Mapping[int, int]) -> None:
    """Raise UploadRefused unless all numbered parts are complete; `sizes` are by number."""
    number, missing = 1, []
    while (size := size_of_part(upload.num_bytes, number)) > 0:
        if sizes.get(number, 0) != size:
            missing.append(number)
        number += 1
    if missing:
        named = ", ".join(map(str, missing[:10])) + ("…" if len(missing) > 10 else "")
        raise UploadRefused(
            f"{len(missing):,} of the file's {number - 1:,} parts are missing: {named}.",
            code="missing_parts",
        )


def parts_mismatch() -> UploadRefused:
    """Return the error for other parts, or another order, than the first completion had."""
    return UploadRefused(
        "The upload is being completed with other parts, or its parts were sent to URLs.",
        param="part_ids",
        code="other_parts",
    )


def wrong_md5() -> UploadRefused:
    """Return the error for bytes with another MD5."""
    return UploadRefused(
        "The bytes do not match `md5`: the upload was cancelled, create a new one.",
        param="md5",
        code="md5_mismatch",
    )


def _no_part(number: object) -> UploadRefused:
    return UploadRefused(
        f"The file has no part {number}.", param="part_numbers", code="unknown_part"
    )


def _bad_parts(words: str) -> UploadRefused:
    return UploadRefused(f"`part_ids` {words}.", param="part_ids", code="unknown_part")

"""An upload as OpenAI's clients know it, with what ours need to go on with one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from .creation_order import creation_ns
from .errors import InvalidOption
from .file_object import BATCH, ExpiresAfter, FileObject
from .model import File, Upload
from .parts import MAX_PARTS

MAX_UPLOAD_BYTES: Final = 5 * 2**40  # S3's own limit of one object
MAX_URLS: Final = 100
# In the metadata of the object that an upload becomes.
UPLOAD_ID: Final = "upload-id"
_MIN_PART_BYTES: Final = 8 * 2**20
_MIB: Final = 2**20


class UploadRequest(BaseModel):
    """Body of `POST /v1/uploads`; `mime_type` is unused here."""

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
    """Parts sent to urls that S3 has, each of `part_bytes` but the last."""

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
    """Presigned URL to PUT a part to, and its expiry (Unix seconds)."""

    part_number: int
    url: str
    expires_at: int


class PartUrls(BaseModel):
    """Urls of parts, in the order in which they were asked for."""

    object: Literal["list"] = "list"
    part_bytes: int
    data: list[PartUrl]


class UploadRefused(InvalidOption):
    """A request that an upload cannot meet as it stands; `code` says why."""

    def __init__(self, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.code = code


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


def file_of_upload(
    upload: Upload, key: str, now: int, *, kept_until: int | None, version_id: str | None = None
) -> File:
    """Return the file that an upload becomes; it goes at `kept_until` or when its client said."""
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
    """Raise UploadRefused for an upload that takes nothing any more."""
    if upload.status != "pending":
        raise UploadRefused(f"The upload is {upload.status}.", code=f"upload_{upload.status}")
    if upload.expires_at <= now:
        raise UploadRefused("The upload has expired: begin a new one.", code="upload_expired")


def parse_part_number(typed: str) -> int:
    """Return the number of a part in an address; raises UploadRefused for what can be none."""
    if not (typed.isascii() and typed.isdigit() and len(typed) <= len(str(MAX_PARTS))):
        raise _no_part(typed[:100])
    return int(typed)


def check_numbers(upload: Upload, numbers: Sequence[int]) -> None:
    """Raise UploadRefused for the number of a part that the file does not have."""
    for number in numbers:
        if number < 1 or size_of_part(upload.num_bytes, number) < 1:
            raise _no_part(number)


def sizes_of_parts(upload: Upload, part_ids: Sequence[str], sizes: Mapping[str, int]) -> list[int]:
    """Return the sizes of the named parts, of all that are there.

    Raises UploadRefused unless each is there, is named once, and all together have the file's size.
    """
    if len(set(part_ids)) < len(part_ids):
        raise _bad_parts("names a part twice")
    for part_id in part_ids:
        if part_id not in sizes:
            raise _bad_parts(f"names a part that this upload has not: {part_id[:100]}")
    found = [sizes[part_id] for part_id in part_ids]
    if sum(found) != upload.num_bytes:
        raise UploadRefused(
            f"The parts have {sum(found):,} bytes, and the upload was to have "
            f"{upload.num_bytes:,}.",
            param="part_ids",
            code="wrong_bytes",
        )
    return found


def check_sent_to_urls(upload: Upload) -> None:
    """Raise UploadRefused unless parts were sent to urls, so that none needs to be named."""
    if upload.way != "urls":
        raise UploadRefused(
            "`part_ids` names no part, and no part was sent to a url.",
            param="part_ids",
            code="wrong_bytes",
        )


def check_uploaded(upload: Upload, sizes: Mapping[int, int]) -> None:
    """Raise UploadRefused unless each numbered part is there, whole; `sizes` are by number."""
    number, missing = 1, []
    while (size := size_of_part(upload.num_bytes, number)) > 0:
        if sizes.get(number, 0) != size:
            missing.append(number)
        number += 1
    if missing:
        named = ", ".join(map(str, missing[:10])) + ("…" if len(missing) > 10 else "")
        raise UploadRefused(
            f"{len(missing):,} of the file's {number - 1:,} parts are not there: {named}.",
            code="missing_parts",
        )


def parts_mismatch() -> UploadRefused:
    """Return the refusal of parts of another kind, or in another order, than were begun with."""
    return UploadRefused(
        "The upload is being completed from other parts, or its parts go to urls.",
        param="part_ids",
        code="other_parts",
    )


def wrong_md5() -> UploadRefused:
    """Return the refusal of bytes that are not those that were meant."""
    return UploadRefused(
        "The bytes have another `md5`: the upload is cancelled, begin a new one.",
        param="md5",
        code="md5_mismatch",
    )


def _no_part(number: object) -> UploadRefused:
    return UploadRefused(
        f"The file has no part {number}.", param="part_numbers", code="unknown_part"
    )


def _bad_parts(words: str) -> UploadRefused:
    return UploadRefused(f"`part_ids` {words}.", param="part_ids", code="unknown_part")

"""A file as OpenAI's clients know it, and what they may say of one they upload."""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal
from urllib.parse import quote

from pydantic import BaseModel, Field

from handler.api.envelope.errors import Refused
from handler.batch.model import File
from handler.batch.request import MAX_EXPIRY_SECONDS, MIN_EXPIRY_SECONDS

BATCH: Final = "batch"
_MAX_NAME_LENGTH: Final = 255
# What has no shape of its own, and what turns the line round in a listing.
_UNSEEN: Final = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff]"
)


class FileObject(BaseModel):
    """OpenAI's File: every key is present."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"
    status_details: None = None


class FileDeleted(BaseModel):
    """The word that a file is gone."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class ExpiresAfter(BaseModel):
    """When a file shall go: so many seconds after it was made."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=MIN_EXPIRY_SECONDS, le=MAX_EXPIRY_SECONDS)]


def file_object(file: File) -> FileObject:
    """Return a file as clients see it."""
    return FileObject(
        id=file.id,
        bytes=file.num_bytes,
        created_at=file.created_at,
        expires_at=file.expires,
        filename=file.filename,
        purpose=file.purpose,
    )


def check_purpose(purpose: str) -> str:
    """Return the purpose of a file to be; raises Refused for all that batches do not read."""
    if purpose != BATCH:
        raise Refused(
            f"`purpose` must be `{BATCH}`: files are the inputs of batches here.",
            param="purpose",
            code="invalid_purpose",
        )
    return purpose


def name_of(filename: str | None) -> str:
    """Return a name that can be shown, of whatever a client has called its file."""
    name = _UNSEEN.sub("", (filename or "").replace("\\", "/").rpartition("/")[2]).strip()
    return name[:_MAX_NAME_LENGTH] or "upload"


def disposition_of(filename: str) -> str:
    """Return the header by which a browser keeps a file under its name (RFC 6266)."""
    plain = re.sub(r"[^A-Za-z0-9._ -]", "_", filename)
    return f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(filename, safe='')}"

"""OpenAI's File object, and the parameters of an upload."""

from __future__ import annotations

import re
import unicodedata
from typing import Annotated, Final, Literal
from urllib.parse import quote

from pydantic import BaseModel, Field

from .batch_request import MAX_EXPIRY_SECONDS, MIN_EXPIRY_SECONDS
from .errors import InvalidOption
from .stored_file import File

BATCH: Final = "batch"
_MAX_NAME_LENGTH: Final = 255
# Control, format (such as direction marks and joiners), surrogate, private and unassigned
# characters, and line and paragraph separators.
_UNSEEN_KINDS: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
# Letters and marks without a visible shape (Unicode's Default_Ignorable_Code_Point),
# and Braille's blank.
_UNSEEN: Final = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0"
    "\U000e0100-\U000e01ef]"
)


class InvalidPurpose(InvalidOption):
    """An unsupported purpose of a file."""

    code = "invalid_purpose"


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
    """Confirmation that a file is deleted."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class ExpiresAfter(BaseModel):
    """Expiry of a file, in seconds after its creation."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=MIN_EXPIRY_SECONDS, le=MAX_EXPIRY_SECONDS)]


def file_object(file: File) -> FileObject:
    """Return a file as clients see it."""
    return FileObject(
        id=file.id,
        bytes=file.num_bytes,
        created_at=file.created_at,
        expires_at=file.expires,
        filename=display_name(file.filename),
        purpose=file.purpose,
    )


def check_purpose(purpose: str) -> str:
    """Return the purpose of a new file; raises InvalidPurpose for an unsupported one."""
    if purpose != BATCH:
        raise InvalidPurpose(
            f"`purpose` must be `{BATCH}`: only batch input files are supported.", param="purpose"
        )
    return purpose


def display_name(filename: str | None) -> str:
    """Return a printable name for a client's file name."""
    name = (filename or "").replace("\\", "/").rpartition("/")[2]
    seen = "".join(char for char in name if unicodedata.category(char) not in _UNSEEN_KINDS)
    return _UNSEEN.sub("", seen).strip()[:_MAX_NAME_LENGTH].rstrip() or "upload"


def content_disposition(filename: str) -> str:
    """Return the header that makes browsers save a file under its name (RFC 6266).

    Files in the bucket may have any name, and so may their results.
    """
    filename = display_name(filename)
    plain = re.sub(r"[^A-Za-z0-9._ -]", "_", filename)
    return f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(filename, safe='')}"

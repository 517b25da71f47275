"""Domain values: a file of OpenAI's Files API, and one that is still being uploaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

UploadWay = Literal["parts", "urls"]


@dataclass(frozen=True, slots=True)
class File:
    """An object with an ID of OpenAI's Files API.

    `version_id` is the object's version if the bucket keeps versions: a later version of the key is
    another file. The file expires at `expires`. `created_ns` orders the files of one second.
    """

    id: str
    tenant: str
    key: str
    num_bytes: int
    created_at: int
    filename: str
    purpose: str
    expires: int | None = None
    version_id: str | None = None
    created_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Upload:
    """A file that is still being uploaded; it becomes the file `file_id`, or is cancelled.

    Its bytes arrive in one of two ways: as small parts through the API, with `digest` identifying
    the chosen ones, or at presigned URLs of S3; `multipart_id` is S3's own upload. It accepts no
    parts after `expires_at`, and from `expires` on the table may delete it. The file expires
    `file_seconds` after its creation, if that is set.
    """

    id: str
    tenant: str
    num_bytes: int
    filename: str
    purpose: str
    created_at: int
    expires_at: int
    file_id: str
    status: Literal["pending", "completed", "cancelled"] = "pending"
    file_seconds: int | None = None
    way: UploadWay | None = None
    digest: str = ""
    multipart_id: str | None = None
    expires: int | None = None

"""Result files: the published objects of a batch, as files of the API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tidemill.batch.creation_order import creation_ns
from tidemill.batch.model import Batch
from tidemill.batch.stored_file import File

from ..lifecycle.batch_lock import BatchLock

BATCH_ID: Final = "batch-id"
"""Name of the user metadata with the owner of an object."""


def find_made(
    lock: BatchLock, key: str, num_bytes: int | None = None, *, owner: Batch | None = None
) -> Mapping[str, Any] | None:
    """Return the S3 metadata of the owner's object; None if it is missing or another batch's.

    The owner is the locked batch unless another one is given.
    """
    found = lock.aws.run(lock.deployment.bucket.head(key))
    if found is None or num_bytes not in {None, found["ContentLength"]}:
        return None
    return found if found["Metadata"].get(BATCH_ID) == (owner or lock.batch).id else None


def record_file(lock: BatchLock, file_id: str, key: str, found: Mapping[str, Any]) -> None:
    """Record an object, with its S3 metadata, as a file of the batch's tenant."""
    created_at = lock.batch.winds_up_since or lock.batch.created_at
    file = File(
        id=file_id,
        tenant=lock.batch.tenant,
        key=key,
        num_bytes=found["ContentLength"],
        created_at=created_at,
        created_ns=creation_ns(),
        filename=key.rpartition("/")[2],
        purpose="batch_output",
        version_id=found.get("VersionId"),
        expires=_file_expires(lock.batch, created_at),
    )
    lock.aws.run(lock.deployment.files.put_file(file))


def _file_expires(batch: Batch, created_at: int) -> int | None:
    """Return when a result expires: with its batch, or earlier if the request set it."""
    expires_seconds = batch.options.output_expires_seconds
    ends = [created_at + expires_seconds if expires_seconds is not None else None, batch.expires]
    return min((at for at in ends if at is not None), default=None)

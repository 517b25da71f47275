"""Operations on uploads: files that arrive in parts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tidemill.batch.stored_file import File, Upload, UploadWay

from ...errors import ConditionFailed
from ..calls import Call, Operation
from ..items import dump, load, to_item
from .files import file_item
from .store import META, Store, expression

_PENDING = "#status = :pending"


class UploadStore(Store):
    """Creates operations on the uploads in a deployment's table."""

    __slots__ = ()

    def create_upload(self, upload: Upload) -> Operation[None]:
        """Record a new upload."""
        item = to_item(_upload_key(upload.id) | dump(upload))
        # The ID is unique to this upload: a repeated write changes nothing.
        yield Call("dynamodb", "put_item", {"TableName": self.name, "Item": item})

    def get_upload(self, upload_id: str) -> Operation[Upload | None]:
        """Return the current upload with this ID, or None."""
        fields = yield from self.get(_upload_key(upload_id))
        return load(Upload, fields) if fields else None

    def choose(
        self, upload: Upload, way: UploadWay, digest: str, expires_at: int
    ) -> Operation[Upload]:
        """Fix how the bytes come and which parts count; return the resulting upload.

        The first choice is final, and an upload that has ended is unchanged.
        """
        changes = {"way": way, "digest": digest, "expires_at": expires_at}
        return (
            yield from self._change(upload, changes, f"{_PENDING} AND attribute_not_exists(#way)")
        )

    def note_multipart(self, upload: Upload, multipart_id: str) -> Operation[Upload]:
        """Record S3's upload ID unless one is known; return the resulting upload."""
        return (
            yield from self._change(
                upload,
                {"multipart_id": multipart_id},
                f"{_PENDING} AND attribute_not_exists(#multipart_id)",
            )
        )

    def cancel_upload(self, upload: Upload) -> Operation[Upload]:
        """Cancel an upload unless it has ended; return the resulting upload."""
        return (yield from self._change(upload, {"status": "cancelled"}, _PENDING))

    def complete_upload(self, upload: Upload, file: File) -> Operation[Upload]:
        """End an upload and record its file, both or none; return the resulting upload."""
        ended = {
            "TableName": self.name,
            "Key": to_item(_upload_key(upload.id)),
            **expression(
                {"status": "completed"}, condition=_PENDING, values={":pending": "pending"}
            ),
        }
        recorded = {"TableName": self.name, "Item": file_item(file)}
        try:
            yield self.transact({"Update": ended}, {"Put": recorded})
        except ConditionFailed:
            now = yield from self.get_upload(upload.id)
            return now or upload
        return replace(upload, status="completed")

    def forget_upload(self, upload_id: str) -> Operation[None]:
        """Delete the item of an upload."""
        key = to_item(_upload_key(upload_id))
        yield Call("dynamodb", "delete_item", {"TableName": self.name, "Key": key})

    def _change(self, upload: Upload, changes: dict[str, Any], condition: str) -> Operation[Upload]:
        try:
            fields = yield from self.update(
                _upload_key(upload.id), changes, condition, {":pending": "pending"}
            )
        except ConditionFailed as exc:
            return load(Upload, exc.item) if exc.item else upload
        return load(Upload, fields)


def _upload_key(upload_id: str) -> dict[str, object]:
    return {"pk": f"UPLOAD#{upload_id}", "sk": META}

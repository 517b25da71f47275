"""Operations on files: uploads of clients, and results of batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

from tidemill.batch.creation_order import creation_key
from tidemill.batch.stored_file import File

from ..calls import Call, Operation
from ..items import dump, load, to_item
from .store import META, Store, present
from .table import TENANT_INDEX

Order = Literal["asc", "desc"]

# All index entries of files are between these two.
_FIRST, _LAST = "FILE#", "FILE$"
# How long a list can continue after a file that was deleted in the meantime.
_REMEMBERED_SECONDS: Final = 24 * 3600


class FileStore(Store):
    """Creates operations on the files in a deployment's table."""

    __slots__ = ()

    def put_file(self, file: File) -> Operation[None]:
        """Record a file; writing it again changes nothing."""
        yield Call("dynamodb", "put_item", {"TableName": self.name, "Item": file_item(file)})

    def get_file(self, file_id: str) -> Operation[File | None]:
        """Return the file with this ID, or None, also if it was deleted."""
        fields = yield from self.get(_file_key(file_id))
        return load(File, fields) if fields and "tenant" in fields else None

    def get_files(self, file_ids: Sequence[str]) -> Operation[list[File]]:
        """Return those of these files that exist, unordered; the read is eventually consistent."""
        found = yield from self.get_many([_file_key(file_id) for file_id in file_ids])
        return [load(File, fields) for fields in found if "tenant" in fields]

    def find_place(self, tenant: str, file_id: str) -> Operation[str | None]:
        """Return the place of a tenant's file in its lists; a deleted file keeps it for a while."""
        fields = yield from self.get(_file_key(file_id))
        is_own = fields is not None and tenant in (fields.get("tenant"), fields.get("was_of"))
        return str(fields["created_id"]) if fields is not None and is_own else None

    def delete_file(self, file: File, now: int) -> Operation[None]:
        """Delete a file; only its place in lists is stored a while longer."""
        left = {
            "created_id": _created_id(file),
            "was_of": file.tenant,
            "expires": now + _REMEMBERED_SECONDS,
        }
        item = to_item(_file_key(file.id) | left)
        yield Call("dynamodb", "put_item", {"TableName": self.name, "Item": item})

    def list_files(
        self,
        tenant: str,
        *,
        limit: int,
        after: str | None = None,
        order: Order = "desc",
        purpose: str | None = None,
    ) -> Operation[tuple[list[File], bool]]:
        """Return a tenant's files after the place `after`, and whether more follow.

        The index is eventually consistent.
        """
        first, last = (after or _FIRST, _LAST) if order == "asc" else (_FIRST, after or _LAST)
        values = {":tenant": tenant, ":first": first, ":last": last}
        arguments: dict[str, Any] = {
            "TableName": self.name,
            "IndexName": TENANT_INDEX,
            "KeyConditionExpression": "tenant = :tenant AND created_id BETWEEN :first AND :last",
            "ScanIndexForward": order == "asc",
            # BETWEEN includes its bounds, so `after` itself is returned too.
            "Limit": limit + 2,
        }
        if purpose is not None:
            values[":purpose"] = purpose
            arguments |= {
                "FilterExpression": "#purpose = :purpose",
                "ExpressionAttributeNames": {"#purpose": "purpose"},
            }
        arguments["ExpressionAttributeValues"] = to_item(values)
        found: list[File] = []
        while len(found) <= limit:
            response = yield Call("dynamodb", "query", arguments)
            found += _files_in(response["Items"], after)
            start = response.get("LastEvaluatedKey")
            if not start:
                break
            arguments["ExclusiveStartKey"] = start
        return found[:limit], len(found) > limit


def file_item(file: File) -> dict[str, Any]:
    """Return the item of a file."""
    return to_item(_file_key(file.id) | dump(file) | {"created_id": _created_id(file)})


def _files_in(items: Sequence[dict[str, Any]], after: str | None) -> list[File]:
    return [load(File, fields) for fields in present(items) if fields["created_id"] != after]


def _file_key(file_id: str) -> dict[str, object]:
    return {"pk": f"FILE#{file_id}", "sk": META}


def _created_id(file: File) -> str:
    return f"{_FIRST}{creation_key(file)}"

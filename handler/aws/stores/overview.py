"""Many batches at once: a tenant's active ones, some by ID, and the reaper's cursor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from tidemill.batch.creation_order import creation_key
from tidemill.batch.model import Batch

from ..calls import Operation
from ..items import load
from .shards import batch_key
from .store import META, Store, present
from .table import ACTIVE, id_of_active

_CURSOR: Final = {"pk": "REAPER", "sk": META}
_MAX_PAGES: Final = 2


class BatchPlace(NamedTuple):
    """Place of an active batch in the order of its tenant's batches; times are Unix seconds.

    The smaller of two comes first. Batches with the same place keep the order of the queue.
    """

    priority: int
    expires_at: int
    created_at: int


class Overview(Store):
    """Creates operations that read many items of the table at once."""

    __slots__ = ()

    def list_active(self, tenant: str, *, is_consistent: bool = False) -> Operation[list[Batch]]:
        """Return the tenant's batches that have not ended, oldest first.

        The list may be a moment old, and miss a new batch, unless the read `is_consistent`.
        """
        listed = yield from self.query(ACTIVE, f"{tenant}#", ("sk",))
        keys = [batch_key(id_of_active(item["sk"])) for item in listed]
        there = yield from self.get_many(keys, is_consistent=is_consistent)
        found = [load(Batch, fields) for fields in there]
        return sorted((batch for batch in found if not batch.is_terminal), key=creation_key)

    def list_places(self, tenant: str) -> Operation[dict[str, BatchPlace]]:
        """Return the places of the tenant's batches that have not ended, by ID.

        It reads at most two pages, which may be a moment old. Batches that an earlier version
        created have no place; a later version may store further fields.
        """
        listed: list[dict[str, Any]] = []
        after = None
        for _ in range(_MAX_PAGES):
            items, after = yield from self.query_page(
                ACTIVE, f"{tenant}#", ("sk", "place", "expires"), after=after, is_consistent=False
            )
            listed += present(items)
            if after is None:
                break
        num_fields = len(BatchPlace._fields)
        return {
            id_of_active(item["sk"]): BatchPlace(*map(int, item["place"][:num_fields]))
            for item in listed
            if len(item.get("place", ())) >= num_fields
        }

    def get_batches(self, batch_ids: Iterable[str]) -> Operation[dict[str, dict[str, Any]]]:
        """Return the current fields of those batches that exist, by ID."""
        keys = [batch_key(batch_id) for batch_id in batch_ids]
        found = yield from self.get_many(keys, is_consistent=True)
        return {str(fields["id"]): fields for fields in found}

    def get_reaper_cursor(self) -> Operation[str | None]:
        """Return the name of the active batch at which the reaper's last run stopped.

        It is None if that run reached the end of the list.
        """
        fields = yield from self.get(_CURSOR)
        return str(fields["after"]) if fields and "after" in fields else None

    def put_reaper_cursor(self, after: str | None) -> Operation[None]:
        """Record where the reaper's next run starts."""
        yield from self.update(_CURSOR, {"after": after})

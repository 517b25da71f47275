"""Active batches of one tenant."""

from __future__ import annotations

from tidemill.batch.creation_order import creation_key
from tidemill.batch.model import Batch

from ..calls import Operation
from ..items import load
from .shards import batch_key
from .store import Store
from .table import ACTIVE, id_of_active


class Overview(Store):
    """Makes the operations that look over many items of the table at once."""

    __slots__ = ()

    def list_active(self, tenant: str, *, is_consistent: bool = False) -> Operation[list[Batch]]:
        """Return the tenant's batches that have not ended, oldest first.

        They may be a moment behind, and a new one left out, unless the read `is_consistent`.
        """
        listed = yield from self.query(ACTIVE, f"{tenant}#", ("sk",))
        keys = [batch_key(id_of_active(item["sk"])) for item in listed]
        there = yield from self.get_many(keys, is_consistent=is_consistent)
        found = [load(Batch, fields) for fields in there]
        return sorted((batch for batch in found if not batch.is_terminal), key=creation_key)

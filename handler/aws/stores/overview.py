"""What is under way of one tenant."""

from __future__ import annotations

from handler.aws.calls import Operation
from handler.aws.items import load
from handler.aws.stores.store import META, Store
from handler.aws.stores.table import ACTIVE
from handler.batch.model import Batch


class Overview(Store):
    """Makes the operations that look over many items of the table at once."""

    __slots__ = ()

    def list_active(self, tenant: str) -> Operation[list[Batch]]:
        """Return the tenant's batches that have not ended, oldest first."""
        listed = yield from self.query(ACTIVE, "BATCH#", ("sk", "tenant"))
        # One of before tenants were listed may be anybody's.
        keys = [
            {"pk": item["sk"], "sk": META}
            for item in listed
            if item.get("tenant", tenant) == tenant
        ]
        found = [load(Batch, fields) for fields in (yield from self.get_many(keys))]
        ours = [batch for batch in found if batch.tenant == tenant and not batch.is_terminal]
        return sorted(ours, key=lambda batch: (batch.created_at, batch.id))

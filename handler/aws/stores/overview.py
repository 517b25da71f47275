"""What is under way: a tenant's active batches and how their shards stand."""

from __future__ import annotations

from typing import NamedTuple

from handler.aws.calls import Operation
from handler.aws.items import load
from handler.aws.stores.shards import is_leased, progress_in
from handler.aws.stores.store import META, Store
from handler.aws.stores.table import ACTIVE
from handler.batch.model import Batch, Progress, ShardStatus


class Survey(NamedTuple):
    """Progress of a batch, and how many of its shards wait for a worker or have one."""

    progress: Progress = Progress()
    num_waiting: int = 0
    num_running: int = 0


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

    def survey(self, batch_id: str, now: float) -> Operation[Survey]:
        """Return how the shards of a batch stand."""
        only = ("progress", "owner", "lease_until", "status")
        fields = yield from self.query(f"BATCH#{batch_id}", "SHARD#", only)
        pending = [item for item in fields if item["status"] == ShardStatus.PENDING]
        num_running = sum(is_leased(item, now) for item in pending)
        progress = sum((progress_in(item, now) for item in fields), start=Progress())
        return Survey(progress, len(pending) - num_running, num_running)

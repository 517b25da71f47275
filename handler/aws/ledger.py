"""Sums that are kept for people: a batch's history, and what a tenant's ended batches came to.

They are added to and never decide anything: a write that is sent twice counts twice, one that fails
is left out.
"""

from __future__ import annotations

from handler.aws.calls import Operation
from handler.aws.items import load
from handler.aws.store import Store
from handler.batch.history import Bucket
from handler.batch.model import Batch


class Ledger(Store):
    """Makes the operations on such sums in the table."""

    __slots__ = ()

    def add_history(self, batch: Batch, gained: Bucket) -> Operation[None]:
        """Add to a bucket of the history of a batch, with which it is forgotten."""
        yield from self.update(
            {
                "pk": f"BATCH#{batch.id}",
                "sk": f"HISTORY#{gained.start:012}#{gained.seconds}",
            },
            {"start": gained.start, "seconds": gained.seconds}
            | ({} if batch.expires is None else {"expires": batch.expires}),
            added={
                "completed": gained.completed,
                "failed": gained.failed,
                "tokens": gained.tokens,
            },
        )

    def list_history(self, batch_id: str) -> Operation[list[Bucket]]:
        """Return what a batch has gained, by time."""
        fields = yield from self.query(f"BATCH#{batch_id}", "HISTORY#")
        return [load(Bucket, item) for item in fields]

"""Ledger: the history of a batch, and a tenant's totals over its ended batches.

They are sums and never decide anything. An ended batch is counted exactly once: with the record
that its end was announced. A write to a history that is sent twice counts twice, and one that fails
is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from tidemill.batch.model import Batch
from tidemill.batch.month import ModelUse, total_of
from tidemill.batch.progress import HistoryBucket
from tidemill.batch.progress_counts import Progress
from tidemill.batch.states import TERMINAL, Status

from ..calls import Operation
from ..items import dump, load, to_item
from .store import Store, expression

_TENANT: Final = "TENANT#"


class Total(NamedTuple):
    """Number of ended batches by status, and the sums over them."""

    batches: Mapping[Status, int]
    done: Progress
    cost: float


class Ledger(Store):
    """Creates operations on these sums."""

    __slots__ = ()

    def add_history(self, batch: Batch, gained: HistoryBucket) -> Operation[None]:
        """Add to a bucket of a batch's history, which expires with the batch."""
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
                "input_tokens": gained.input_tokens,
                "audio_seconds": gained.audio_seconds,
            },
        )

    def counts_of_end(
        self, batch: Batch, done: Progress, uses: Sequence[ModelUse], month: str
    ) -> list[dict[str, Any]]:
        """Return the writes that add an ended batch to its tenant's totals and to its month."""
        sums = total_of(uses)
        total = self._adding(
            _total_key(batch.tenant),
            {
                f"batches_{batch.status}": 1,
                "completed": done.completed,
                "failed": done.failed,
                "reused": done.reused,
                "truncated": done.truncated,
                "prompt_tokens": done.prompt_tokens,
                "cached_tokens": done.cached_tokens,
                "completion_tokens": done.completion_tokens,
                "reasoning_tokens": done.reasoning_tokens,
                "gpu_seconds": round(done.gpu_seconds, 3),
                "audio_seconds": round(done.audio_seconds, 3),
                "cost": sums.cost,
            },
        )
        months = (
            self._adding(_month_key(batch.tenant, month, use.model), _adds_of(use)) for use in uses
        )
        all_tenants = self._adding(_all_tenants_key(month, batch.tenant), _adds_of(sums))
        return [total, *months, all_tenants]

    def list_month(self, tenant: str, month: str) -> Operation[list[ModelUse]]:
        """Return the use of the tenant's batches that ended in a month, by model."""
        prefix = _month_prefix(month)
        found = yield from self.query(f"USAGE#{tenant}", prefix)
        return [load(ModelUse, {"model": item["sk"].removeprefix(prefix)} | item) for item in found]

    def list_month_by_tenant(self, month: str) -> Operation[dict[str, ModelUse]]:
        """Return the use of each tenant's batches that ended in a month, over all models."""
        found = yield from self.query(f"USAGE_OF#{month}", _TENANT)
        return {
            item["sk"].removeprefix(_TENANT): load(ModelUse, {"model": ""} | item) for item in found
        }

    def _adding(self, key: dict[str, object], counts: Mapping[str, float]) -> dict[str, Any]:
        change = expression({}, added=counts)
        return {"Update": {"TableName": self.name, "Key": to_item(key), **change}}

    def get_total(self, tenant: str) -> Operation[Total]:
        """Return the totals of the tenant's ended batches."""
        fields = (yield from self.get(_total_key(tenant))) or {}
        return Total(
            {status: int(fields.get(f"batches_{status}", 0)) for status in sorted(TERMINAL)},
            load(Progress, fields),
            float(fields.get("cost", 0.0)),
        )

    def list_history(self, batch_id: str) -> Operation[list[HistoryBucket]]:
        """Return a batch's history, by time."""
        fields = yield from self.query(f"BATCH#{batch_id}", "HISTORY#")
        return [load(HistoryBucket, item) for item in fields]


def _adds_of(use: ModelUse) -> dict[str, float]:
    counts = dump(use)
    del counts["model"]
    return counts


def _month_prefix(month: str) -> str:
    return f"MONTH#{month}#"


def _month_key(tenant: str, month: str, model: str) -> dict[str, object]:
    return {"pk": f"USAGE#{tenant}", "sk": f"{_month_prefix(month)}{model}"}


def _all_tenants_key(month: str, tenant: str) -> dict[str, object]:
    return {"pk": f"USAGE_OF#{month}", "sk": f"{_TENANT}{tenant}"}


def _total_key(tenant: str) -> dict[str, object]:
    return {"pk": f"USAGE#{tenant}", "sk": "TOTAL"}

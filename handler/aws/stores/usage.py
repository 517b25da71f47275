"""Usage counters of a tenant's limits: concurrent writers never exceed a bound.

The time spent waiting for the tenant's receivers is counted too, but not bounded.

If the reply to a count is lost, a retry may count twice. For a day's counters this costs the
tenant one request or upload, or the GPU seconds of one worker report; lines of batches are
counted exactly once.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final, Literal

from tidemill.batch.model import Batch
from tidemill.batch.states import Status

from ...errors import ConditionFailed
from ..calls import Operation
from ..items import to_item
from .shards import batch_key
from .store import Store, expression

Counted = Literal["requests", "bytes"]
# Key of the sum over all tenants; not a tenant's name.
EVERYBODY: Final = "*"

DAY_SECONDS: Final = 24 * 3600
_KEPT_SECONDS = 3 * DAY_SECONDS
# Time of a receiver that is not counted as waiting, and the maximum for those of a tenant.
PATIENCE_SECONDS: Final = 5.0
_MAX_WAITED_SECONDS, _WAITED_PERIOD_SECONDS = 300.0, 600


class UsageStore(Store):
    """Creates operations on the usage of tenants."""

    __slots__ = ()

    def add(
        self, tenant: str, what: Counted, number: int, *, limit: int, period: str, now: int
    ) -> Operation[bool]:
        """Add a number to a period's usage unless that exceeds the limit; True if it was added.

        `period` names a day or a minute.
        """
        if number > limit:
            return False
        try:
            yield from self.update(
                {"pk": f"USAGE#{tenant}", "sk": period},
                {"expires": now + _KEPT_SECONDS},
                f"attribute_not_exists(#{what}) OR #{what} <= :room",
                {":room": limit - number},
                added={what: number},
            )
        except ConditionFailed:
            return False
        return True

    def add_gpu_seconds(self, tenant: str, seconds: float, now: float) -> Operation[None]:
        """Add GPU time to the day of a tenant, or of EVERYBODY; one write or none."""
        yield from self.update(
            _day_key(tenant, now),
            {"expires": int(now) + _KEPT_SECONDS},
            added={"gpu_seconds": round(seconds, 3)},
        )

    def gpu_seconds_today(self, tenant: str, now: float) -> Operation[float]:
        """Return the GPU time of a tenant's requests, or of EVERYBODY's, since 00:00 UTC."""
        fields = yield from self.get(_day_key(tenant, now))
        return float((fields or {}).get("gpu_seconds", 0.0))

    def add_waited(self, tenant: str, seconds: float, now: int) -> Operation[None]:
        """Count the seconds that a run has waited for a tenant's receiver, if they are many."""
        if seconds <= PATIENCE_SECONDS:
            return
        yield from self.update(
            _waited_key(tenant, now), {"expires": now + _KEPT_SECONDS}, added={"seconds": seconds}
        )

    def may_wait(self, tenant: str, now: int) -> Operation[bool]:
        """Return whether runs may wait for a tenant's receivers in the present ten minutes.

        After five minutes of waiting they may not, because all tenants share the runs.
        """
        fields = yield from self.get(_waited_key(tenant, now))
        return float((fields or {}).get("seconds", 0.0)) < _MAX_WAITED_SECONDS

    def count_lines(self, tenant: str) -> Operation[int]:
        """Return the counted lines of the tenant's active batches."""
        fields = yield from self.get(_queue_key(tenant))
        return int((fields or {}).get("num_lines", 0))

    def reserve_lines(self, batch: Batch, num_lines: int, limit: int) -> Operation[bool]:
        """Count a batch's lines unless that would exceed the limit; True if they are counted.

        A batch is counted only while it is validating, and once; its end releases the lines.
        """
        if num_lines > limit:
            return False
        room = "attribute_not_exists(#num_lines) OR #num_lines <= :room"
        try:
            yield self.transact(
                self._change_batch(
                    batch,
                    {"queued_lines": num_lines},
                    "#status = :validating AND attribute_not_exists(#queued_lines)",
                    {":validating": str(Status.VALIDATING)},
                ),
                self._change_count(batch, num_lines, room, {":room": limit - num_lines}),
            )
        except ConditionFailed:
            fields = yield from self.get(batch_key(batch.id))
            return fields is not None and fields.get("queued_lines") is not None
        return True

    def release_lines(self, batch: Batch) -> Operation[None]:
        """Subtract a batch's lines from the count, once, if they were counted."""
        if batch.queued_lines is None:
            return
        try:
            yield self.transact(
                self._change_batch(
                    batch,
                    {"queued_lines": None},
                    "#queued_lines = :counted",
                    {":counted": batch.queued_lines},
                ),
                self._change_count(batch, -batch.queued_lines),
            )
        except ConditionFailed:
            return

    def _change_batch(
        self, batch: Batch, fields: dict[str, object], condition: str, values: dict[str, object]
    ) -> dict[str, object]:
        change = expression(fields, condition=condition, values=values)
        return {"Update": {"TableName": self.name, "Key": to_item(batch_key(batch.id)), **change}}

    def _change_count(
        self,
        batch: Batch,
        number: int,
        condition: str | None = None,
        values: dict[str, object] | None = None,
    ) -> dict[str, object]:
        change = expression({}, added={"num_lines": number}, condition=condition, values=values)
        key = to_item(_queue_key(batch.tenant))
        return {"Update": {"TableName": self.name, "Key": key, **change}}


def name_of_day(now: float) -> str:
    """Return the name of a day (UTC) as a period of `add`."""
    return f"DAY#{datetime.fromtimestamp(now, UTC):%Y-%m-%d}"


def _day_key(tenant: str, now: float) -> dict[str, object]:
    return {"pk": f"USAGE#{tenant}", "sk": name_of_day(now)}


def _waited_key(tenant: str, now: int) -> dict[str, object]:
    return {"pk": f"USAGE#{tenant}", "sk": f"WAITED#{now // _WAITED_PERIOD_SECONDS:010}"}


def _queue_key(tenant: str) -> dict[str, object]:
    return {"pk": f"USAGE#{tenant}", "sk": "QUEUED"}

"""Use of a deployment by a tenant in a month: ended batches, and active ones in this month."""

from __future__ import annotations

from typing import NamedTuple

from tidemill.batch.month import ModelUse, merged, month_of, uses_of

from ..aws.sync import Aws
from ..deployment import Deployment
from .stats import MAX_SURVEYED


class MonthUse(NamedTuple):
    """Use by model, and how many of the batches have not ended; they count in this month only."""

    uses: list[ModelUse]
    num_active: int


def month_use(aws: Aws, deployment: Deployment, tenant: str, month: str, now: float) -> MonthUse:
    """Return the use of a tenant in a month; a batch counts in the month in which it ends."""
    ended = aws.run(deployment.ledger.list_month(tenant, month))
    if month != month_of(now):
        return MonthUse(ended, 0)
    active = aws.run(deployment.overview.list_active(tenant))
    running = [batch for batch in active if batch.in_progress_at is not None][:MAX_SURVEYED]
    found = aws.run_all(deployment.table.get_shard_progress(batch) for batch in running)
    price_of = deployment.settings.gpu_hour_price
    uses = [
        use
        for batch, standing in zip(running, found, strict=True)
        for use in uses_of(batch, standing.progress(now), price_of)
    ]
    return MonthUse(merged([*ended, *uses]), len(running))

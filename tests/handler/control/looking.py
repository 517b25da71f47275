"""A look of the reaper at one batch alone."""

from __future__ import annotations

from tests.handler.intake.rig import Cloud
from tidemill.batch.fleet import OpenWork
from tidemill.batch.model import Batch
from tidemill.handler.aws.stores.table import active_name
from tidemill.handler.control.reaper import check_batch, open_work_of, read_round
from tidemill.handler.fleet.open_batches import read_batches


def look_at(cloud: Cloud, batch: Batch, now: int) -> OpenWork | None:
    """Read and repair a batch as a run of the reaper does; return its open work."""
    seen = read_batches(cloud.aws, cloud.deployment, [active_name(batch)], now)
    this = read_round(cloud.aws, cloud.deployment, seen, now)
    work = open_work_of(cloud.deployment, seen, this)
    for each in seen:
        cloud.run(check_batch(cloud.deployment, each, this))
    return work[0] if work else None

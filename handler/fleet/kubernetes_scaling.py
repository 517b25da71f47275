"""One step of the cluster's launcher: ends of Jobs are counted, then the fleets are scaled."""

from __future__ import annotations

from collections.abc import Mapping

from tidemill.batch.fleet import FleetPlan

from ..aws.sync import Aws
from ..deployment import Deployment
from ..observability import logger
from .job_ends import count_ends
from .open_batches import read_open_work
from .scale import scale_fleets


def scale_once(aws: Aws, deployment: Deployment, plans: Mapping[str, FleetPlan], now: int) -> None:
    """Count the ends of all fleets' Jobs, and scale the fleets to the open work.

    The reaper's Lambda does everything else that batches need. Raises AwsError if the open work
    cannot be read; a failure with one fleet is logged.
    """
    for model, plan in sorted(plans.items()):
        try:
            aws.run(count_ends(deployment, plan, now))
        except Exception:  # noqa: BLE001 - one model's failure must not stop the others
            logger.exception("ends could not be counted", model=model)
    found = read_open_work(aws, deployment, now)
    keeps_ready = not aws.run(deployment.limits.is_budget_spent(now))
    aws.run(scale_fleets(deployment, plans, found, now, keeps_ready=keeps_ready))

"""Why the lines of a batch are not run, as whoever waits for them is told."""

from __future__ import annotations

from handler.aws.calls import Operation
from handler.batch.fleet import Waiting
from handler.batch.model import Batch
from handler.batch.states import Status
from handler.deployment import Deployment
from handler.fleet.brake import waiting_of


def why_waiting(deployment: Deployment, batch: Batch, now: float) -> Operation[Waiting | None]:
    """Return why no worker is started for a batch that runs; None where nothing is amiss."""
    if batch.status is not Status.IN_PROGRESS or not batch.model or not deployment.settings.fleets:
        return None
    return waiting_of((yield from deployment.fleets.get_state(batch.model)), now)

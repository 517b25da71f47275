"""Waiting reason: explains to the user why no worker runs the lines of a batch."""

from __future__ import annotations

from tidemill.batch.fleet import WaitingReason
from tidemill.batch.model import Batch
from tidemill.batch.states import Status

from ..aws.calls import Operation
from ..deployment import Deployment
from .circuit_breaker import describe_waiting


def get_waiting_reason(
    deployment: Deployment, batch: Batch, now: float
) -> Operation[WaitingReason | None]:
    """Return the reason that lines of a running batch wait; None if all is well."""
    if batch.status is not Status.IN_PROGRESS:
        return None
    if (pause := batch.pause_at(now)) is not None:
        return WaitingReason(pause.code, pause.message, pause.since)
    if not batch.model or not deployment.settings.fleets:
        return None
    models = dict.fromkeys(batch.model_of(is_escalated=each) for each in (False, True))
    for model in models:
        state = yield from deployment.fleets.get_state(model)
        if (reason := describe_waiting(state, now)) is not None:
            return reason
    return None

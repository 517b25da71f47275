"""Launcher: the interface that starts, lists and stops workers, and its errors."""

from __future__ import annotations

from typing import Protocol

from tidemill.batch.errors import HandlerError
from tidemill.batch.fleet import FleetPlan, Worker

from ..aws.calls import Operation


class NotStarted(HandlerError):
    """No worker was started, for an unknown reason; the message is AWS's own."""

    code = "not_started"


class NoCapacity(NotStarted):
    """No machine is available now, because of a quota or a shortage; the message has the reason."""

    code = "no_capacity"


class StartRefused(NotStarted):
    """AWS refuses the start until the operator fixes something, such as a role."""

    code = "start_refused"


class Launcher(Protocol):
    """Creates operations on the workers of one fleet."""

    def list_workers(self, plan: FleetPlan) -> Operation[list[Worker]]:
        """List the workers that have not ended; recent starts may be missing."""

    def start(self, plan: FleetPlan, number: int) -> Operation[str]:
        """Start one worker of the plan's release; idempotent per `number`.

        Returns its ID. Raises NotStarted, and AwsError if it is unknown whether one starts.
        """

    def stop(self, plan: FleetPlan, worker: Worker) -> Operation[None]:
        """Stop a worker as SIGTERM does: it hands over its shards within a minute."""

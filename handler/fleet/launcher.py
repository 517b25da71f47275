"""Launcher: the interface that starts, lists and stops workers, and its errors."""

from __future__ import annotations

from typing import Protocol

from tidemill.batch.errors import HandlerError
from tidemill.batch.fleet import FleetPlan, Worker

from ..aws.calls import Operation


class NotStarted(HandlerError):
    """AWS started no worker, for a reason that we do not know; the message is AWS's own."""

    code = "not_started"


class NoCapacity(NotStarted):
    """No machine is available now, for a quota or a shortage; the message says why."""

    code = "no_capacity"


class StartRefused(NotStarted):
    """AWS refuses the start until something of ours is fixed, such as a role."""

    code = "start_refused"


class Launcher(Protocol):
    """Creates operations on the workers of one fleet."""

    def list_workers(self, plan: FleetPlan) -> Operation[list[Worker]]:
        """List the workers that have not ended; recent starts may be missing."""

    def start(self, plan: FleetPlan, number: int) -> Operation[str]:
        """Start one worker of the plan's release; idempotent per `number`.

        Returns its id. Raises NotStarted, and AwsError where it is unknown whether one starts.
        """

    def stop(self, plan: FleetPlan, worker: Worker) -> Operation[None]:
        """Stop a worker as SIGTERM does: it hands over its shards within a minute."""

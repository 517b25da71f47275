"""What starts, lists and stops workers: one small interface, whatever runs them."""

from __future__ import annotations

from typing import Protocol

from handler.aws.calls import Operation
from handler.batch.fleet import FleetPlan, Worker
from handler.errors import HandlerError


class NotStarted(HandlerError):
    """AWS has started no worker; the message is what it said, of which nobody knows the meaning."""

    code = "not_started"


class NoCapacity(NotStarted):
    """No machine can be had now, for a quota or for want of them; the message says why."""

    code = "no_capacity"


class StartRefused(NotStarted):
    """AWS refuses the start as it is asked for, and will until something of ours is mended."""

    code = "start_refused"


class Launcher(Protocol):
    """Makes the operations on the workers of one fleet."""

    def running(self, plan: FleetPlan) -> Operation[list[Worker]]:
        """Return the workers that have not ended; those asked for seconds ago may be missing."""

    def start(self, plan: FleetPlan, number: int) -> Operation[str]:
        """Ask for one worker of the plan's release; again with the same number it asks for none.

        Returns its id. Raises NotStarted, and AwsError where nobody knows whether one starts.
        """

    def stop(self, plan: FleetPlan, worker: Worker) -> Operation[None]:
        """Ask a worker to end as SIGTERM does: within a minute it has handed its shards over."""

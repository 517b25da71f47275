"""A fleet with a scripted launcher that refuses, forgets, and loses replies."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tidemill.batch.errors import HandlerError
from tidemill.batch.fleet import FleetPlan, Worker, WorkerStatus
from tidemill.handler.aws.calls import Operation
from tidemill.handler.errors import AwsError
from tidemill.handler.fleet.launcher import NoCapacity


@dataclass
class ListLauncher:
    """A launcher whose workers are `workers`; it has `capacity` machines, and `num_lost` answers.

    Those of `unlisted` numbers run, and are not listed yet.
    """

    workers: list[Worker] = field(default_factory=list)
    capacity: int = 1000
    num_lost: int = 0
    refusal: HandlerError | None = None
    lists: bool = True
    requested: list[int] = field(default_factory=list)

    def list_workers(self, plan: FleetPlan) -> Operation[list[Worker]]:  # noqa: ARG002
        """Return the workers, unless lists are late."""
        yield from ()
        return list(self.workers) if self.lists else []

    def start(self, plan: FleetPlan, number: int) -> Operation[str]:
        """Start a worker of this number, if there is none."""
        yield from ()
        self.requested.append(number)
        if self.refusal:
            raise self.refusal
        name = f"w{number}"
        if name not in {worker.id for worker in self.workers}:
            if len(self.workers) >= self.capacity:
                raise NoCapacity("no machine")
            self.workers.append(Worker(name, plan.release, WorkerStatus.STARTING, number))
        if self.num_lost:
            self.num_lost -= 1
            raise AwsError("the answer was lost")
        return name

    def stop(self, plan: FleetPlan, worker: Worker) -> Operation[None]:  # noqa: ARG002
        """Let a worker stop."""
        yield from ()
        self.workers = [
            replace(each, status=WorkerStatus.STOPPING) if each.id == worker.id else each
            for each in self.workers
        ]

    def run(self, at: int) -> None:
        """Let all that start have started."""
        self.workers = [
            replace(each, status=WorkerStatus.RUNNING, started_at=at)
            if each.status is WorkerStatus.STARTING
            else each
            for each in self.workers
        ]

"""Workers as processes of one machine: asked for in the table, where who supervises them reads."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from handler.aws.calls import Operation
from handler.aws.stores.processes import Process, ProcessStore, process_id
from handler.batch.fleet import FleetPlan, Worker, WorkerStatus

_STATUS = {
    "asked": WorkerStatus.STARTING,
    "running": WorkerStatus.RUNNING,
    "stopping": WorkerStatus.STOPPING,
}


@dataclass(frozen=True, slots=True)
class ProcessLauncher:
    """A `launcher.Launcher`."""

    store: ProcessStore
    now: Callable[[], float] = time.time

    def running(self, plan: FleetPlan) -> Operation[list[Worker]]:
        """Return the processes that have not ended."""
        found = yield from self.store.list_processes(plan.model)
        return [
            Worker(each.id, each.release, _STATUS[each.state], started_at=each.at) for each in found
        ]

    def start(self, plan: FleetPlan, number: int) -> Operation[str]:
        """Ask for a process, whose id is of this number."""
        process = Process(process_id(number), plan.release, "asked", int(self.now()))
        yield from self.store.ask(plan.model, process)
        return process.id

    def stop(self, plan: FleetPlan, worker: Worker) -> Operation[None]:
        """Ask a process to end."""
        yield from self.store.tell(plan.model, worker.id, "stopping", int(self.now()))

"""Process launcher: requests workers in the table, for a local supervisor to start."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from tidemill.batch.fleet import FleetPlan, Worker, WorkerStatus

from ..aws.calls import Operation
from ..aws.stores.processes import Process, ProcessStore, process_id

_STATUS = {
    "asked": WorkerStatus.STARTING,
    "running": WorkerStatus.RUNNING,
    "stopping": WorkerStatus.STOPPING,
}


@dataclass(frozen=True, slots=True)
class ProcessLauncher:
    """Launches workers as local processes; a `launcher.Launcher`."""

    store: ProcessStore
    now: Callable[[], float] = time.time

    def list_workers(self, plan: FleetPlan) -> Operation[list[Worker]]:
        """List the processes that have not ended."""
        found = yield from self.store.list_processes(plan.model)
        return [
            Worker(each.id, each.release, _STATUS[each.state], started_at=each.at) for each in found
        ]

    def start(self, plan: FleetPlan, number: int) -> Operation[str]:
        """Request a process; its id holds `number`."""
        process = Process(process_id(number), plan.release, "asked", int(self.now()))
        yield from self.store.ask(plan.model, process)
        return process.id

    def stop(self, plan: FleetPlan, worker: Worker) -> Operation[None]:
        """Request that a process stops."""
        yield from self.store.tell(plan.model, worker.id, "stopping", int(self.now()))

"""Selects the launcher that starts the workers of a plan."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from tidemill.batch.fleet import FleetPlan, LauncherKind, Worker, WorkerStatus

from ..aws.calls import Operation
from ..aws.stores.processes import Process, ProcessStore, process_id
from ..deployment import Deployment
from .ecs import EcsLauncher
from .kubernetes.launcher import KubernetesLauncher
from .launcher import Launcher
from .sagemaker import SageMakerLauncher

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
        """Request a process; its ID contains `number`."""
        process = Process(process_id(number), plan.release, "asked", int(self.now()))
        yield from self.store.ask(plan.model, process)
        return process.id

    def stop(self, plan: FleetPlan, worker: Worker) -> Operation[None]:
        """Request that a process stops."""
        yield from self.store.tell(plan.model, worker.id, "stopping", int(self.now()))


def launcher_for(deployment: Deployment, kind: LauncherKind) -> Launcher:
    """Return the launcher of this kind."""
    match kind:
        case "ecs":
            return EcsLauncher()
        case "sagemaker":
            return SageMakerLauncher()
        case "kubernetes":
            return KubernetesLauncher()
        case "processes":
            return ProcessLauncher(deployment.processes)

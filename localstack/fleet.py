"""Local fleet: starts and stops the worker processes that the launcher of processes requests.

It does for an item of the table what ECS does for a task: a requested one gets a process, a
stopping one gets SIGTERM, and the exit of a process is sent to the control queue, as EventBridge
sends that of a task.
"""

from __future__ import annotations

import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal
from uuid import uuid4

from localstack.processes import Processes, exit_reason
from tidemill.batch.fleet import FleetPlan
from tidemill.handler.aws.calls import Call, Operation
from tidemill.handler.aws.parameters import plan_text
from tidemill.handler.aws.stores.processes import Process, ProcessStore
from tidemill.handler.aws.sync import Aws
from tidemill.handler.deployment import Deployment
from tidemill.handler.errors import AwsError
from tidemill.handler.fleet.last_error import last_error

StopCode = Literal["ProcessExited", "UserInitiated", "MachineLost", "NoCapacity"]
_POLL_SECONDS = 0.3
# As ECS: SIGKILL comes this many seconds after SIGTERM.
_STOP_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Release:
    """Command and extra environment of the workers of one release."""

    command: Sequence[str]
    environment: Mapping[str, str]


class LocalFleet:
    """Runs the workers of all models as processes; call `reconcile`, or enter `reconciling`.

    `notify` gets a line for each worker that starts or ends; `plans` are the newest, by model. At
    most `max_processes` run at once, over all models; further ones end for lack of
    capacity.
    """

    def __init__(
        self,
        processes: Processes,
        aws: Aws,
        deployment: Deployment,
        notify: Callable[[str], None],
        *,
        max_processes: int | None = None,
    ) -> None:
        self._processes = processes
        self._aws = aws
        self._deployment = deployment
        self._store = ProcessStore(deployment.settings.table)
        self._notify = notify
        self.max_processes = max_processes
        self.plans: dict[str, FleetPlan] = {}
        self._releases: dict[tuple[str, str], Release] = {}
        self._kill_at: dict[str, float] = {}

    def release(self, plan: FleetPlan, *command: str, **environment: str) -> None:
        """Start workers with this plan from now on: existing ones are replaced.

        Each gets its ID in `TIDEMILL_WORKER`.
        """
        self.plans[plan.model] = plan
        self._releases[plan.model, plan.release] = Release(command, environment)
        name = f"{self._deployment.settings.fleets}/{_safe(plan.model)}"
        parameter = {"Name": name, "Value": plan_text(plan), "Type": "String", "Overwrite": True}
        self._aws.run(_single(Call("ssm", "put_parameter", parameter)))

    def workers(self) -> list[tuple[str, Process]]:
        """Return all requested workers that have not ended, each with its model."""
        return [
            (model, each)
            for model in sorted(self.plans)
            for each in self._aws.run(self._store.list_processes(model))
        ]

    @contextmanager
    def reconciling(self) -> Iterator[None]:
        """Reconcile in a thread until the block is left."""
        stop = threading.Event()
        thread = threading.Thread(target=self._reconcile_until, args=(stop,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _reconcile_until(self, stop: threading.Event) -> None:
        while not stop.wait(_POLL_SECONDS):
            with suppress(AwsError):  # the emulator's supervisor handles that
                self.reconcile()

    def reconcile(self) -> None:
        """Reconcile processes with the launcher's requests, and report those that have ended."""
        for model, worker in self.workers():
            name = process_name(model, worker)
            process = self._processes.processes.get(name)
            if process is None:
                self._start_worker(model, worker)
            elif process.poll() is not None:
                self._report_exit(model, worker, process.returncode)
            elif worker.state == "stopping":
                self._stop_worker(name, process)

    def _start_worker(self, model: str, worker: Process) -> None:
        """Start a requested worker; a running one without a process counts as lost."""
        release = self._releases.get((model, worker.release))
        if worker.state == "stopping":
            self._report_end(model, worker, "UserInitiated", "it was stopped before it had begun")
        elif worker.state != "asked" or release is None:
            self._report_end(model, worker, "MachineLost", "the local cloud that ran it has ended")
        elif self.max_processes is not None and self._num_running() >= self.max_processes:
            reason = f"this machine has room for {self.max_processes} workers"
            self._report_end(model, worker, "NoCapacity", reason)
        else:
            self._aws.run(self._store.tell(model, worker.id, "running", int(time.time())))
            variables = {**release.environment, "TIDEMILL_WORKER": worker.id}
            name = process_name(model, worker)
            self._processes.start(name, *release.command, **variables)
            self._notify(f"{name} starts: there is work for {model}")

    def _num_running(self) -> int:
        return sum(worker.state != "asked" for _, worker in self.workers())

    def _stop_worker(self, name: str, process: subprocess.Popen[bytes]) -> None:
        now = time.monotonic()
        if name not in self._kill_at:
            self._kill_at[name] = now + _STOP_SECONDS
            process.terminate()
        elif now >= self._kill_at[name]:
            process.kill()

    def _report_exit(self, model: str, worker: Process, status: int) -> None:
        name = process_name(model, worker)
        log = self._processes.read_log(name)
        is_requested = self._kill_at.pop(name, None) is not None
        good = "it was stopped" if is_requested else "there was no more work"
        self._report_end(
            model,
            worker,
            "UserInitiated" if is_requested else "ProcessExited",
            exit_reason(status, log) if status else good,
            # As for a container: a signal is reported as 128 plus its number.
            exit_code=status if status >= 0 else 128 - status,
            words=last_error(log.splitlines()) if status else None,
        )
        self._processes.forget(name)

    def _report_end(
        self,
        model: str,
        worker: Process,
        stop_code: StopCode,
        reason: str,
        *,
        exit_code: int | None = None,
        words: str | None = None,
    ) -> None:
        """Send the end of a worker, and then delete it: a kill in between sends it twice."""
        detail: dict[str, object] = {
            "model": model,
            "worker": worker.id,
            "release": worker.release,
            "lastStatus": "STOPPED",
            "stopCode": stop_code,
            "stoppedReason": reason,
            "exitCode": exit_code,
            "lastWords": words,
        }
        self._aws.run(self._deployment.control.send(_event(detail), group=None))
        self._aws.run(self._store.forget(model, worker.id))
        left = sum(owner == model for owner, _ in self.workers())
        name = process_name(model, worker)
        self._notify(f"{name} ended: {reason}; {left or 'none'} left for {model}")


def process_name(model: str, worker: Process) -> str:
    """Return the name of a worker's process, and of its log."""
    number = worker.id.removeprefix("process-").lstrip("0")
    return f"worker-{_safe(model)}-{_safe(number)}"


def _event(detail: dict[str, object]) -> dict[str, object]:
    return {
        "version": "0",
        "id": str(uuid4()),
        "source": "tidemill.processes",
        "detail-type": "Worker Process State Change",
        "time": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "detail": detail,
    }


def _single(call: Call) -> Operation[Any]:
    return (yield call)


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", name)

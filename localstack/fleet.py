"""The machine of a local cloud: workers that the launcher of processes asks for come and go on it.

What ECS does for a task is done for an item of the table: one that is asked for gets a process, one
that is to stop gets SIGTERM, and the end of a process is told to the control queue in the form in
which EventBridge tells that of a task.
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

from handler.aws.calls import Call, Operation
from handler.aws.parameters import plan_text
from handler.aws.stores.processes import Process, ProcessStore
from handler.aws.sync import Aws
from handler.batch.fleet import FleetPlan
from handler.deployment import Deployment
from handler.errors import AwsError
from handler.fleet.words import last_complaint
from localstack.processes import Processes, why_ended

StopCode = Literal["ProcessExited", "UserInitiated", "MachineLost", "NoCapacity"]
_LOOK_SECONDS = 0.3
# As ECS: SIGKILL comes so long after SIGTERM.
_STOP_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Release:
    """What the workers of one release are started with, and further variables for them."""

    command: Sequence[str]
    environment: Mapping[str, str]


class LocalFleet:
    """Runs the workers of all models; to be looked after by `tend`, or by a thread of `tending`.

    `say` is told in one line of each that comes or goes; `plans` are the newest, by model. There is
    `room` for so many at once, of all models together; who finds none has ended for want of a
    machine.
    """

    def __init__(
        self,
        processes: Processes,
        aws: Aws,
        deployment: Deployment,
        say: Callable[[str], None],
        *,
        room: int | None = None,
    ) -> None:
        self._processes = processes
        self._aws = aws
        self._deployment = deployment
        self._wanted = ProcessStore(deployment.settings.table)
        self._say = say
        self.room = room
        self.plans: dict[str, FleetPlan] = {}
        self._releases: dict[tuple[str, str], Release] = {}
        self._kill_at: dict[str, float] = {}

    def release(self, plan: FleetPlan, *command: str, **environment: str) -> None:
        """Let workers be started as this plan says, from now on: those of before are replaced.

        Each knows its id by `TIDEMILL_WORKER`.
        """
        self.plans[plan.model] = plan
        self._releases[plan.model, plan.release] = Release(command, environment)
        name = f"{self._deployment.settings.fleets}/{_safe(plan.model)}"
        parameter = {"Name": name, "Value": plan_text(plan), "Type": "String", "Overwrite": True}
        self._aws.run(_one(Call("ssm", "put_parameter", parameter)))

    def workers(self) -> list[tuple[str, Process]]:
        """Return all that were asked for and have not ended, each with its model."""
        return [
            (model, each)
            for model in sorted(self.plans)
            for each in self._aws.run(self._wanted.list_processes(model))
        ]

    @contextmanager
    def tending(self) -> Iterator[None]:
        """Look after them in a thread until the block is left."""
        stop = threading.Event()
        thread = threading.Thread(target=self._tend_until, args=(stop,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _tend_until(self, stop: threading.Event) -> None:
        while not stop.wait(_LOOK_SECONDS):
            with suppress(AwsError):  # whoever has the emulator looks after that
                self.tend()

    def tend(self) -> None:
        """Bring processes to what the launcher wants, and tell of those that have ended."""
        for model, worker in self.workers():
            name = process_name(model, worker)
            process = self._processes.processes.get(name)
            if process is None:
                self._take_up(model, worker)
            elif process.poll() is not None:
                self._bury(model, worker, process.returncode)
            elif worker.state == "stopping":
                self._stop(name, process)

    def _take_up(self, model: str, worker: Process) -> None:
        """Start what was asked for; what no process is left of ends, as with its machine."""
        release = self._releases.get((model, worker.release))
        if worker.state == "stopping":
            self._end(model, worker, "UserInitiated", "was asked to end before it had begun")
        elif worker.state != "asked" or release is None:
            self._end(model, worker, "MachineLost", "the local cloud that ran it has ended")
        elif self.room is not None and self._num_running() >= self.room:
            reason = f"this machine has room for {self.room} workers"
            self._end(model, worker, "NoCapacity", reason)
        else:
            self._aws.run(self._wanted.tell(model, worker.id, "running", int(time.time())))
            told = {**release.environment, "TIDEMILL_WORKER": worker.id}
            name = process_name(model, worker)
            self._processes.start(name, *release.command, **told)
            self._say(f"{name} starts: there is work for {model}")

    def _num_running(self) -> int:
        return sum(worker.state != "asked" for _, worker in self.workers())

    def _stop(self, name: str, process: subprocess.Popen[bytes]) -> None:
        now = time.monotonic()
        if name not in self._kill_at:
            self._kill_at[name] = now + _STOP_SECONDS
            process.terminate()
        elif now >= self._kill_at[name]:
            process.kill()

    def _bury(self, model: str, worker: Process, status: int) -> None:
        name = process_name(model, worker)
        log = self._processes.log_of(name)
        is_asked = self._kill_at.pop(name, None) is not None
        good = "was asked to end" if is_asked else "there was no more work"
        self._end(
            model,
            worker,
            "UserInitiated" if is_asked else "ProcessExited",
            why_ended(status, log) if status else good,
            # As of a container: a signal comes as 128 and its number.
            exit_code=status if status >= 0 else 128 - status,
            words=last_complaint(log.splitlines()) if status else None,
        )
        self._processes.forget(name)

    def _end(
        self,
        model: str,
        worker: Process,
        stop_code: StopCode,
        reason: str,
        *,
        exit_code: int | None = None,
        words: str | None = None,
    ) -> None:
        """Tell of an end, and then forget the worker: killed in between it is told twice."""
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
        self._aws.run(self._wanted.forget(model, worker.id))
        left = sum(owner == model for owner, _ in self.workers())
        name = process_name(model, worker)
        self._say(f"{name} ended: {reason}; {left or 'none'} left for {model}")


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


def _one(call: Call) -> Operation[Any]:
    return (yield call)


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", name)

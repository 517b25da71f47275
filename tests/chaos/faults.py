"""Faults that hit the processes of a cloud, drawn from one seed: same seed, same faults."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localstack.cloud import Cloud
from tidemill.handler.aws.queues import advance_message, shard_message

_START_SECONDS = 240


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that happened; `at` is Unix seconds."""

    at: float
    kind: str
    name: str


class Faults:
    """Injects faults into a cloud until it is released, and records them.

    Workers are those of its fleet, which replaces them; `mend` is called again and again, and does
    what a person or AWS would do for the rest. SIGSTOP lasts `stop_seconds`, longer than a lease,
    and stops a worker with its engine, like a machine that freezes.
    """

    def __init__(
        self,
        cloud: Cloud,
        sqs: Any,
        *,
        seed: int,
        num_shards: int,
        stop_seconds: float,
        mend: Callable[[], None],
    ) -> None:
        self.done: list[Fault] = []
        self._cloud = cloud
        self._sqs = sqs
        self._random = random.Random(seed)
        self._num_shards = num_shards
        self._stop_seconds = stop_seconds
        self._mend = mend
        self._sleeping: dict[str, float] = {}
        self._acts = [
            self._kill_worker,
            self._kill_worker,
            self._terminate_worker,
            self._freeze_worker,
            self._kill_pump,
            self._repeat_messages,
            self._repeat_messages,
        ]

    def do_harm(self, seconds: float, batch_id: str) -> None:
        """Do something every half second or so, for a while, then mend all processes.

        At least one worker is killed, also where a busy machine starts the first one late.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            time.sleep(self._random.uniform(0.2, 0.8))
            self._wake_sleepers()
            self._random.choice(self._acts)(batch_id)
            self._mend()
        patience = time.monotonic() + _START_SECONDS
        while not any(fault.name.startswith("worker-") for fault in self.done):
            assert time.monotonic() < patience, "no worker came"
            time.sleep(0.1)
            self._kill_worker(batch_id)
        for name in list(self._sleeping):
            self._continue(name)
        self._mend()

    def _some_worker(self) -> str | None:
        """Return the name of one that runs, None while there is none."""
        running = [
            name
            for name, process in list(self._cloud.processes.items())
            if name.startswith("worker-") and process.poll() is None
        ]
        return self._random.choice(sorted(running)) if running else None

    def _kill_worker(self, _batch_id: str) -> None:
        if (name := self._some_worker()) is not None:
            self._signal(name, signal.SIGKILL)

    def _terminate_worker(self, _batch_id: str) -> None:
        if (name := self._some_worker()) is not None:
            self._signal(name, signal.SIGTERM)

    def _freeze_worker(self, _batch_id: str) -> None:
        name = self._some_worker()
        if name is not None and name not in self._sleeping:
            self._sleeping[name] = time.monotonic() + self._stop_seconds
            self._signal_engine(name, signal.SIGSTOP)
            self._signal(name, signal.SIGSTOP)

    def _kill_pump(self, _batch_id: str) -> None:
        self._signal("lambdas", signal.SIGKILL)
        self._cloud.processes["lambdas"].wait()

    def _repeat_messages(self, batch_id: str) -> None:
        """Ring again for shards in any order, and for the batch: doorbells come more than once."""
        numbers = self._random.sample(range(self._num_shards), 3)
        self._note("repeat", str(numbers))
        [work] = self._cloud.resources.work.values()
        for number in numbers:
            self._send(work, shard_message(batch_id, number))
        self._send(self._cloud.resources.control, advance_message(batch_id))

    def _send(self, queue_url: str, body: dict[str, object]) -> None:
        self._sqs.send_message(QueueUrl=queue_url, MessageBody=json.dumps(body))

    def _signal(self, name: str, number: signal.Signals) -> None:
        process = self._cloud.processes.get(name)
        if process is not None and process.poll() is None:
            self._note(number.name, name)
            process.send_signal(number)

    def _signal_engine(self, name: str, number: signal.Signals) -> None:
        process = self._cloud.processes.get(name)
        for child in [] if process is None else _children_of(process.pid):
            with suppress(ProcessLookupError):
                os.kill(child, number)

    def _note(self, kind: str, name: str) -> None:
        self.done.append(Fault(time.time(), kind, name))

    def _wake_sleepers(self) -> None:
        for name, until in list(self._sleeping.items()):
            if time.monotonic() >= until:
                self._continue(name)

    def _continue(self, name: str) -> None:
        del self._sleeping[name]
        self._signal(name, signal.SIGCONT)
        self._signal_engine(name, signal.SIGCONT)


def _children_of(pid: int) -> list[int]:
    try:
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    except FileNotFoundError:
        return []

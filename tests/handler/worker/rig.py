"""Batches on an emulator whose shards wait for a worker, and workers to run them.

A worker in this process has an engine in this process; a worker as a separate process has the
scripted engine as a third one. Both follow the instructions in a line's body: see
`scripted_engine`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from tests.emulators import MODEL, Emulator, deployment_of
from tests.handler.worker.fakes import FakeEngine, QuickAws
from tidemill.batch.escalation import Escalation
from tidemill.batch.file.expected_tokens import ExpectedTokens
from tidemill.batch.model import Batch, Options, Outputs, Shard, ShardStatus, Source
from tidemill.batch.parts import PartIndex
from tidemill.batch.shard_cutter import ShardCutter, ShardLimits
from tidemill.batch.states import Status
from tidemill.handler.aws.calls import Operation
from tidemill.handler.aws.queues import parse_message, shard_message
from tidemill.handler.aws.sync import Aws
from tidemill.handler.deployment import Deployment
from tidemill.handler.worker.context.config import WorkerConfig
from tidemill.handler.worker.context.context import WorkerContext
from tidemill.handler.worker.kept_results import KeptResults, ThreadDrive
from tidemill.handler.worker.parity_results import ParityResults
from tidemill.handler.worker.worker import Worker
from tidemill.net.tracing import Tracing

ROOT = Path(__file__).parents[3]
ENGINE = ROOT / "tests/engine_process/scripted_engine.py"
PATIENCE_SECONDS = 120  # far more than anything here takes: reached only when something hangs
NEVER = 600


async def well() -> bool:
    """Say that the machine of a run is well."""
    return True


async def until(condition: Callable[[], object]) -> None:
    """Wait for what a worker in this process does."""
    looks = _Looks(condition, 0.02, 0.1)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (pause := looks.pause()) is not None:  # noqa: ASYNC110 - it may look at the emulator
            await asyncio.sleep(pause)


def wait_for(condition: Callable[[], object], words: Callable[[], str] = str) -> None:
    """Wait for what another process does; `words` tell what there is instead."""
    looks, deadline = _Looks(condition, 0.05, 0.25), time.monotonic() + PATIENCE_SECONDS
    while (pause := looks.pause()) is not None:
        assert time.monotonic() < deadline, words()
        time.sleep(pause)


@dataclass
class _Looks:
    """Looks at a condition, with pauses that grow to the longest: a look may ask the emulator.

    Such a look takes as much CPU as a small batch, so that nine tenths of the time are pauses.
    """

    condition: Callable[[], object]
    next: float
    longest: float

    def pause(self) -> float | None:
        """Return the seconds until the next look, or None once the condition holds."""
        began = time.perf_counter()
        if self.condition():
            return None
        pause, self.next = self.next, min(1.2 * self.next, self.longest)
        return max(pause, min(1.0, 9 * (time.perf_counter() - began)))


def to_line(number: int, body: dict[str, Any]) -> bytes:
    """Return a line whose body is the script for the engine."""
    name = f"c{number}"
    line = {"custom_id": name, "method": "POST", "url": "/v1/x", "body": {"custom_id": name} | body}
    return json.dumps(line).encode() + b"\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuickConfig(WorkerConfig):
    """Settings of a worker whose heart beats often, however long its leases are."""

    tick_seconds: float = 0.6


@dataclass
class Rig:
    """A separate deployment on an emulator, and the driver of its operations."""

    emulator: Emulator
    folder: Path
    deployment: Deployment
    environment: dict[str, str]
    processes: list[Process] = field(default_factory=list)
    results_digest: bytes | OSError | None = b"digest"

    @classmethod
    def on(
        cls, emulator: Emulator, folder: Path, models: Sequence[str] = (MODEL,), **settings: str
    ) -> Rig:
        """Create separate resources on an emulator."""
        resources = emulator.create(*models)
        more = {f"TIDEMILL_{name.upper()}": value for name, value in settings.items()}
        environment = emulator.environment | resources.environment | more
        return cls(emulator, folder, deployment_of(resources, **settings), environment)

    def __post_init__(self) -> None:
        """Make the driver."""
        self.aws = Aws(self.emulator.client)

    def run(self, operation: Operation[Any]) -> Any:
        """Run one operation."""
        return self.aws.run(operation)

    def results_digest_at(self, _created: int) -> bytes | None:
        """Return the digest of what determines results, or raise why it is unknown."""
        if isinstance(self.results_digest, OSError):
            raise self.results_digest
        return self.results_digest

    @property
    def queue(self) -> Any:
        """Return the work queue."""
        return self.deployment.work[MODEL]

    def batch(
        self,
        *bodies: dict[str, Any] | bytes,
        shard_lines: int = 1000,
        expires_in_seconds: int = 3600,
        rings: bool = True,
        tenant: str = "owner",
        escalation: Escalation | None = None,
        priority: int = 0,
        echo_fields: tuple[str, ...] = (),
        age_seconds: int = 0,
        model: str = MODEL,
    ) -> Work:
        """Make a batch of lines with these bodies, or of these bytes, that is in progress."""
        lines = [
            body if isinstance(body, bytes) else to_line(number, body)
            for number, body in enumerate(bodies, start=1)
        ]
        name, data = uuid4().hex, b"".join(lines)
        put = self.aws.clients["s3"].put_object(
            Bucket=self.deployment.bucket.name, Key=f"input/{name}.jsonl", Body=data
        )
        now = int(time.time())
        batch = Batch(
            f"batch_{name}",
            tenant,
            Source(
                self.deployment.bucket.name,
                f"input/{name}.jsonl",
                put["ETag"],
                len(data),
                put.get("VersionId"),
            ),
            "file-x",
            Options(priority=priority, echo_fields=echo_fields),
            Outputs("o", "e", "r"),
            created_at=now - age_seconds,
            expires_at=now + expires_in_seconds,
            model=model,
            escalation=escalation,
        )
        shards = list(cut(batch.id, lines, shard_lines))
        counts = {"num_shards": len(shards), "shards_left": len(shards)}
        table = self.deployment.table
        self.run(table.create_batch(batch))
        for shard in shards:
            self.run(table.put_shard(shard))
        self.run(table.move_batch(batch.id, Status.IN_PROGRESS, now, num_rows=len(lines), **counts))
        work = Work(self, batch.id, lines, len(shards))
        if rings:
            work.ring()
        return work

    def messages(self, queue: Any = None) -> list[dict[str, Any]]:
        """Take all messages of ours off a queue that can be seen now."""
        queue = queue or self.deployment.control
        found: list[dict[str, Any]] = []
        while received := self.run(
            queue.receive(max_messages=10, wait_seconds=0, visibility_seconds=60)
        ):
            for message in received:
                self.run(queue.delete(message))
                found.append(parse_message(message.body) or {})
        return [fields for fields in found if "batch_id" in fields]

    def config(self, **changes: Any) -> WorkerConfig:
        """Return settings that make tests short, with a lease that outlasts a busy machine.

        Where a test gives one that does not, the heart beats ten times in it.
        """
        defaults = QuickConfig(
            queue=self.queue.url,
            lease_seconds=60,
            tick_seconds=min(0.6, changes.get("lease_seconds", NEVER) / 10),
            visibility_seconds=6,
            wait_seconds=1,
            flush_seconds=0.2,
            grace_seconds=0,
            max_inflight=64,
        )
        return replace(defaults, **changes)

    @asynccontextmanager
    async def worker(
        self,
        *,
        engine: FakeEngine | None = None,
        other_engines: Sequence[FakeEngine] = (),
        aws: Any = None,
        parity_results: ParityResults | None = None,
        tracing: Tracing | None = None,
        model: str = MODEL,
        wall: Callable[[], float] = time.time,
        **changes: Any,
    ) -> AsyncIterator[RunningWorker]:
        """Run a worker in this process while the block runs; it is stopped then."""
        queue = self.deployment.work[model]
        async with QuickAws() as quick:
            config, kept = self.config(queue=queue.url, **changes), None
            if config.reuse:
                kept = KeptResults(
                    ThreadDrive(aws or quick),
                    self.deployment.bucket,
                    [model],
                    self.results_digest_at,
                    max_bytes=config.reuse_max_size,
                    sampled=config.reuse_sampled,
                )
            context = WorkerContext(
                aws or quick,
                self.deployment,
                queue,
                config,
                wall=wall,
                parity_results=parity_results,
                kept_results=kept,
                tracing=tracing,
            )
            engine = engine or FakeEngine()
            worker = Worker(context, *(each.new_life for each in (engine, *other_engines)))
            running = RunningWorker(worker, engine, asyncio.create_task(worker.run()))
            try:
                yield running
            finally:
                worker.stop()
                running.status = await asyncio.wait_for(running.task, PATIENCE_SECONDS)
                if kept is not None:
                    await asyncio.to_thread(kept.close)

    def start(self, *options: object, engine: Sequence[object] | None = ()) -> Process:
        """Start `tidemill worker` as a separate process.

        `engine` are arguments of the scripted engine; the real one is taken when it is None.
        """
        process = Process(self, len(self.processes), options, engine)
        self.processes.append(process)
        return process


def cut(batch_id: str, lines: Sequence[bytes], shard_lines: int) -> list[Shard]:
    """Return the shards of a file as intake cuts them; blank lines are in none."""
    cutter = ShardCutter(batch_id, ShardLimits(max_lines=shard_lines))
    position, shards = 0, []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            shards.append(cutter.add(number, position, position + len(line)))
        position += len(line)
    shards.append(cutter.finish())
    return [
        replace(shard, expected=ExpectedTokens(shard.end - shard.start, 100 * shard.num_rows))
        for shard in shards
        if shard is not None
    ]


@dataclass
class Work:
    """One batch, and what has become of it."""

    rig: Rig
    id: str
    lines: list[bytes]
    num_shards: int

    def ring(self, *numbers: int) -> None:
        """Ring for shards, for all unless some are named."""
        for number in numbers or range(self.num_shards):
            self.rig.run(self.rig.queue.send(shard_message(self.id, number), group=None))

    @property
    def batch(self) -> Batch:
        """Return the batch as it is now."""
        batch: Batch = self.rig.run(self.rig.deployment.table.get_batch(self.id))
        return batch

    @property
    def num_left(self) -> int:
        """Return how many shards are not done."""
        left: int = self.rig.run(self.rig.deployment.table.count_left(self.batch))
        return left

    def shard(self, number: int = 0) -> Shard:
        """Return a shard as it is now."""
        shard: Shard = self.rig.run(self.rig.deployment.table.get_shard(self.id, number))
        return shard

    def claim(
        self, number: int = 0, *, lease_seconds: float = 60, owner: str | None = None
    ) -> Shard:
        """Claim a shard as another worker does."""
        owner = owner or uuid4().hex
        shard: Shard = self.rig.run(
            self.rig.deployment.table.claim(
                self.id, number, owner=owner, now=time.time(), lease_seconds=lease_seconds
            )
        )
        return shard

    def move(self, status: Status, **changes: Any) -> None:
        """Move the batch."""
        table = self.rig.deployment.table
        assert self.rig.run(table.move_batch(self.id, status, int(time.time()), **changes)).is_there

    def index(self, number: int = 0) -> PartIndex:
        """Return the durable rows of a shard."""
        index: PartIndex = self.rig.run(
            self.rig.deployment.bucket.index_parts(self.id, number, left_out=fail)
        )
        return index

    @property
    def is_done(self) -> bool:
        """Say whether every shard is committed."""
        return all(self.shard(n).status is ShardStatus.DONE for n in range(self.num_shards))

    @property
    def is_free(self) -> bool:
        """Return whether an unfinished shard has no owner."""
        return all(self.shard(n).owner is None for n in range(self.num_shards))

    def keys(self, kind: str) -> list[str]:
        """Return the keys of parts, or of segments: `output` or `errors`."""
        keys: list[str] = self.rig.run(self.rig.deployment.bucket.list_keys(f"work/{self.id}/"))
        return [key for key in keys if f"/{kind}-" in key]

    def sealed(self, kind: str = "output") -> list[dict[str, Any]]:
        """Return the rows of all committed segments of a kind, in order."""
        rows: list[dict[str, Any]] = []
        for number in range(self.num_shards):
            shard = self.shard(number)
            sizes = shard.output_sizes if kind == "output" else shard.error_sizes
            assert shard.status is ShardStatus.DONE
            keys = [
                key for key in self.keys(kind) if f"/{number:07}/{kind}-{shard.fence:06}" in key
            ]
            bodies = [self.rig.run(self.rig.deployment.bucket.get(key)) for key in keys]
            assert tuple(map(len, bodies)) == sizes
            rows += [json.loads(line) for body in bodies for line in body.splitlines()]
        return rows

    def ids(self, kind: str = "output") -> list[str]:
        """Return the custom ids of committed rows, in order."""
        return [row["custom_id"] for row in self.sealed(kind)]


@dataclass
class RunningWorker:
    """A worker in this process."""

    worker: Worker
    engine: FakeEngine
    task: asyncio.Task[int]
    status: int | None = None


class Process:
    """A separate `tidemill worker`; `journal` contains its engine's notes, over all its lives."""

    def __init__(
        self, rig: Rig, number: int, options: Sequence[object], engine: Sequence[object] | None
    ) -> None:
        self.journal_path = rig.folder / f"journal-{number}"
        self.log_path = rig.folder / f"log-{number}"
        environment = {**os.environ, **rig.environment}
        if engine is not None:
            command = [sys.executable, ENGINE, "--log", self.journal_path, *engine]
            environment["TIDEMILL_ENGINE_COMMAND"] = json.dumps([str(word) for word in command])
        flags = ["--lease-seconds", 6, "--visibility-seconds", 6, "--wait-seconds", 1]
        flags += ["--flush-seconds", 0.2, "--served-model-name", MODEL, *options]
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tidemill", "worker", *map(str, flags)],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the worker."""
        self.process.send_signal(number)

    def wait(self) -> int:
        """Return its exit status, once it has one."""
        return self.process.wait(PATIENCE_SECONDS)

    @property
    def log(self) -> str:
        """Return all of its output."""
        return self.log_path.read_text(encoding="utf-8")

    def events(self, message: str) -> list[dict[str, Any]]:
        """Return its log events with this message."""
        lines = [line for line in self.log.splitlines() if line.startswith("{")]
        events = [json.loads(line) for line in lines if line.endswith("}")]
        return [event for event in events if event["message"] == message]

    def requests(self, event: str = "started") -> list[str]:
        """Return the custom IDs of requests that its engine has begun or finished, in order."""
        if not self.journal_path.exists():
            return []
        lines = self.journal_path.read_text(encoding="utf-8").splitlines()
        notes = [line.split("\t") for line in lines]
        return [note[0] for note in notes if note[1] == event]

    def kill(self) -> None:
        """End it at once."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()


def fail(key: str, reason: str) -> None:
    """Fail the test: every part of a rig can be read."""
    raise AssertionError(f"{key}: {reason}")

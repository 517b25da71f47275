"""A batch in the cloud, with shards, claims and parts made by hand: no worker is needed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

from pydantic_core import from_json, to_json

from tests.emulators import MODEL, Emulator, deployment_of
from tidemill.batch.model import Batch, EngineInfo, Options, Outputs, Shard, Source
from tidemill.batch.object_keys import batch_id_of_drop, outputs_of_drop
from tidemill.batch.parts import FinishedRow, encode_part
from tidemill.batch.progress_counts import Progress
from tidemill.batch.states import Status
from tidemill.handler.aws.queues import parse_message
from tidemill.handler.aws.stores.drops import Arrival
from tidemill.handler.aws.sync import Aws
from tidemill.handler.deployment import Deployment
from tidemill.handler.finalize.finalize import finalize
from tidemill.net.pinned_connection import Network
from tidemill.protocol.contract import Usage

LINES_PER_SHARD = 4


def row_of(line: int, size: int = 0) -> FinishedRow:
    """Return the row of a line; every fourth line's is a failure."""
    is_success = line % 4 != 0
    row = {"custom_id": f"c{line}", "status": 200 if is_success else 400, "text": "x" * size}
    usage = Usage(10, 4, 3 if is_success else 0)
    return FinishedRow(line, to_json(row) + b"\n", is_success, usage)


def plenty() -> float:
    """Return more time than any run needs."""
    return 600.0


@dataclass
class Cloud:
    """A deployment on an emulator and the driver of its operations."""

    emulator: Emulator
    aws: Aws
    deployment: Deployment
    resources: Any

    @classmethod
    def on(cls, emulator: Emulator, **settings: str) -> Cloud:
        """Create separate resources on an emulator."""
        resources = emulator.create()
        deployment = deployment_of(resources, **settings)
        return cls(emulator, Aws(emulator.client), deployment, resources)

    def run(self, operation: Any) -> Any:
        """Run one operation."""
        return self.aws.run(operation)

    def drop(
        self,
        num_lines: int,
        *,
        key: str = "input/x.jsonl",
        options: Options | None = None,
        sequencer: str | None = None,
    ) -> Drop:
        """Upload lines and record their batch and shards, ready to be run."""
        lines = [
            to_json({"custom_id": f"c{n}", "method": "POST", "url": "/v1/completions", "body": {}})
            + b"\n"
            for n in range(1, num_lines + 1)
        ]
        put = self.aws.clients["s3"].put_object(
            Bucket=self.deployment.bucket.name, Key=key, Body=b"".join(lines)
        )
        source = Source(
            self.deployment.bucket.name, key, put["ETag"], sum(map(len, lines)), put["VersionId"]
        )
        sequencer = sequencer or f"{time.time_ns():032x}"
        now = int(time.time())
        outputs = outputs_of_drop(key)
        assert isinstance(outputs, Outputs)
        batch = Batch(
            batch_id_of_drop(source.bucket, key, sequencer),
            "owner",
            source,
            f"file-{uuid4().hex}",
            options or Options(),
            outputs,
            created_at=now,
            expires_at=now + 3600,
            expires=now + 90 * 86_400,
            model=MODEL,
            engine=EngineInfo("revision", "1.2.3"),
        )
        self.run(self.deployment.table.create_drop(batch, Arrival(sequencer, now)))
        starts = [sum(map(len, lines[:n])) for n in range(num_lines + 1)]
        firsts = range(0, num_lines, LINES_PER_SHARD)
        for number, first in enumerate(firsts):
            last = min(first + LINES_PER_SHARD, num_lines)
            shard = Shard(batch.id, number, first + 1, last - first, starts[first], starts[last])
            planned = replace(shard, expires=batch.expires)
            self.run(self.deployment.table.put_shard(planned))
        return Drop(self, batch.id, lines)

    def messages(self, wait_seconds: float = 0, queue: Any = None) -> list[dict[str, Any]]:
        """Take our own messages off a queue, waiting for a first one; S3's are left out.

        Each says whose it is.
        """
        queue = queue or self.deployment.control
        deadline = time.monotonic() + wait_seconds
        found: list[dict[str, Any]] = []
        while True:
            received = self.run(
                queue.receive(max_messages=10, wait_seconds=0, visibility_seconds=60)
            )
            for message in received:
                self.run(queue.delete(message))
                fields = parse_message(message.body)
                if fields is not None and "batch_id" in fields:
                    assert message.group is not None, f"without a tenant: {fields}"
                    found.append(fields)
            if not received:
                if found or time.monotonic() >= deadline:
                    return found
                time.sleep(0.05)

    def versions(self, key: str) -> int:
        """Return how often an object has been written."""
        listed = self.aws.clients["s3"].list_object_versions(
            Bucket=self.deployment.bucket.name, Prefix=key
        )
        return sum(version["Key"] == key for version in listed.get("Versions", ()))

    def read(self, key: str) -> bytes | None:
        """Return an object, or None."""
        if self.run(self.deployment.bucket.head(key)) is None:
            return None
        data: bytes = self.run(self.deployment.bucket.get(key))
        return data


@dataclass
class Drop:
    """One batch: what workers and clients would do to it, and what comes out."""

    cloud: Cloud
    id: str
    lines: list[bytes]
    owners: list[str] = field(default_factory=list)

    @property
    def batch(self) -> Batch:
        """Return the batch as it is now."""
        batch: Batch = self.cloud.run(self.cloud.deployment.table.get_batch(self.id))
        return batch

    def shard(self, number: int) -> Shard:
        """Return a shard as it is now."""
        shard: Shard = self.cloud.run(self.cloud.deployment.table.get_shard(self.id, number))
        return shard

    @property
    def num_left(self) -> int:
        """Return how many shards are not done."""
        left: int = self.cloud.run(self.cloud.deployment.table.count_left(self.batch))
        return left

    @property
    def num_shards(self) -> int:
        """Return how many shards there are."""
        return -(-len(self.lines) // LINES_PER_SHARD)

    def begin(self) -> Drop:
        """Let intake come to its end."""
        counts = {"num_shards": self.num_shards, "shards_left": self.num_shards}
        self.move(
            Status.IN_PROGRESS, num_rows=len(self.lines), shards_rung=self.num_shards, **counts
        )
        return self

    def move(self, status: Status, *, ago_seconds: float = 0, **changes: Any) -> Drop:
        """Move the batch, as if that had been a while ago."""
        at = int(time.time() - ago_seconds)
        moved = self.cloud.run(
            self.cloud.deployment.table.move_batch(self.id, status, at, **changes)
        )
        assert moved.is_there
        return self

    def claim(self, number: int, *, lease_seconds: float = -1.0) -> Shard:
        """Claim a shard as a worker; its lease has lapsed by default."""
        shard: Shard = self.cloud.run(
            self.cloud.deployment.table.claim(
                self.id,
                number,
                owner=uuid4().hex,
                now=time.time(),
                lease_seconds=lease_seconds,
            )
        )
        return shard

    def put_rows(
        self, shard: Shard, lines: Iterable[int], *, size: int = 0, number: int = 0
    ) -> str:
        """Make rows of a shard durable as a worker."""
        part = encode_part(row_of(line, size) for line in lines)
        key: str = self.cloud.run(self.cloud.deployment.bucket.put_part(shard, number, part))
        return key

    def run_shard(self, number: int, *, size: int = 0, gpu_seconds: float = 1.5) -> None:
        """Run a shard to its end as a worker."""
        run, bucket = self.cloud.run, self.cloud.deployment.bucket
        shard = self.claim(number, lease_seconds=60)
        lines = range(shard.first_line, shard.first_line + shard.num_rows)
        self.put_rows(shard, lines, size=size)
        index = run(bucket.index_parts(self.id, number, left_out=fail))
        seal = index.seal()
        run(bucket.put_segments(shard, seal))
        run(
            self.cloud.deployment.table.commit(
                shard,
                progress=replace(index.progress(), gpu_seconds=gpu_seconds, rows_per_second=9.0),
                output_sizes=[segment.num_bytes for segment in seal.output],
                error_sizes=[segment.num_bytes for segment in seal.errors],
            )
        )

    def finalize(
        self,
        time_left: Callable[[], float] = plenty,
        network: Network | None = None,
    ) -> list[dict[str, Any]]:
        """Run finalize once and return what it rang for."""
        finalize(self.cloud.aws, self.cloud.deployment, self.batch, time_left, network=network)
        return self.cloud.messages(wait_seconds=0 if self.batch.is_terminal else 10)

    def finish(
        self, time_left: Callable[[], float] = plenty, network: Network | None = None
    ) -> int:
        """Run finalize as often as it rings for itself; return how often that was."""
        num_runs = 1
        while not self.batch.is_terminal:
            assert self.finalize(time_left, network) or self.batch.is_terminal
            num_runs += 1
            assert num_runs < 30, "it rings for itself for ever"
        return num_runs - 1

    def result(self, name: str) -> list[dict[str, Any]] | None:
        """Return the rows of `output` or `error`, None where the object does not exist."""
        data = self.cloud.read(getattr(self.batch.outputs, f"{name}_key"))
        return None if data is None else [from_json(row) for row in data.splitlines()]

    def ids(self, name: str) -> list[str] | None:
        """Return the custom ids of the rows of `output` or `error`, in their order."""
        rows = self.result(name)
        return None if rows is None else [row["custom_id"] for row in rows]

    def report(self) -> Any:
        """Return what `batch.json` holds, or None."""
        data = self.cloud.read(self.batch.outputs.report_key)
        return None if data is None else from_json(data)

    @property
    def progress(self) -> Progress:
        """Return the final counts."""
        final = self.batch.final
        assert final is not None
        return final


def fail(key: str, reason: str) -> None:
    """Fail the test: every part of a rig can be read."""
    raise AssertionError(f"{key}: {reason}")

"""A deployment on an emulator into which files are put, with or without the bucket's own events."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from pydantic_core import to_json

from tests.emulators import MODEL, Emulator, deployment_of
from tidemill.batch.model import Batch, Shard
from tidemill.handler.aws.calls import Operation, T
from tidemill.handler.aws.queues import parse_message
from tidemill.handler.aws.sync import Aws
from tidemill.handler.deployment import Deployment
from tidemill.handler.intake.control_messages import Drop
from tidemill.handler.intake.intake import ingest
from tidemill.handler.intake.new_batch import create_batch_of_drop

_sequencers = count(1)


def line_of(custom_id: object, **changes: Any) -> bytes:
    """Return a good line for the model of the emulators' deployments."""
    fields = {
        "custom_id": str(custom_id),
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": MODEL, "messages": []},
    }
    return to_json(fields | changes)


def lines_of(num_lines: int) -> bytes:
    """Return that many valid lines."""
    return b"".join(line_of(number) + b"\n" for number in range(num_lines))


def plenty() -> float:
    """Return more time than any run needs."""
    return 600.0


def time_for(num_looks: int) -> Callable[[], float]:
    """Return a clock with enough time left for that many calls."""
    left = iter(range(num_looks))
    return lambda: 600.0 if next(left, None) is not None else 0.0


@dataclass(frozen=True, slots=True)
class Cloud:
    """A deployment on an emulator and the driver of its operations."""

    emulator: Emulator
    aws: Aws
    deployment: Deployment
    environment: Mapping[str, str]

    @classmethod
    def on(cls, emulator: Emulator, *models: str, **settings: str) -> Cloud:
        """Create separate resources on an emulator."""
        resources = emulator.create(*models)
        deployment = deployment_of(resources, **settings)
        variables = {f"TIDEMILL_{name.upper()}": value for name, value in settings.items()}
        environment = emulator.environment | resources.environment | variables
        return cls(emulator, Aws(emulator.client), deployment, environment)

    def having(self, **settings: Any) -> Cloud:
        """Return the same cloud as another version of the deployment sees it."""
        changed = self.deployment.settings.model_copy(update=settings)
        return replace(self, deployment=Deployment(changed))

    @property
    def bucket(self) -> str:
        """The name of the bucket."""
        return self.deployment.bucket.name

    def run(self, operation: Operation[T]) -> T:
        """Run one operation."""
        return self.aws.run(operation)

    def put(
        self, data: bytes, key: str = "input/x.jsonl", metadata: Mapping[str, str] | None = None
    ) -> Drop:
        """Upload an object and return what an event would tell of it."""
        put = self.aws.clients["s3"].put_object(
            Bucket=self.bucket, Key=key, Body=data, Metadata=dict(metadata or {})
        )
        return Drop(self.bucket, key, f"{next(_sequencers):016X}", put["VersionId"])

    def take(self, drop: Drop) -> Batch:
        """Return the batch that an upload makes."""
        batch = self.run(create_batch_of_drop(self.deployment, drop, int(time.time())))
        assert batch is not None
        return batch

    def create(
        self, data: bytes, key: str = "input/x.jsonl", metadata: Mapping[str, str] | None = None
    ) -> Batch:
        """Upload an object and return its batch."""
        return self.take(self.put(data, key, metadata))

    def ingest(
        self, batch: Batch, time_left: Callable[[], float] = plenty, **options: Any
    ) -> Batch:
        """Run intake once and return the batch as it is then."""
        ingest(self.aws, self.deployment, batch, time_left, **options)
        return self.batch(batch.id)

    def batch(self, batch_id: str) -> Batch:
        """Return a batch that is there."""
        batch = self.run(self.deployment.table.get_batch(batch_id))
        assert batch is not None
        return batch

    def shards(self, batch_id: str) -> list[Shard]:
        """Return the shards of a batch."""
        return self.run(self.deployment.table.list_shards(batch_id))

    def claim(self, batch_id: str, number: int = 0, *, lease_seconds: float = 60) -> Shard:
        """Claim a shard as a worker does."""
        return self.run(
            self.deployment.table.claim(
                batch_id, number, owner="worker", now=time.time(), lease_seconds=lease_seconds
            )
        )

    def messages(self, queue: Any = None) -> list[dict[str, Any]]:
        """Take our own messages off a queue, the control queue at first; S3's are left out.

        Each says whose it is.
        """
        queue = queue or self.deployment.control
        found: list[dict[str, Any]] = []
        while received := self.run(
            queue.receive(max_messages=10, wait_seconds=0, visibility_seconds=60)
        ):
            for message in received:
                self.run(queue.delete(message))
                fields = parse_message(message.body)
                if fields is not None and "batch_id" in fields:
                    assert message.group is not None, f"without a tenant: {fields}"
                    found.append(fields)
        return found

    def rung_shards(self, models: Iterable[str] = (MODEL,)) -> list[int]:
        """Take the messages off the work queues and return the shards that were rung for."""
        messages = [
            message for model in models for message in self.messages(self.deployment.work[model])
        ]
        return sorted(message["shard"] for message in messages)

    def has_object(self, key: str) -> bool:
        """Say whether an object is there."""
        return self.run(self.deployment.bucket.head(key)) is not None

"""Batches and shards for tests, each with a unique ID."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from uuid import uuid4

from tidemill.batch.model import Batch, Options, Shard, Source
from tidemill.batch.object_keys import outputs_of_drop
from tidemill.batch.states import Status
from tidemill.handler.aws.calls import Operation
from tidemill.handler.deployment import Deployment

NOW = 1_800_000_000
LEASE_SECONDS = 30.0


def make_batch(deployment: Deployment, key: str | None = None, **fields: Any) -> Batch:
    """Return a batch of an upload that is not recorded yet."""
    key = key or f"input/{uuid4().hex}.jsonl"
    outputs = outputs_of_drop(key)
    assert outputs is not None
    batch = Batch(
        id=f"batch_{uuid4().hex}",
        tenant="default",
        source=Source(deployment.bucket.name, key, '"etag"', 100),
        input_file_id=f"s3://{deployment.bucket.name}/{key}",
        options=Options(metadata={"für": "søk"}),
        outputs=outputs,
        created_at=NOW,
        expires_at=NOW + 86_400,
    )
    return replace(batch, **fields)


def in_progress(deployment: Deployment, num_shards: int = 1) -> Operation[Batch]:
    """Record a running batch with that many shards of ten lines."""
    batch = yield from deployment.table.create_batch(make_batch(deployment))
    for number in range(num_shards):
        shard = Shard(batch.id, number, 10 * number + 1, 10, 100 * number, 100 * number + 100)
        yield from deployment.table.put_shard(shard)
    moved = yield from deployment.table.move_batch(
        batch.id,
        Status.IN_PROGRESS,
        NOW,
        num_rows=10 * num_shards,
        num_shards=num_shards,
        shards_left=num_shards,
    )
    assert moved.batch is not None
    return moved.batch


def claimed(deployment: Deployment, owner: str = "a", number: int = 0) -> Operation[Shard]:
    """Record a batch of one shard and claim it."""
    batch = yield from in_progress(deployment, number + 1)
    return (
        yield from deployment.table.claim(
            batch.id, number, owner=owner, now=NOW, lease_seconds=LEASE_SECONDS
        )
    )

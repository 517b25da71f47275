"""`/v1/batches/{id}/history`: what a batch gained over time."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from openai import OpenAI

from tests.emulators import Emulator
from tests.handler.api.rig import answer_to, refusal_in, request_of, serving
from tests.handler.aws.given import make_batch
from tests.handler.intake.rig import Cloud
from tidemill.batch.progress import HistoryBucket


@pytest.fixture
def cloud(emulator: Emulator) -> Iterator[Cloud]:
    """Return a separate deployment on each emulator."""
    with serving(Cloud.on(emulator)) as cloud:
        yield cloud


def test_history_is_listed_by_time(cloud: Cloud, client: OpenAI) -> None:
    """Buckets of unequal length, each with what was added to it; another tenant's is not there."""
    del client
    table, ledger = cloud.deployment.table, cloud.deployment.ledger
    ours = cloud.run(table.create_batch(make_batch(cloud.deployment)))
    theirs = cloud.run(table.create_batch(make_batch(cloud.deployment, tenant="others")))
    for batch in (ours, theirs):
        for bucket in (
            HistoryBucket(22_500, 900, 5),
            HistoryBucket(1020, 60, 3, 1, 12),
            HistoryBucket(1020, 60, 3, 0, 0, 9, 1.5),
        ):
            cloud.run(ledger.add_history(batch, bucket))
    answer = answer_to(request_of(f"/v1/batches/{ours.id}/history"))
    assert json.loads(answer["body"]) == {
        "object": "list",
        "data": [
            {"start": 1020, "seconds": 60, "completed": 6, "failed": 1, "tokens": 12}
            | {"input_tokens": 9, "audio_seconds": 1.5},
            {"start": 22_500, "seconds": 900, "completed": 5, "failed": 0, "tokens": 0}
            | {"input_tokens": 0, "audio_seconds": 0.0},
        ],
    }
    refused = answer_to(request_of(f"/v1/batches/{theirs.id}/history"))
    assert refusal_in(refused)[0] == 404


def test_a_batch_without_rows_has_an_empty_history(cloud: Cloud, client: OpenAI) -> None:
    """An empty history is not an error."""
    del client
    batch = cloud.run(cloud.deployment.table.create_batch(make_batch(cloud.deployment)))
    answer = answer_to(request_of(f"/v1/batches/{batch.id}/history"))
    assert json.loads(answer["body"]) == {"object": "list", "data": []}

"""Batches from their creation to their end by OpenAI's client, of two tenants."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from openai import OpenAI

from tests.emulators import Emulator
from tests.handler.api.rig import serving
from tests.handler.aws.given import NOW, make_batch
from tests.handler.intake.rig import Cloud, lines_of
from tidemill.batch.states import Status
from tidemill.batch.stored_file import File
from tidemill.handler.tenants.keys import KeyStore

PAGE = 20
NUM_BATCHES = 2 * PAGE + 5


@pytest.fixture
def cloud(emulator: Emulator) -> Iterator[Cloud]:
    """Return a separate deployment on each emulator, with a file of each of two tenants."""
    with serving(Cloud.on(emulator, shard_lines="10")) as cloud:
        for tenant in ("default", "others"):
            drop = cloud.put(lines_of(2), f"files/{tenant}/x")
            file = File(f"file-{tenant}", tenant, drop.key, 10, 1, "lines.jsonl", "batch")
            cloud.run(cloud.deployment.files.put_file(file))
        yield cloud


@pytest.fixture
def others(cloud: Cloud, client: OpenAI) -> OpenAI:
    """Return the client of the other tenant."""
    keys = KeyStore(cloud.deployment.table.name)
    return client.with_options(api_key=cloud.run(keys.create(tenant="others", name="x", now=1)))


def test_a_batch_lives_by_the_sdk(cloud: Cloud, client: OpenAI, others: OpenAI) -> None:
    """Created, found, listed and cancelled; the other tenant meets none of it."""
    batch = client.batches.create(
        input_file_id="file-default", endpoint="/v1/chat/completions", completion_window="24h"
    )
    assert cloud.ingest(cloud.batch(batch.id)).status is Status.IN_PROGRESS
    cloud.claim(batch.id)
    found = client.batches.retrieve(batch.id)
    assert found.status == "in_progress"
    assert [each.id for each in client.batches.list()] == [batch.id]
    for refused in (others.batches.retrieve, others.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            refused(batch.id)
    assert list(others.batches.list()) == []
    with pytest.raises(openai.BadRequestError):
        others.batches.create(
            input_file_id="file-default", endpoint="/v1/chat/completions", completion_window="24h"
        )
    assert client.batches.cancel(batch.id).status == "cancelling"


def test_a_key_is_a_tenants_own(client: OpenAI, others: OpenAI) -> None:
    """The same idempotency key makes a batch for each of two tenants."""
    made = [
        each.batches.create(
            input_file_id=file_id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
            extra_body={"idempotency_key": "monday"},
        )
        for each, file_id in ((client, "file-default"), (others, "file-others"))
    ]
    assert made[0].id != made[1].id
    for each, batch in ((client, made[0]), (others, made[1])):
        assert [found.id for found in each.batches.list()] == [batch.id]


def test_many_batches_are_paged_through(cloud: Cloud, client: OpenAI, others: OpenAI) -> None:
    """Each once, newest first, by as many requests as there are pages, among another tenant's."""
    table = cloud.deployment.table
    ours = [
        cloud.run(table.create_batch(make_batch(cloud.deployment, created_at=NOW + number // 2)))
        for number in range(NUM_BATCHES)
    ]
    theirs = make_batch(cloud.deployment, created_at=NOW + 7, tenant="others")
    cloud.run(table.create_batch(theirs))
    ours.sort(key=lambda batch: (batch.created_at, batch.id), reverse=True)
    assert [batch.id for batch in client.batches.list(limit=PAGE)] == [batch.id for batch in ours]
    assert [batch.id for batch in others.batches.list()] == [theirs.id]

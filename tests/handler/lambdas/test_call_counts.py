"""Number of AWS calls for one batch: an additional call must be added here."""

from __future__ import annotations

import gzip
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
from pydantic_core import to_json

from tests.emulators import Emulator, active_ids
from tests.handler.api.rig import answer_to, request_of, serving
from tests.handler.finalize.rig import Cloud as Rig
from tests.handler.finalize.rig import Drop
from tests.handler.intake.rig import Cloud, lines_of, plenty
from tests.handler.lambdas.telling import listening
from tidemill.batch.states import Status
from tidemill.batch.stored_file import File
from tidemill.handler.api.envelope.caller import aws as api_aws
from tidemill.handler.aws.queues import advance_message
from tidemill.handler.aws.sync import Aws
from tidemill.handler.control.reaper import reap
from tidemill.handler.intake.control_messages import drop_message
from tidemill.handler.lambdas.control import handle_message
from tidemill.handler.lifecycle import batch_lock

FOR_EVER = 1e9


@pytest.fixture(autouse=True)
def _any_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep no turn for the time that a slow machine takes."""
    monkeypatch.setattr(batch_lock, "_RENEW_EVERY_SECONDS", FOR_EVER)


@contextmanager
def counting(aws: Aws) -> Iterator[Counter[str]]:
    """Count the calls of a driver by operation and, where there is one, the kind of item."""
    counts: Counter[str] = Counter()

    def note(model: Any, params: Mapping[str, Any], **_: object) -> None:
        counts[_name(model.name, params)] += 1

    events = [client.meta.events for client in aws.clients.values()]
    for each in events:
        each.register("before-call", note, unique_id="counting")
    yield counts
    for each in events:
        each.unregister("before-call", unique_id="counting")


def _name(operation: str, params: Mapping[str, Any]) -> str:
    """Return the operation's name, with the partition and sort key's kinds of the item it is of."""
    fields = json.loads(params["body"]) if operation.endswith("Item") else {}
    key = fields.get("Key") or fields.get("Item")
    if key is None:
        return operation
    return f"{operation} " + "/".join(key[part]["S"].partition("#")[0] for part in ("pk", "sk"))


def calls_of(cloud: Cloud, body: object) -> Counter[str]:
    """Let the control Lambda handle a message and return the calls of that run."""
    with counting(cloud.aws) as counts:
        handle_message(cloud.aws, cloud.deployment, to_json(body).decode(), plenty)
    return counts


def message_of(cloud: Cloud) -> dict[str, object]:
    """Drop a file of one shard and return the message about it."""
    drop = cloud.put(lines_of(4))
    return drop_message(drop)


def test_a_drop_is_taken_in_without_reading_its_batch(ministack: Emulator) -> None:
    """One run from the message to the doorbell: what each write returns is the batch as it is."""
    cloud = Cloud.on(ministack)
    with listening(cloud.aws) as statuses:
        counts = calls_of(cloud, message_of(cloud))
    assert statuses == ["in_progress"]
    assert counts == {
        "HeadObject": 1,
        "GetItem TENANT/META": 1,  # its webhook's secret and its limit of lines
        "GetItem DROP/META": 1,
        "TransactWriteItems": 1,  # with the lock
        "PutEvents": 1,
        "GetObject": 2,  # its first bytes, then all of them
        "PutItem BATCH/READING": 1,
        "PutItem BATCH/SHARD": 1,
        # In progress and the lock released, announced, rung for.
        "UpdateItem BATCH/META": 3,
        "SendMessageBatch": 1,
    }
    assert counts.total() == 13


def test_a_drop_that_is_left_to_another_run_is_announced(ministack: Emulator) -> None:
    """Its lock is released before the message is sent."""
    cloud = Cloud.on(ministack)
    with listening(cloud.aws) as statuses:
        counts = calls_of(cloud, drop_message(cloud.put(gzip.compress(lines_of(4)))))
    assert statuses == ["validating"]
    [batch_id] = cloud.run(active_ids(cloud.deployment.table))
    assert cloud.batch(batch_id).turn is None
    assert counts["UpdateItem BATCH/META"] == 3  # what it is made plain by, released, announced
    assert counts["SendMessage"] == 1


def test_an_event_that_comes_again_reads_the_batch_once(ministack: Emulator) -> None:
    """It finds the batch, and nothing to do but to look for shards that were given up."""
    cloud = Cloud.on(ministack)
    event = message_of(cloud)
    calls_of(cloud, event)
    assert calls_of(cloud, event) == {
        "HeadObject": 1,
        "GetItem TENANT/META": 1,
        "GetItem DROP/META": 1,
        "GetItem BATCH/META": 1,
        "Query": 2,  # how many shards are left; those that were begun and what is done
    }


def test_a_batch_whose_shards_are_done_is_read_once(ministack: Emulator) -> None:
    """One run closes, publishes both results, reports, ends and announces."""
    cloud = Cloud.on(ministack)
    calls_of(cloud, message_of(cloud))
    [batch_id] = cloud.run(active_ids(cloud.deployment.table))
    Drop(Rig(ministack, cloud.aws, cloud.deployment, None), batch_id, []).run_shard(0)
    counts = calls_of(cloud, advance_message(batch_id))
    assert cloud.batch(batch_id).status is Status.COMPLETED
    assert counts == {
        "GetItem BATCH/META": 1,
        "GetItem DROP/META": 1,
        "Query": 3,  # how many shards are left, twice, and the shards
        "PutEvents": 2,  # finalizing, completed
        # Of each result: is it made, begun, known, what is sent, sent, the turn, made, is it made.
        "HeadObject": 4,
        "CreateMultipartUpload": 2,
        "ListParts": 2,
        "UploadPartCopy": 2,
        "CompleteMultipartUpload": 2,
        "PutItem FILE/META": 2,
        "PutObject": 1,
        # Finalizing, announced, the lock taken; those of the results; counts and files, the lock,
        # when it ended, completed, announced, the lock released.
        "UpdateItem BATCH/META": 12,
        "TransactWriteItems": 1,
        "DeleteItem ACTIVE/default": 1,
    }


def test_a_batch_is_made_by_few_calls(ministack: Emulator) -> None:
    """Its control run reads it once; another request of the process knows the tenant's limits."""
    with serving(Cloud.on(ministack)) as cloud:
        drop = cloud.put(lines_of(2), "files/default/file-1")
        file = File("file-1", "default", drop.key, 10, 1, "lines.jsonl", "batch")
        cloud.run(cloud.deployment.files.put_file(file))
        first, batch_id = posted()
        assert first == {
            "GetItem KEY/META": 1,
            "GetItem TENANT/META": 2,  # its limits, then its webhook's secret
            "GetItem FILE/META": 1,
            "HeadObject": 1,
            "TransactWriteItems": 1,
            "PutEvents": 1,
            "UpdateItem BATCH/META": 1,
            "SendMessage": 1,
        }
        assert posted()[0] == first - Counter({"GetItem TENANT/META": 1})
        assert calls_of(cloud, advance_message(batch_id)) == {
            "GetItem BATCH/META": 1,
            "GetItem TENANT/META": 1,
            "GetObject": 2,
            "PutItem BATCH/READING": 1,
            "PutItem BATCH/SHARD": 1,
            "PutEvents": 1,
            "UpdateItem BATCH/META": 4,  # the lock, then as with a drop
            "SendMessageBatch": 1,
        }


def posted() -> tuple[Counter[str], str]:
    """Ask the API for a batch of the file and return its calls, and the batch's id."""
    event = request_of("/v1/batches", "POST")
    fields = {
        "input_file_id": "file-1",
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    }
    event["headers"]["content-type"] = "application/json"
    event |= {"body": json.dumps(fields), "isBase64Encoded": False}
    with counting(api_aws()) as counts:
        answered = answer_to(event)
    assert answered["statusCode"] == 200
    return counts, json.loads(answered["body"])["id"]


def test_the_schedule_reads_no_shard_of_a_batch_that_runs(ministack: Emulator) -> None:
    """The batch, and what is live of it and done, however many shards wait in the queue."""
    cloud = Cloud.on(ministack)
    calls_of(cloud, message_of(cloud))
    [batch_id] = cloud.run(active_ids(cloud.deployment.table))
    cloud.claim(batch_id)
    reap(cloud.aws, cloud.deployment, int(time.time()))
    with counting(cloud.aws) as counts:
        reap(cloud.aws, cloud.deployment, int(time.time()))
    # The list of active ones; what was begun and what is done.
    assert counts == {"Query": 2, "GetItem REAPER/META": 1, "BatchGetItem": 1}

"""The resources of a deployment, as emulators make them."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import unquote_plus
from uuid import uuid4

import pytest

from localstack.resources import Resources, create_resources
from tests.emulators import MODEL, Emulator
from tidemill.handler.aws.queues import MAX_CONTROL_RECEIVES
from tidemill.handler.settings import read_settings


@pytest.fixture(scope="session")
def emulator(each_emulator: Emulator) -> Emulator:
    """Return each emulator in turn, always: the tests are about their handling of our calls."""
    return each_emulator


@pytest.fixture
def resources(emulator: Emulator) -> Resources:
    """A separate deployment, on each emulator in turn."""
    return emulator.create()


def drain(sqs: Any, url: str, wait_seconds: int = 2) -> list[str]:
    """Return the bodies of all messages of a queue, until there have been none for a while."""
    bodies = []
    while messages := sqs.receive_message(
        QueueUrl=url, MaxNumberOfMessages=10, WaitTimeSeconds=wait_seconds
    ).get("Messages"):
        for message in messages:
            bodies.append(message["Body"])
            sqs.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
    return bodies


def test_made_twice_they_are_the_same(emulator: Emulator) -> None:
    """Their contents stay."""
    prefix = f"twice-{uuid4().hex[:10]}"
    first = create_resources(emulator.endpoint_url, prefix=prefix, models=[MODEL])
    item = {"pk": {"S": "a"}, "sk": {"S": "b"}}
    emulator.client("dynamodb").put_item(TableName=first.table, Item=item)
    emulator.client("s3").put_object(Bucket=first.bucket, Key="x", Body=b"1")
    assert create_resources(emulator.endpoint_url, prefix=prefix, models=[MODEL]) == first
    assert emulator.client("dynamodb").scan(TableName=first.table)["Items"] == [item]
    assert emulator.client("s3").get_object(Bucket=first.bucket, Key="x")["Body"].read() == b"1"


def test_their_environment_is_what_handlers_read(resources: Resources) -> None:
    """Every name arrives where it belongs."""
    settings = read_settings(resources.environment)
    assert settings.bucket == resources.bucket
    assert settings.table == resources.table
    assert settings.control_queue == resources.control
    assert settings.drops_queue == resources.drops
    assert settings.work_queues == resources.work


def test_uploads_of_input_files_ring_and_others_do_not(
    emulator: Emulator, resources: Resources
) -> None:
    """The prefix decides, whatever the name, also for multipart uploads."""
    s3, sqs = emulator.client("s3"), emulator.client("sqs")
    drain(sqs, resources.drops)
    for key in ("other/a.jsonl", "input/A.CSV", "input/a b+é.jsonl"):
        s3.put_object(Bucket=resources.bucket, Key=key, Body=b"{}")
    where = {"Bucket": resources.bucket, "Key": "input/parts.jsonl"}
    upload = where | {"UploadId": s3.create_multipart_upload(**where)["UploadId"]}
    etag = s3.upload_part(**upload, PartNumber=1, Body=b"{}")["ETag"]
    parts = {"Parts": [{"PartNumber": 1, "ETag": etag}]}
    s3.complete_multipart_upload(**upload, MultipartUpload=parts)
    keys = {
        unquote_plus(record["s3"]["object"]["key"])
        for body in drain(sqs, resources.drops)
        for record in json.loads(body)["Records"]
    }
    assert keys == {"input/A.CSV", "input/a b+é.jsonl", "input/parts.jsonl"}


def test_undeleted_messages_end_in_the_dead_letter_queue(
    emulator: Emulator, resources: Resources
) -> None:
    """Messages of the control queue and of a model's go there, after as many receives as on AWS."""
    sqs = emulator.client("sqs")
    drain(sqs, resources.control)
    for url, max_receives in (
        (resources.control, MAX_CONTROL_RECEIVES),
        (resources.work[MODEL], 5),
    ):
        sqs.send_message(QueueUrl=url, MessageBody=url)
        for _ in range(max_receives):
            [_message] = sqs.receive_message(QueueUrl=url, VisibilityTimeout=0, WaitTimeSeconds=2)[
                "Messages"
            ]
        assert "Messages" not in sqs.receive_message(QueueUrl=url)
        assert drain(sqs, resources.dead_letters, wait_seconds=1) == [url]

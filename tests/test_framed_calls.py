"""Calls as frames have the answers that they have over HTTP."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any
from uuid import uuid4

import pytest
from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession
from botocore.config import Config
from botocore.exceptions import ClientError, ReadTimeoutError

from localstack.stacks import client_options
from tests import framed_calls
from tests.emulators import ARE_FRAMED, Emulator

pytestmark = pytest.mark.skipif(not ARE_FRAMED, reason="calls use HTTP")

BODY = bytes(range(256)) * 5_000
CALLS: list[tuple[str, Callable[[Any, str], Any]]] = [
    ("s3", lambda s3, name: s3.create_bucket(Bucket=name)),
    (
        "s3",
        lambda s3, name: s3.put_object(Bucket=name, Key="a b/é", Body=BODY, Metadata={"n": "1"}),
    ),
    ("s3", lambda s3, name: s3.head_object(Bucket=name, Key="a b/é")),
    ("s3", lambda s3, name: s3.get_object(Bucket=name, Key="a b/é", Range="bytes=5-600000")),
    ("s3", lambda s3, name: s3.get_object(Bucket=name, Key="missing")),
    ("s3", lambda s3, name: s3.list_objects_v2(Bucket=name, Delimiter=" ")),
    ("sqs", lambda sqs, name: sqs.create_queue(QueueName=name)),
    ("dynamodb", lambda dynamodb, name: dynamodb.describe_table(TableName=name)),
]


def answer(emulator: Emulator, service: str, call: Callable[[Any, str], Any], name: str) -> Any:
    """Return a response, or that of an error."""
    try:
        response = call(emulator.client(service), name)
    except ClientError as exc:
        response = exc.response
    if "Body" in response:
        response["Body"] = response["Body"].read()
    return comparable(response)


def comparable(response: Any) -> Any:
    """Return a response without what differs between equal calls."""
    metadata = response["ResponseMetadata"]
    ours = ("-id", "-id-2", "requestid", "date", "server", "last-modified")
    kept = {k: v for k, v in metadata["HTTPHeaders"].items() if not k.endswith(ours)}
    response["ResponseMetadata"] = (metadata["HTTPStatusCode"], kept)
    return {k: v for k, v in response.items() if k not in {"LastModified", "VersionId"}}


def test_answers_are_those_over_http(ministack: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Status, headers and body of results and errors are the same."""
    name = f"framed-{uuid4().hex}"
    with monkeypatch.context() as patch:
        patch.setattr(framed_calls, "_send_http", None)  # no call may use it
        framed = [answer(ministack, *call, name) for call in CALLS]
    monkeypatch.setattr(framed_calls, "_EMULATORS", {})
    over_http = [answer(ministack, *call, name) for call in CALLS]
    assert framed[3]["Body"] == BODY[5:600_001]
    for mine, other in zip(framed, over_http, strict=True):
        assert mine == other


def test_an_answer_that_is_late_is_a_timeout(ministack: Emulator) -> None:
    """A long poll that outlasts the client's limit ends as it does over HTTP."""
    client = ministack.client("sqs", Config(read_timeout=0.5, retries={"total_max_attempts": 1}))
    url = client.create_queue(QueueName=f"framed-{uuid4().hex}")["QueueUrl"]
    with pytest.raises(ReadTimeoutError):
        client.receive_message(QueueUrl=url, WaitTimeSeconds=3)


async def answers_of_aiobotocore(emulator: Emulator, name: str) -> list[Any]:
    """Return the answers to all calls, one after the other."""
    answers = []
    async with AsyncExitStack() as stack:
        options = client_options(emulator.environment)
        clients = {
            service: await stack.enter_async_context(AioSession().create_client(service, **options))
            for service in dict(CALLS)
        }
        for service, call in CALLS:
            try:
                response = await call(clients[service], name)
            except ClientError as exc:
                response = exc.response
            if "Body" in response:
                async with response["Body"] as body:
                    response["Body"] = await body.read()
            answers.append(comparable(response))
    return answers


async def test_answers_to_aiobotocore_are_those_over_http(
    ministack: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Status, headers and body of results and errors are the same."""
    name = f"framed-{uuid4().hex}"
    with monkeypatch.context() as patch:
        patch.setattr(framed_calls, "_send_aiohttp", None)  # no call may use it
        framed = await answers_of_aiobotocore(ministack, name)
    monkeypatch.setattr(framed_calls, "_EMULATORS", {})
    over_http = await answers_of_aiobotocore(ministack, name)
    assert framed[3]["Body"] == BODY[5:600_001]
    for mine, other in zip(framed, over_http, strict=True):
        assert mine == other


async def test_an_answer_to_aiobotocore_that_is_late_is_a_timeout(ministack: Emulator) -> None:
    """A long poll that outlasts the client's limit ends, and the next call has its own answer."""
    config = AioConfig(read_timeout=0.5, retries={"total_max_attempts": 1})
    options = client_options(ministack.environment)
    async with AioSession().create_client("sqs", **options, config=config) as client:
        url = (await client.create_queue(QueueName=f"framed-{uuid4().hex}"))["QueueUrl"]
        with pytest.raises(ReadTimeoutError):
            await client.receive_message(QueueUrl=url, WaitTimeSeconds=3)
        assert "Attributes" in await client.get_queue_attributes(
            QueueUrl=url, AttributeNames=["QueueArn"]
        )


def test_a_repeated_deployment_is_like_the_first(ministack: Emulator) -> None:
    """Resources that were made by repeated requests differ only in their names."""
    first, again = (ministack.create("m", work_visibility_seconds=7) for _ in range(2))
    looks = []
    for made in (first, again):
        s3, sqs = ministack.client("s3"), ministack.client("sqs")
        [rule] = s3.get_bucket_notification_configuration(Bucket=made.bucket)["QueueConfigurations"]
        table = ministack.client("dynamodb").describe_table(TableName=made.table)["Table"]
        names = ["QueueArn", "VisibilityTimeout", "RedrivePolicy"]
        look = [
            (rule["QueueArn"], rule["Events"], rule["Filter"]),
            s3.get_bucket_versioning(Bucket=made.bucket)["Status"],
            s3.get_bucket_cors(Bucket=made.bucket)["CORSRules"],
            (table["KeySchema"], table["GlobalSecondaryIndexes"][0]["KeySchema"]),
            *(
                sqs.get_queue_attributes(QueueUrl=url, AttributeNames=names)["Attributes"]
                for url in (made.control, made.intake, made.drops, *made.work.values())
            ),
        ]
        looks.append(repr((made.environment, look)).replace(made.bucket, "name"))
    assert first.bucket != again.bucket
    assert looks[0] == looks[1]

"""The chaos suite's proxy: it forwards faithfully on request, and otherwise fails like AWS."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError, HTTPClientError

from localstack.resources import Resources
from tests.chaos.rig import read_counts, running_proxy
from tests.emulators import MODEL, Emulator

NUM_REQUESTS = 16
ONCE = Config(retries={"total_max_attempts": 1})


def client_of(url: str, service: str) -> Any:
    """Return a client that sends each request once."""
    return boto3.client(
        service,
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id="test",
        aws_secret_access_key="test",
        config=ONCE,
    )


def put_all(url: str, bucket: str) -> list[str]:
    """Write objects `0` to `15` through the proxy; return what became of each request."""
    s3 = client_of(url, "s3")
    outcomes = []
    for number in range(NUM_REQUESTS):
        try:
            s3.put_object(Bucket=bucket, Key=str(number), Body=b"x")
        except ClientError as exc:
            outcomes.append(exc.response["Error"]["Code"])
        except HTTPClientError:
            outcomes.append("lost")
        else:
            outcomes.append("done")
    return outcomes


def test_bytes_pass_as_they_are(ministack: Emulator, tmp_path: Path) -> None:
    """A large upload, as boto3 chunks it by default, a range of it, its size, and an odd key."""
    bucket, key, body = ministack.create().bucket, "a b/+é.bin", os.urandom(20 * 2**20)
    with running_proxy(ministack, tmp_path / "proxy", seed=1, rate=0) as url:
        s3 = client_of(url, "s3")
        s3.put_object(Bucket=bucket, Key=key, Body=body)
        s3.put_object(Bucket=bucket, Key=f"{key}2", Body=b"", Metadata={"team": "search"})
        assert s3.head_object(Bucket=bucket, Key=key)["ContentLength"] == len(body)
        found = s3.get_object(Bucket=bucket, Key=key, Range="bytes=5-9")
        assert (found["Body"].read(), found["ContentLength"]) == (body[5:10], 5)
        listed = s3.list_objects_v2(Bucket=bucket, Prefix="a b/")["Contents"]
        assert [each["Key"] for each in listed] == [key, f"{key}2"]
        assert read_counts(url).keys() == {"none"}
    direct = ministack.client("s3")
    assert direct.get_object(Bucket=bucket, Key=key)["Body"].read() == body
    assert direct.head_object(Bucket=bucket, Key=f"{key}2")["Metadata"] == {"team": "search"}


def test_the_same_seed_does_the_same_harm(ministack: Emulator, tmp_path: Path) -> None:
    """A refused request was not carried out; one whose answer was lost was, like a slow one."""
    outcomes = []
    for name in ("first", "second"):
        bucket = ministack.create().bucket
        with running_proxy(ministack, tmp_path / name, seed=4, rate=1) as url:
            outcomes.append(put_all(url, bucket))
            counts = read_counts(url)
        found = Counter(outcomes[-1])
        assert found == {
            "SlowDown": counts["refused"],
            "lost": counts["lost"],
            "done": counts["slow"],
        }
        listed = ministack.client("s3").list_objects_v2(Bucket=bucket)["Contents"]
        is_there = [str(n) in {each["Key"] for each in listed} for n in range(NUM_REQUESTS)]
        assert is_there == [outcome != "SlowDown" for outcome in outcomes[-1]]
    assert outcomes[0] == outcomes[1]
    assert all(found.values())


@pytest.mark.parametrize(
    ("service", "code"),
    [("dynamodb", "ProvisionedThroughputExceededException"), ("sqs", "InternalFailure")],
)
def test_each_service_refuses_in_its_own_words(
    ministack: Emulator, tmp_path: Path, service: str, code: str
) -> None:
    """They are those that clients try again after."""
    resources = ministack.create()
    with running_proxy(ministack, tmp_path / "proxy", seed=4, rate=1) as url:
        client, refusals = client_of(url, service), set()
        for _ in range(NUM_REQUESTS):
            try:
                ask(client, resources)
            except ClientError as exc:
                refusals.add(exc.response["Error"]["Code"])
            except HTTPClientError:
                continue
    assert refusals == {code}


def ask(client: Any, resources: Resources) -> None:
    """Send a service any request that it can answer."""
    if client.meta.service_model.service_name == "sqs":
        client.send_message(QueueUrl=resources.work[MODEL], MessageBody="x")
    else:
        client.describe_table(TableName=resources.table)

"""Urls that are signed: what they name, how long they are good, and by what signature."""

from __future__ import annotations

from typing import Any

import boto3
import httpx
import pytest
from botocore.config import Config

from tests.emulators import Emulator
from tests.handler.intake.rig import Cloud
from tidemill.handler.aws.bucket import Bucket
from tidemill.handler.aws.sync import MAX_PRESIGNED_SECONDS, Aws

BUCKET = Bucket("rows")


def aws_in(region: str) -> Aws:
    """Return a driver with credentials as a Lambda has them, which no server knows."""

    def client(service: str, **options: Any) -> Any:
        return boto3.client(
            service,
            region_name=region,
            aws_access_key_id="ASIA1",
            aws_secret_access_key="secret",
            aws_session_token="session",
            **options,
        )

    return Aws(client)


@pytest.mark.parametrize("region", ["us-east-1", "eu-west-1", "eu-central-2"])
def test_a_url_names_its_region_in_host_and_signature(region: str) -> None:
    """The global host would redirect, which browsers' CORS and S3's signature do not survive."""
    call = BUCKET.download("files/lab@x/file-1", "v 1", disposition='attachment; filename="a"')
    url = httpx.URL(aws_in(region).presign(call, 60))
    assert url.scheme == "https"
    assert url.host == f"rows.s3.{region}.amazonaws.com"
    assert url.path == "/files/lab@x/file-1"
    given = dict(url.params)
    assert given.pop("X-Amz-Credential").split("/")[2:] == [region, "s3", "aws4_request"]
    assert given.pop("X-Amz-Security-Token") == "session"
    assert given.pop("X-Amz-Signature")
    assert given.pop("X-Amz-Date")
    assert given == {
        "X-Amz-Algorithm": "AWS4-HMAC-SHA256",
        "X-Amz-Expires": "60",
        "X-Amz-SignedHeaders": "host",
        "response-content-disposition": 'attachment; filename="a"',
        "versionId": "v 1",
    }


def test_a_part_is_signed_for_its_length() -> None:
    """The URL allows writing this one part, with exactly that many bytes."""
    url = httpx.URL(aws_in("eu-west-1").presign(BUCKET.part_url("files/a/b", "up", 7, 5), 60))
    assert url.params["X-Amz-SignedHeaders"] == "content-length;host"
    assert (url.params["uploadId"], url.params["partNumber"]) == ("up", "7")
    assert not [name for name in url.params if "checksum" in name]


@pytest.mark.parametrize("seconds", [-1, 0, MAX_PRESIGNED_SECONDS + 1])
def test_no_url_is_good_for_longer_than_an_hour(seconds: int) -> None:
    """The credentials that sign it may end sooner than that, and with them the url."""
    with pytest.raises(AssertionError):
        aws_in("eu-west-1").presign(BUCKET.part_url("k", "up", 1, 5), seconds)


def test_a_presigned_url_grants_access_to_one_object(emulator: Emulator) -> None:
    """It needs no other header; it serves whole objects and ranges."""
    cloud = Cloud.on(emulator)
    cloud.put(b"0123456789", "files/lab/ü x")
    call = cloud.deployment.bucket.download("files/lab/ü x", None, disposition="attachment")
    url = cloud.aws.presign(call, 60)
    assert httpx.get(url).content == b"0123456789"
    part = httpx.get(url, headers={"Range": "bytes=2-4"})
    assert (part.status_code, part.content) == (206, b"234")


def test_a_client_in_dual_stack_leaves_all_later_ones_as_they_are() -> None:
    """botocore writes resolved values into a client's options: each client needs a copy."""

    def endpoint(**options: Any) -> str:
        def client(service: str, config: Config) -> Any:
            config = config.merge(Config(**options))
            return boto3.client(service, region_name="eu-west-1", config=config)

        url: str = Aws(client).clients["s3"].meta.endpoint_url
        return url

    assert endpoint(use_dualstack_endpoint=True) == "https://s3.dualstack.eu-west-1.amazonaws.com"
    assert endpoint() == "https://s3.eu-west-1.amazonaws.com"

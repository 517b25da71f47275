"""The store that variables and profiles name, and clients for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from botocore.exceptions import BotoCoreError, ClientError, EndpointConnectionError, SSLError

from tidemill.handler.aws.calls import Call, translate
from tidemill.handler.aws.s3_store import BadEndpoint, S3Store, find_store
from tidemill.handler.aws.sync import aws_client

CONFIG = """
[default]
region = eu-west-1
[profile all]
endpoint_url = http://all
[profile several]
endpoint_url = http://all
services = mine
region = auto
s3 =
  addressing_style = virtual
[services mine]
s3 =
  endpoint_url = http://several
"""
BY_ALL = {"TIDEMILL_STORE_PROFILE": "all"}
BY_SEVERAL = {"TIDEMILL_STORE_PROFILE": "several"}


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let profiles be those of CONFIG."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    (tmp_path / "config").write_text(CONFIG)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    monkeypatch.setattr("boto3.DEFAULT_SESSION", None)


@pytest.mark.parametrize(
    ("environment", "url"),
    [
        ({}, None),
        ({"AWS_ENDPOINT_URL_SQS": "http://sqs"}, None),
        ({"AWS_ENDPOINT_URL": "http://any"}, "http://any"),
        ({"AWS_ENDPOINT_URL": "http://any", "AWS_ENDPOINT_URL_S3": "http://s3"}, "http://s3"),
        ({"AWS_ENDPOINT_URL": "http://any", **BY_ALL}, "http://any"),
        (BY_ALL, "http://all"),
        (BY_SEVERAL, "http://several"),
    ],
)
def test_an_endpoint_is_found_in_the_order_of_awss_clients(
    environment: dict[str, str], url: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variables before the profile, one service before all: a client goes to the same."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert find_store().endpoint_url == url
    found = aws_client("s3").meta.endpoint_url
    assert found == (url or "https://s3.eu-west-1.amazonaws.com")


@pytest.mark.parametrize(
    ("url", "is_aws"),
    [
        (None, True),
        ("https://bucket.vpce-1a2b.s3.us-east-1.vpce.amazonaws.com", True),
        ("https://s3.dualstack.eu-west-1.amazonaws.com", True),
        ("https://s3.cn-north-1.amazonaws.com.cn", True),
        ("https://amazonaws.com.example.org", False),
        ("https://notamazonaws.com", False),
        ("http://minio:9000", False),
        ("http://10.0.0.1:9000", False),
    ],
)
def test_a_store_is_awss_by_its_host(url: str | None, *, is_aws: bool) -> None:
    """An interface endpoint of a network is, too: it keeps checksums."""
    store = S3Store(endpoint_url=url)
    assert store.is_aws is is_aws
    assert bool(store.client_options) is not is_aws


def test_a_profile_of_the_store_has_its_own_region_and_style(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Clients of other services stay in the process's."""
    monkeypatch.setenv("AWS_REGION", "us-west-2")
    monkeypatch.setenv("TIDEMILL_STORE_PROFILE", "several")
    s3, sqs = aws_client("s3"), aws_client("sqs")
    assert (s3.meta.region_name, sqs.meta.region_name) == ("auto", "us-west-2")
    assert s3.meta.config.s3["addressing_style"] == "virtual"
    assert sqs.meta.endpoint_url == "https://sqs.us-west-2.amazonaws.com"


@pytest.mark.parametrize("url", ["minio", "minio:9000", "ftp://minio", "http://", "http://h:x"])
def test_an_endpoint_without_a_host_is_refused(url: str) -> None:
    """The error has a separate type."""
    with pytest.raises(BadEndpoint, match=f"Invalid endpoint: {url} \\(write http"):
        find_store({"AWS_ENDPOINT_URL_S3": url})


def refused(code: str) -> ClientError:
    """Return what a client raises when a store answers with a code."""
    return ClientError({"Error": {"Code": code}}, "PutObject")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (refused("SignatureDoesNotMatch"), "(the store is http://s3: its keys or its"),
        (refused("NoSuchBucket"), "it has no such bucket)"),
        (refused("NotImplemented"), "it does not support this operation"),
        (refused("PathStyleDomainForbidden"), "set addressing_style = virtual"),
        (EndpointConnectionError(endpoint_url="http://s3"), "it does not respond)"),
        (SSLError(endpoint_url="http://s3", error="x"), "AWS_CA_BUNDLE"),
        (refused("500"), "or the port belongs to another server"),
    ],
)
def test_what_a_store_says_is_explained(
    error: ClientError | BotoCoreError, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only errors of S3 are explained, and not those of AWS's own S3."""
    call = Call("s3", "put_object", {})
    assert words not in str(translate(error, call))
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://s3")
    assert words in str(translate(error, call))
    assert words not in str(translate(error, Call("sqs", "send_message", {})))


def test_a_missing_object_is_nothing_to_explain(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not reported as a failure of the store."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://s3")
    assert "the store is" not in str(translate(refused("NoSuchKey"), Call("s3", "get_object", {})))

"""The check of a deployment's own key, on answers in AWS's form."""

from __future__ import annotations

import json
from typing import Any

import boto3
import pytest
from botocore.stub import Stubber

from infra.config import make_config
from infra.ops.preflight.account import NotReady
from infra.ops.preflight.key import check_key

KEY = "arn:aws:kms:eu-west-1:111122223333:key/abc"
GOOD = {"KeyState": "Enabled", "KeySpec": "SYMMETRIC_DEFAULT"}
LOGS = "logs.eu-west-1.amazonaws.com"
SERVICES = ["s3.amazonaws.com", "events.amazonaws.com", "cloudwatch.amazonaws.com", LOGS]


def check(
    metadata: dict[str, Any] | None,
    principals: tuple[Any, ...] = (),
    key: str = KEY,
    *,
    action: Any = "kms:*",
) -> None:
    """Check a key that KMS describes so, whose policy allows these principals something."""
    kms = boto3.client(
        "kms", region_name="eu-west-1", aws_access_key_id="k", aws_secret_access_key="s"
    )
    statements = [{"Effect": "Allow", "Principal": it, "Action": action} for it in principals]
    if len(principals) != 1:
        statements.append({"Effect": "Deny", "Principal": {"Service": SERVICES}, "Action": "kms:*"})
    config = make_config({"models": [{"name": "m", "gpu": "l4"}], "kms_key": key}, "test")
    with Stubber(kms) as stubber:
        if metadata is None:
            stubber.add_client_error("describe_key", "NotFoundException")
        else:
            stubber.add_response("describe_key", {"KeyMetadata": metadata | {"KeyId": "abc"}})
            # A policy of one statement may have it without a list.
            statement = statements[0] if len(statements) == 1 else statements
            policy = json.dumps({"Statement": statement})
            stubber.add_response("get_key_policy", {"Policy": policy})
        check_key(config, kms)


ROOT = {"AWS": "arn:aws:iam::111122223333:root"}


@pytest.mark.parametrize(
    "principals",
    [
        (ROOT, {"Service": SERVICES}),
        ({"Service": SERVICES[0]}, {"Service": SERVICES[1:]}),
        ({"Service": [*SERVICES[:3], "logs.amazonaws.com"]},),
        ("*",),
        ({"AWS": "*"},),
        (ROOT, {"AWS": ["*"]}),
    ],
)
def test_a_key_that_lets_services_in_is_good(principals: tuple[Any, ...]) -> None:
    """Its policy may have one statement or several, with either name of CloudWatch Logs."""
    check(GOOD, principals)


def test_a_key_must_let_services_make_data_keys() -> None:
    """The action may be a pattern; a service that may only decrypt cannot write."""
    for action in ("kms:GenerateDataKey*", ["kms:Decrypt", "kms:GenerateDataKey"], "*"):
        check(GOOD, ({"Service": SERVICES},), action=action)
    with pytest.raises(NotReady, match="does not allow s3"):
        check(GOOD, ({"Service": SERVICES},), action=["kms:Decrypt", "kms:DescribeKey"])


def test_a_deployment_without_a_key_makes_no_calls() -> None:
    """AWS's own keys need no check."""
    check_key(
        make_config({"models": [{"name": "m", "gpu": "l4"}]}, "test"),
        boto3.client("kms", region_name="eu-west-1"),
    )


@pytest.mark.parametrize(
    ("metadata", "principals", "key", "words"),
    [
        (GOOD, (ROOT,), KEY, f"does not allow {', '.join(SERVICES)} to use it"),
        (GOOD, ({"Service": SERVICES[:3]},), KEY, f"does not allow {LOGS} to use it"),
        (GOOD, ({"Service": SERVICES[1:]},), KEY, "does not allow s3.amazonaws.com to use it"),
        (None, (), KEY, "kms_key arn:aws:kms:"),
        (GOOD | {"KeyState": "Disabled"}, (), KEY, "kms_key is Disabled"),
        (GOOD | {"KeySpec": "RSA_2048"}, (), KEY, "with key spec RSA_2048"),
        (GOOD, (), KEY.replace("west", "north"), "kms_key is in eu-north-1, but the deployment"),
    ],
)
def test_missing_permissions_of_a_key_are_reported(
    metadata: dict[str, Any] | None, principals: tuple[Any, ...], key: str, words: str
) -> None:
    """The error is one sentence, before anything is created."""
    with pytest.raises(NotReady) as caught:
        check(metadata, principals, key)
    assert words in str(caught.value)

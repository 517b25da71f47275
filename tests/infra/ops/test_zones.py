"""The region's zones are asked for once, beside the templates."""

from __future__ import annotations

from typing import Any

import boto3
import pytest
from botocore.stub import Stubber

from infra.ops import zones


@pytest.fixture
def ec2(monkeypatch: pytest.MonkeyPatch) -> Stubber:
    """Return the answers of EC2, which are checked by its own description."""
    client = boto3.client(
        "ec2", region_name="eu-west-1", aws_access_key_id="k", aws_secret_access_key="s"
    )
    monkeypatch.setattr(zones, "aws_client", lambda _: client)
    return Stubber(client)


ASKED: dict[str, Any] = {"Filters": [{"Name": "zone-type", "Values": ["availability-zone"]}]}


def test_the_zones_are_printed_in_their_order(
    ec2: Stubber, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that is impaired is among them: a network does not lose its subnet for that."""
    found = [
        {"ZoneName": "eu-west-1c", "State": "impaired"},
        {"ZoneName": "eu-west-1a", "State": "available"},
    ]
    ec2.add_response("describe_availability_zones", {"AvailabilityZones": found}, ASKED)
    with ec2:
        assert zones.main() == 0
    assert capsys.readouterr().out == "eu-west-1a,eu-west-1c\n"


def test_who_may_not_ask_deploys_all_the_same(
    ec2: Stubber, capsys: pytest.CaptureFixture[str]
) -> None:
    """With two zones, and a word of it."""
    ec2.add_client_error("describe_availability_zones", "UnauthorizedOperation", "no")
    with ec2:
        assert zones.main() == 0
    said = capsys.readouterr()
    assert said.out == ""
    assert "two of AWS's choice" in said.err

"""Region of AWS clients: chosen as in AWS's own tools."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidemill.handler.aws.aio import AioAws
from tidemill.handler.aws.sync import Aws

PROFILE = "[default]\nregion = eu-west-1\n"


@pytest.mark.parametrize(
    ("variables", "region"),
    [
        ({"AWS_REGION": "eu-north-1"}, "eu-north-1"),
        ({"AWS_DEFAULT_REGION": "eu-central-1"}, "eu-central-1"),
        ({"AWS_REGION": "eu-north-1", "AWS_DEFAULT_REGION": "eu-central-1"}, "eu-north-1"),
        ({"AWS_REGION": "", "AWS_DEFAULT_REGION": "eu-central-1"}, "eu-central-1"),
        ({}, "eu-west-1"),
    ],
)
async def test_the_region_is_the_one_that_the_cdk_deploys_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variables: dict[str, str], region: str
) -> None:
    """AWS_REGION, then AWS_DEFAULT_REGION, then the profile's; by both kinds of clients."""
    (tmp_path / "config").write_text(PROFILE)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("boto3.DEFAULT_SESSION", None)
    assert Aws().clients["sqs"].meta.region_name == region
    async with AioAws() as aws:
        assert aws._clients["sqs"].meta.region_name == region

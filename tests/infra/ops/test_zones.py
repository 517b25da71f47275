"""The region's zones are requested once, before synthesis."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.stub import Stubber

from infra.config import DEFAULT_PATH
from infra.ops import zones


@pytest.fixture
def ec2(monkeypatch: pytest.MonkeyPatch) -> Stubber:
    """Return the answers of EC2, which are checked by its own description."""
    client = boto3.client(
        "ec2", region_name="eu-west-1", aws_access_key_id="k", aws_secret_access_key="s"
    )
    monkeypatch.setattr(zones, "aws_client", lambda _: client)
    return Stubber(client)


REQUEST: dict[str, Any] = {"Filters": [{"Name": "zone-type", "Values": ["availability-zone"]}]}


@pytest.fixture
def config(tmp_path: Path) -> Callable[[str], list[str]]:
    """Return a function that gives the arguments for a configuration with these lines."""

    def make(lines: str) -> list[str]:
        path = tmp_path / "mill.toml"
        path.write_text(f'{lines}\n[[models]]\nname = "small"\ngpu = "l4"\n', encoding="utf-8")
        return ["--config", str(path)]

    return make


def test_the_zones_are_printed_in_their_order(
    ec2: Stubber, config: Callable[[str], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """One that is impaired is among them: a network does not lose its subnet for that."""
    found = [
        {"ZoneName": "eu-west-1c", "State": "impaired"},
        {"ZoneName": "eu-west-1a", "State": "available"},
    ]
    ec2.add_response("describe_availability_zones", {"AvailabilityZones": found}, REQUEST)
    with ec2:
        assert zones.main(config("")) == 0
    assert capsys.readouterr().out == "eu-west-1a,eu-west-1c\n"


@pytest.mark.parametrize(
    ("code", "start"),
    [
        ("UnauthorizedOperation", "These credentials may not list the region's zones"),
        ("RequestLimitExceeded", "EC2 did not return the region's zones"),
    ],
)
def test_no_zones_are_an_error(
    ec2: Stubber,
    config: Callable[[str], list[str]],
    capsys: pytest.CaptureFixture[str],
    code: str,
    start: str,
) -> None:
    """A network of fewer would be another one; the sentence says where they can be named."""
    ec2.add_client_error("describe_availability_zones", code, "no")
    with ec2:
        assert zones.main(config("")) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(start)
    assert captured.err.endswith("name them, sorted, in `zones` of [network].\n")


@pytest.mark.parametrize(
    "lines",
    [
        '[network]\nzones = ["eu-west-1b"]',
        '[network]\nkind = "existing"\nvpc_id = "vpc-01234567"\nsubnet_ids = ["subnet-01234567"]',
        'compute = "sagemaker"',
    ],
)
def test_unneeded_zones_are_not_requested(
    ec2: Stubber,
    config: Callable[[str], list[str]],
    capsys: pytest.CaptureFixture[str],
    lines: str,
) -> None:
    """The file names them, or the network is not created here."""
    with ec2:  # which has no answer
        assert zones.main(config(lines)) == 0
    assert capsys.readouterr().out == "\n"


@pytest.mark.parametrize("target", ["deploy", "diff"])
@pytest.mark.parametrize("status", [0, 1])
def test_make_stops_without_zones(tmp_path: Path, target: str, status: int) -> None:
    """The CDK gets those that were printed, or does not run."""
    for path, words in (
        ("bin/python", f"echo a,b; exit {status}"),
        ("infra/node_modules/.bin/cdk", 'echo "$*" > made'),
    ):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(f"#!/bin/sh\n{words}\n", encoding="utf-8")
        (tmp_path / path).chmod(0o755)
    recipe = subprocess.run(
        ["make", "--dry-run", target, f"BIN={tmp_path}/bin", "CONFIG=my.toml"],
        cwd=DEFAULT_PATH.parents[1],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    [line] = (line for line in recipe.splitlines() if ".bin/cdk" in line)
    assert subprocess.run(["sh", "-c", line], cwd=tmp_path, check=False).returncode == status
    made = tmp_path / "made"
    assert made.exists() is (status == 0)
    if made.exists():
        assert made.read_text().startswith(target)
        assert " -c zones=a,b -c lambda_concurrency=a,b" in made.read_text()

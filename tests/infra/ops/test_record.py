"""AWS's responses as fixtures: whole, in the format of tests/events, without private data."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from infra.ops.record import ACCOUNT, cold_starts, recording, redact
from tests.emulators import Emulator

OWN = "999988887777"
EVENTS = Path(__file__).parents[2] / "events"
# As the Compute stack makes it.
PATTERN = {
    "source": ["tidemill.test"],
    "detail-type": ["ECS Task State Change"],
    "detail": {"clusterArn": ["arn:of-ours"], "lastStatus": ["STOPPED"]},
}


@pytest.fixture
def client(ministack: Emulator) -> Callable[[str], Any]:
    """Return a function that makes clients of an account where the deployment `mill` has a rule."""
    events = ministack.client("events")
    events.put_rule(Name="mill-ends-1", EventPattern=json.dumps(PATTERN))
    events.put_rule(Name="other-ends-1", EventPattern=json.dumps(PATTERN))
    return ministack.client


def put_event(events: Any, status: str, **detail: str) -> None:
    """Have the emulator say that a worker is in a state."""
    entry = {
        "Source": "tidemill.test",
        "DetailType": "ECS Task State Change",
        "Detail": json.dumps({"clusterArn": "arn:of-ours", "lastStatus": status, **detail}),
    }
    assert events.put_events(Entries=[entry])["FailedEntryCount"] == 0


def test_events_of_workers_become_fixtures(client: Callable[[str], Any], tmp_path: Path) -> None:
    """Every state is recorded, though the deployment's rule is for the end; all is cleaned up."""
    events, sqs = client("events"), client("sqs")
    folder = tmp_path / "responses"
    with recording(folder, "mill", client, drain_seconds=3) as record:
        put_event(events, "PENDING")
        put_event(events, "STOPPED", stoppedReason="for arn:aws:ecs:eu-west-1:000000000000:task/x")
        put_event(events, "STOPPED", clusterArn="arn:of-others")
        record.note("rows came back")
    assert sorted(path.name for path in folder.iterdir()) == [
        "cold_starts.json",
        "ecs_task_pending_1.json",
        "ecs_task_stopped_1.json",
        "quotas.json",
        "timings.json",
    ]
    stopped = json.loads((folder / "ecs_task_stopped_1.json").read_text())
    assert stopped.keys() == json.loads((EVENTS / "ecs_task_stopped.json").read_text()).keys()
    assert stopped["detail"]["stoppedReason"] == f"for arn:aws:ecs:eu-west-1:{ACCOUNT}:task/x"
    [timing] = json.loads((folder / "timings.json").read_text())
    assert timing["said"] == "rows came back"
    names = {rule["Name"] for rule in events.list_rules()["Rules"]}
    assert {name for name in names if "record" in name} == set()
    assert [url for url in sqs.list_queues().get("QueueUrls", []) if "mill-record" in url] == []


def test_starts_of_workers_are_recorded(client: Callable[[str], Any]) -> None:
    """They come from the Compute stack's logs, or from all jobs' if it has none."""
    logs, group = client("logs"), {"Type": "AWS::Logs::LogGroup"}
    client("cloudformation").create_stack(
        StackName="dusty-compute", TemplateBody=json.dumps({"Resources": {"Worker": group}})
    )
    [name] = cold_starts("dusty", client, 0)
    logs.create_log_stream(logGroupName=name, logStreamName="worker")
    now = int(time.time() * 1000)
    lines = [{"message": "cold start", "ready_seconds": 61.5}, {"message": "other"}]
    logs.put_log_events(
        logGroupName=name,
        logStreamName="worker",
        logEvents=[{"timestamp": now, "message": json.dumps(line)} for line in lines],
    )
    assert cold_starts("dusty", client, now - 1) == {name: lines[:1]}
    assert cold_starts("dusty", client, now + 60_000) == {name: []}


def test_a_run_that_fails_is_recorded(client: Callable[[str], Any], tmp_path: Path) -> None:
    """It is the one that there is most to learn from."""

    def fail() -> None:
        put_event(client("events"), "STOPPED")
        raise RuntimeError("no row came")

    with pytest.raises(RuntimeError), recording(tmp_path, "mill", client, drain_seconds=3):
        fail()
    assert (tmp_path / "ecs_task_stopped_1.json").exists()
    assert "failed: no row came" in (tmp_path / "timings.json").read_text()


@pytest.mark.parametrize(
    ("found", "left"),
    [
        (f"arn:aws-cn:ecs:cn-north-1:{OWN}:task/x", f"arn:aws-cn:ecs:cn-north-1:{ACCOUNT}:task/x"),
        ("arn:aws:ec2:eu-west-1:123412341234:image/x", f"arn:aws:ec2:eu-west-1:{ACCOUNT}:image/x"),
        (f"cdk-assets-{OWN}-eu-west-1", f"cdk-assets-{ACCOUNT}-eu-west-1"),
        ("123412341234.dkr.ecr.eu-west-1.x/y:1", f"{ACCOUNT}.dkr.ecr.eu-west-1.x/y:1"),
        ("key ASIAABCDEFGHIJKLMNOP.", "key REDACTED."),
        ("Bearer tm_0123456789abcdef_secret", "Bearer REDACTED"),
        (
            "https://b.s3/k?X-Amz-Credential=A%2Fb&X-Amz-Signature=0f&X-Amz-Date=1",
            "https://b.s3/k?X-Amz-Credential=REDACTED&X-Amz-Signature=REDACTED&X-Amz-Date=1",
        ),
        ("role/Admin/jo.doe@corp.example.org", "role/Admin/somebody@example.com"),
        ("10.73.0.12", "192.0.2.1"),
        ("2a05:d018:1:2:3:4:5:6", "2001:db8::1"),
        ("0a:58:0a:f4:02:05", "2001:db8::1"),
        ({"SessionToken": "abc", "tokens": 3}, {"SessionToken": "REDACTED", "tokens": 3}),
        ({OWN: [OWN, ("x", 1.5, None)]}, {ACCOUNT: [ACCOUNT, ["x", 1.5, None]]}),
        (datetime(2026, 1, 2, tzinfo=UTC), "2026-01-02T00:00:00+00:00"),
        # Text that is not a secret is unchanged.
        ("2026-01-23T17:57:58.103Z torch 2.13.0", "2026-01-23T17:57:58.103Z torch 2.13.0"),
        ("c13b4cb40f1f4fe4a2971f76ae5a47ad", "c13b4cb40f1f4fe4a2971f76ae5a47ad"),
    ],
)
def test_nothing_private_is_written(found: Any, left: Any) -> None:
    """Accounts, keys, signatures, people and addresses."""
    assert redact(found, OWN) == left


def test_fixtures_that_are_there_have_nothing_private() -> None:
    """Each event of tests/events is as a recording would be, except AWS's own examples."""
    for path in EVENTS.glob("*_task_*.json"):
        event = json.loads(path.read_text(encoding="utf-8"))
        assert redact(event, ACCOUNT) == event, path.name

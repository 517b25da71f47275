"""Workers are woken when there is work for them, and nothing ever waits for that."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError

from handler.aws.calls import Call
from handler.aws.queues import shard_message
from handler.control.advance import advance
from handler.control.bury import bury
from handler.control.reap import reap
from handler.deployment import Deployment
from handler.errors import AwsError, HandlerError
from handler.moves.wake import wake
from handler.settings import read_settings
from tests.emulators import MODEL, Emulator
from tests.handler.intake.rig import Cloud, lines_of, plenty

SERVICES = json.dumps({MODEL: "mill/mill-demo", "idle": "mill/mill-idle"})


class Ecs:
    """A client of ECS with one service, or one that fails; `asked` are the calls it got."""

    def __init__(self, desired_count: int = 0, failure: Exception | None = None) -> None:
        self.desired_count = desired_count
        self.failure = failure
        self.asked: list[tuple[str, str]] = []

    def describe_services(self, cluster: str, services: list[str]) -> dict[str, Any]:
        """Tell what is wanted."""
        self.asked += [("look", f"{cluster}/{name}") for name in services]
        if self.failure is not None:
            raise self.failure
        return {"services": [{"status": "ACTIVE", "desiredCount": self.desired_count}]}

    def update_service(self, cluster: str, service: str, **wanted: int) -> dict[str, Any]:
        """Want another number."""
        self.asked.append(("wake", f"{cluster}/{service}"))
        self.desired_count = wanted["desiredCount"]
        return {}


def cloud_with(ministack: Emulator, ecs: Ecs, services: str = SERVICES) -> Cloud:
    """Return a deployment whose services are of this ECS."""
    cloud = Cloud.on(ministack, shard_lines="1", services=services)
    cloud.aws.clients = {**cloud.aws.clients, "ecs": ecs}
    return cloud


def rung_for(cloud: Cloud, num_lines: int = 1) -> str:
    """Return the id of a batch whose shards, one a line, have been rung for."""
    batch = cloud.create(lines_of(num_lines), f"input/{time.time_ns()}.jsonl")
    advance(cloud.aws, cloud.deployment, batch.id, plenty)
    return batch.id


def test_shards_that_are_rung_for_wake_a_worker_once(ministack: Emulator) -> None:
    """The second batch finds that one is wanted; other models are not looked at."""
    ecs = Ecs()
    cloud = cloud_with(ministack, ecs)
    rung_for(cloud, num_lines=3)
    assert ecs.asked == [("look", "mill/mill-demo"), ("wake", "mill/mill-demo")]
    rung_for(cloud)
    assert ecs.asked[2:] == [("look", "mill/mill-demo")]
    assert ecs.desired_count == 1


def test_the_reaper_wakes_a_model_once_for_all_its_batches(ministack: Emulator) -> None:
    """Whatever put the workers to sleep too early, waiting shards wake them again."""
    ecs = Ecs(desired_count=1)
    cloud = cloud_with(ministack, ecs)
    batches = [rung_for(cloud) for _ in range(3)]
    ecs.asked, ecs.desired_count = [], 0
    reap(cloud.aws, cloud.deployment, int(time.time()))
    assert ecs.asked == [("look", "mill/mill-demo"), ("wake", "mill/mill-demo")]
    for batch_id in batches:
        cloud.claim(batch_id)
    ecs.asked = []
    reap(cloud.aws, cloud.deployment, int(time.time()))
    assert ecs.asked == []


def test_a_shard_that_is_given_up_wakes_nobody(ministack: Emulator) -> None:
    """Finalize closes it: a worker would find nothing to do."""
    ecs = Ecs(desired_count=1)
    cloud = cloud_with(ministack, ecs)
    batch_id = rung_for(cloud)
    for number in range(cloud.deployment.settings.max_attempts):
        cloud.run(
            cloud.deployment.table.claim(
                batch_id, 0, owner=str(number), now=time.time(), lease_seconds=-1
            )
        )
    ecs.asked = []
    reap(cloud.aws, cloud.deployment, int(time.time()))
    assert [shard.abandoned is None for shard in cloud.shards(batch_id)] == [False]
    assert ecs.asked == []


def test_a_dead_doorbell_that_is_rung_again_wakes_a_worker(ministack: Emulator) -> None:
    """Its receivers may all be gone by then."""
    ecs = Ecs(desired_count=1)
    cloud = cloud_with(ministack, ecs)
    batch_id = rung_for(cloud)
    ecs.asked, ecs.desired_count = [], 0
    cloud.run(bury(cloud.deployment, json.dumps(shard_message(batch_id, 0)), int(time.time())))
    assert ecs.desired_count == 1


@pytest.mark.parametrize(
    "failure",
    [
        ClientError({"Error": {"Code": "AccessDeniedException"}}, "DescribeServices"),
        ClientError({"Error": {"Code": "ThrottlingException"}}, "DescribeServices"),
        ClientError({"Error": {"Code": "ClusterNotFoundException"}}, "DescribeServices"),
        EndpointConnectionError(endpoint_url="https://ecs"),
    ],
    ids=lambda failure: str(failure)[:60],
)
def test_a_worker_that_cannot_be_woken_holds_nothing_up(
    ministack: Emulator, failure: Exception
) -> None:
    """Shards are rung for and batches are looked at as ever."""
    ecs = Ecs(failure=failure)
    cloud = cloud_with(ministack, ecs)
    batch_id = rung_for(cloud, num_lines=3)
    assert cloud.batch(batch_id).shards_rung == 3
    assert cloud.rung_shards() == [0, 1, 2]
    reap(cloud.aws, cloud.deployment, int(time.time()))
    assert cloud.rung_shards() == [0, 1, 2]
    assert len(ecs.asked) == 2


def test_without_services_nothing_is_asked(ministack: Emulator) -> None:
    """Workers that nobody may start are nobody's to wake."""
    ecs = Ecs()
    cloud = cloud_with(ministack, ecs, services="{}")
    rung_for(cloud)
    reap(cloud.aws, cloud.deployment, int(time.time()))
    assert ecs.asked == []


# Without an emulator

DEPLOYMENT = Deployment(
    read_settings(
        {
            "TIDEMILL_TABLE": "t",
            "TIDEMILL_BUCKET": "b",
            "TIDEMILL_CONTROL_QUEUE": "q",
            "TIDEMILL_SERVICES": SERVICES,
        }
    )
)


def calls_of(model: str | None, *answers: dict[str, Any] | HandlerError) -> list[Call]:
    """Return the calls that waking a model makes when AWS answers like this."""
    operation, calls = wake(DEPLOYMENT, model), []
    left = list(answers)
    try:
        call = next(operation)
        while True:
            calls.append(call)
            answer = left.pop(0)
            if isinstance(answer, HandlerError):
                call = operation.throw(answer)
            else:
                call = operation.send(answer)
    except StopIteration:
        return calls


def described(desired_count: int, status: str = "ACTIVE") -> dict[str, Any]:
    """Return how ECS describes a service."""
    return {"services": [{"status": status, "desiredCount": desired_count}]}


@pytest.mark.parametrize("model", [None, "unknown"])
def test_a_model_without_a_service_is_left_alone(model: str | None) -> None:
    """As is a batch whose model is not known yet."""
    assert calls_of(model) == []


def test_one_task_is_asked_for() -> None:
    """In the service of the model, with nothing else changed."""
    look, ask = calls_of(MODEL, described(0), {})
    assert look.arguments == {"cluster": "mill", "services": ["mill-demo"]}
    assert (ask.service, ask.method) == ("ecs", "update_service")
    assert ask.arguments == {"cluster": "mill", "service": "mill-demo", "desiredCount": 1}


@pytest.mark.parametrize(
    "answer",
    [described(1), described(7), described(0, "DRAINING"), {"services": [], "failures": [{}]}],
)
def test_a_service_that_is_awake_or_gone_is_not_changed(answer: dict[str, Any]) -> None:
    """A look is all."""
    assert len(calls_of(MODEL, answer)) == 1


def test_a_refusal_to_change_is_no_failure() -> None:
    """The look may be allowed where the change is not."""
    assert len(calls_of(MODEL, described(0), AwsError("denied"))) == 2

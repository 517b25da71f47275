"""Workers as ECS tasks: the calls, and the handling of the replies."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, cast

import boto3
import pytest
from moto import mock_aws
from pydantic import ValidationError

from tests.handler.fleet.services import Services
from tidemill.batch.fleet import EndKind, FleetPlan, Worker, WorkerStatus
from tidemill.handler.aws.sync import Aws
from tidemill.handler.deployment import Deployment
from tidemill.handler.errors import AwsError
from tidemill.handler.fleet.ecs import EcsLauncher, started_by
from tidemill.handler.fleet.launcher import NoCapacity, StartRefused
from tidemill.handler.fleet.stop import stop_hung_workers
from tidemill.handler.fleet.worker_events import classify_end, describe_end

ARN = "arn:aws:ecs:eu-west-1:1:task-definition/mill-m"
MEANS: dict[str, Any] = {
    "cluster": "mill",
    "task_definition": f"{ARN}:7",
    "capacity_provider": "gpus",
    "subnets": ["subnet-1", "subnet-2"],
    "security_groups": ["sg-1"],
}
PLAN = FleetPlan("org/model-7B:a.b", "ecs", f"{ARN}:7", 3, means=MEANS)
ECS = EcsLauncher()


def test_a_task_is_run_on_the_capacity_provider() -> None:
    """It says whose it is, has its own address in the network, and a token of its number."""
    services = Services()
    arn = services.run(ECS.start(PLAN, 1_800_000_000))
    [call] = services.calls
    arguments = dict(call.arguments)
    token = arguments.pop("clientToken")
    assert token.endswith("-1800000000")
    assert arguments == {
        "cluster": "mill",
        "taskDefinition": f"{ARN}:7",
        "count": 1,
        "capacityProviderStrategy": [{"capacityProvider": "gpus", "weight": 1}],
        "startedBy": "tidemill/org-model-7B-a-b-" + started_by(PLAN.model)[-8:],
        "propagateTags": "TASK_DEFINITION",
        "enableECSManagedTags": True,
        "tags": [{"key": "tidemill:model", "value": "org/model-7B:a.b"}],
        "networkConfiguration": {
            "awsvpcConfiguration": {
                "subnets": ["subnet-1", "subnet-2"],
                "securityGroups": ["sg-1"],
            }
        },
    }
    assert services.run(ECS.list_workers(PLAN)) == [
        Worker(arn, f"{ARN}:7", WorkerStatus.STARTING, 1000)
    ]


@pytest.mark.parametrize(
    ("changes", "network"),
    [
        ({"subnets": [], "security_groups": []}, None),
        ({"security_groups": []}, {"subnets": ["subnet-1", "subnet-2"]}),
        (
            {"subnets": ["s"], "security_groups": [], "assign_public_ip": True},
            {"subnets": ["s"], "assignPublicIp": "ENABLED"},
        ),
    ],
    ids=["of the machine", "without groups", "public"],
)
def test_the_network_is_that_of_the_plan(
    changes: dict[str, Any], network: dict[str, Any] | None
) -> None:
    """ECS refuses one for a task whose network is that of its machine."""
    services = Services()
    services.run(ECS.start(replace(PLAN, means=MEANS | changes), 1))
    configuration = services.calls[0].arguments.get("networkConfiguration")
    assert configuration == (None if network is None else {"awsvpcConfiguration": network})


def test_a_number_runs_one_task() -> None:
    """A call with a lost reply is repeated; another number, or model, is another task."""
    services = Services()
    first = [services.run(ECS.start(PLAN, 1)) for _ in range(3)]
    second = services.run(ECS.start(PLAN, 2))
    other = services.run(ECS.start(replace(PLAN, model="other"), 1))
    assert len({*first, second, other}) == len(services.tasks) == 3


@pytest.mark.parametrize("count", [0, 1, 100, 101, 250])
def test_tasks_are_listed_and_described_by_the_hundred(count: int) -> None:
    """All tasks of the model are listed, and no others."""
    services = Services()
    for number in range(count):
        services.run(ECS.start(PLAN, number))
    services.run(ECS.start(replace(PLAN, model="org/model-7B:a-b"), 1))
    found = services.run(ECS.list_workers(PLAN))
    assert len({worker.id for worker in found}) == len(found) == count


def test_a_task_is_what_ecs_says_of_it() -> None:
    """Stopping tasks are listed until they have ended: they still occupy their machine."""
    services = Services()
    arns = [services.run(ECS.start(PLAN, number)) for number in range(7)]
    words = [
        ("PENDING", "RUNNING"),
        ("ACTIVATING", "RUNNING"),
        ("RUNNING", "RUNNING"),
        ("RUNNING", "STOPPED"),
        ("STOPPING", "STOPPED"),
        ("DEPROVISIONING", "STOPPED"),
        ("STOPPED", "STOPPED"),
    ]
    for arn, (last, desired) in zip(arns, words, strict=True):
        services.tasks[arn] |= {"lastStatus": last, "desiredStatus": desired}
    found = {worker.id: worker.status for worker in services.run(ECS.list_workers(PLAN))}
    starting, running, stopping = (
        WorkerStatus.STARTING,
        WorkerStatus.RUNNING,
        WorkerStatus.STOPPING,
    )
    statuses = [starting, starting, running, stopping, stopping, stopping]
    assert found == dict(zip(arns, statuses, strict=False))


def test_a_task_that_is_forgotten_between_two_looks_is_left_out() -> None:
    """ECS lists what it no longer describes."""
    services = Services()
    services.run(ECS.start(PLAN, 1))
    listing = ECS.list_workers(PLAN)
    call = next(listing)
    while call.method == "list_tasks":
        call = listing.send(services.answer(call))
    with pytest.raises(StopIteration) as ended:
        listing.send({"tasks": [], "failures": [{"reason": "MISSING"}]})
    assert ended.value.value == []


def test_a_task_is_stopped() -> None:
    """It is stopped by its ARN, and listed until it has ended."""
    services = Services()
    services.run(ECS.start(PLAN, 1))
    [worker] = services.run(ECS.list_workers(PLAN))
    services.run(ECS.stop(PLAN, worker))
    assert services.calls[-1].method == "stop_task"
    [stopping] = services.run(ECS.list_workers(PLAN))
    assert stopping == replace(worker, status=WorkerStatus.STOPPING)


def test_a_task_that_hangs_is_stopped_as_a_bad_end() -> None:
    """ECS acts on health checks of services' tasks only."""
    services = Services()
    first, second = (services.run(ECS.start(PLAN, number)) for number in (1, 2))
    for arn, health in ((first, "UNHEALTHY"), (second, "HEALTHY")):
        services.tasks[arn] |= {"lastStatus": "RUNNING", "healthStatus": health}
    services.run(stop_hung_workers(cast("Deployment", None), PLAN))
    found = {worker.id: worker.status for worker in services.run(ECS.list_workers(PLAN))}
    assert found == {first: WorkerStatus.STOPPING, second: WorkerStatus.RUNNING}
    [stopped] = [call for call in services.calls if call.method == "stop_task"]
    reason = stopped.arguments["reason"]
    assert classify_end("UserInitiated", 137, reason) is EndKind.CRASHED
    assert "hung" in describe_end(137, reason)
    services.run(stop_hung_workers(cast("Deployment", None), PLAN))
    assert [call.method for call in services.calls].count("stop_task") == 1


def test_a_shortage_is_reported_as_such() -> None:
    """The error has the reason that ECS gives."""
    with pytest.raises(NoCapacity, match="RESOURCE:GPU"):
        Services(machines=0).run(ECS.start(PLAN, 1))


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("LimitExceededException", NoCapacity),
        ("AccessDeniedException", StartRefused),
        ("ServerException", AwsError),
    ],
)
def test_an_error_is_raised_as_what_helps(code: str, kind: type[Exception]) -> None:
    """A quota frees itself, a missing permission does not, and a fault of AWS decides nothing."""
    with pytest.raises(kind, match=code):
        Services(failure=code).run(ECS.start(PLAN, 1))


def test_means_that_are_wrong_are_named() -> None:
    """An unknown key would be a setting without effect."""
    with pytest.raises(ValidationError, match="subnet_ids"):
        Services().run(ECS.list_workers(replace(PLAN, means=MEANS | {"subnet_ids": []})))


def test_an_emulator_runs_lists_and_stops_tasks() -> None:
    """Moto, which has been written by others."""
    with mock_aws():
        aws = Aws(lambda service, **options: boto3.client(service, "us-east-1", **options))
        ecs, ec2 = aws.clients["ecs"], boto3.client("ec2", "us-east-1")
        ecs.create_cluster(clusterName="mill")
        container = {"name": "worker", "image": "i", "memory": 128}
        made = ecs.register_task_definition(
            family="mill-m", networkMode="awsvpc", containerDefinitions=[container]
        )
        release = made["taskDefinition"]["taskDefinitionArn"]
        machine = boto3.resource("ec2", "us-east-1").create_instances(
            ImageId="ami-12c6146b", MinCount=1, MaxCount=1
        )[0]
        # Loaded here: with it come all of EC2's machines, in a second.
        from moto.ec2.utils import generate_instance_identity_document

        document = json.dumps(generate_instance_identity_document(machine))
        ecs.register_container_instance(cluster="mill", instanceIdentityDocument=document)
        places = {
            "task_definition": release,
            "subnets": [ec2.describe_subnets()["Subnets"][0]["SubnetId"]],
            "security_groups": [ec2.describe_security_groups()["SecurityGroups"][0]["GroupId"]],
        }
        plan = FleetPlan("m", "ecs", release, means=MEANS | places)
        assert aws.run(ECS.list_workers(plan)) == []
        started = [aws.run(ECS.start(plan, number)) for number in (1, 2)]
        found = aws.run(ECS.list_workers(plan))
        assert [worker.id for worker in found] == started
        aws.run(ECS.stop(plan, found[0]))
        assert [worker.id for worker in aws.run(ECS.list_workers(plan))] == started[1:]

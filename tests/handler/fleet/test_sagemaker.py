"""Workers as SageMaker training jobs: the calls, and the handling of the replies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import boto3
import pytest
from moto import mock_aws
from pydantic import ValidationError

from tests.handler.fleet.services import Services
from tidemill.batch.fleet import FleetPlan, Worker, WorkerStatus
from tidemill.handler.aws.sync import Aws
from tidemill.handler.errors import AwsError
from tidemill.handler.fleet.launcher import NoCapacity, NotStarted, StartRefused
from tidemill.handler.fleet.sagemaker import SageMakerLauncher, jobs_prefix, release_of

L4, A10 = "ml.g6.xlarge", "ml.g5.xlarge"
MEANS: dict[str, Any] = {
    "image": "111122223333.dkr.ecr.eu-west-1.amazonaws.com/mill@sha256:" + "0" * 64,
    "role": "arn:aws:iam::111122223333:role/mill-worker",
    "instance_types": [L4, A10],
    "output_uri": "s3://mill-drops/work/sagemaker",
    "entrypoint": ["/usr/bin/tini", "--"],
    "arguments": ["tidemill", "worker", "--exit-when-idle"],
    "environment": {"TIDEMILL_TABLE": "mill"},
    "volume_gib": 100,
    "tags": {"tidemill": "mill", "team": "ml"},
}
PLAN = FleetPlan("org/Model-7B:a.b", "sagemaker", "r:1", 3, means=MEANS)
JOBS = SageMakerLauncher()


def having(**quotas: int) -> Services:
    """Return services with a quota of the first type, or of both."""
    return Services(quotas={L4: quotas.get("l4", 0), A10: quotas.get("a10", 0)})


def test_a_job_is_a_worker_on_managed_spot() -> None:
    """No ports, channels or retries of SageMaker's own; S3 holds what a job would checkpoint."""
    services = having(l4=1)
    name = services.run(JOBS.start(PLAN, 1_800_000_000))
    [call] = services.calls
    assert call.arguments == {
        "TrainingJobName": name,
        "RoleArn": MEANS["role"],
        "AlgorithmSpecification": {
            "TrainingImage": MEANS["image"],
            "TrainingInputMode": "File",
            "ContainerEntrypoint": ["/usr/bin/tini", "--"],
            "ContainerArguments": ["tidemill", "worker", "--exit-when-idle"],
        },
        "OutputDataConfig": {
            "S3OutputPath": "s3://mill-drops/work/sagemaker",
            "CompressionType": "NONE",
        },
        "ResourceConfig": {"InstanceType": L4, "InstanceCount": 1, "VolumeSizeInGB": 100},
        "StoppingCondition": {"MaxRuntimeInSeconds": 86_400, "MaxWaitTimeInSeconds": 172_800},
        "EnableManagedSpotTraining": True,
        "Environment": {"TIDEMILL_TABLE": "mill"},
        "Tags": [
            {"Key": "tidemill:model", "Value": "org/Model-7B:a.b"},
            {"Key": "tidemill", "Value": "mill"},
            {"Key": "team", "Value": "ml"},
        ],
    }
    assert name.startswith("tidemill-org-Model-7B-a-b-")
    assert name.endswith("-1800000000")
    assert services.run(JOBS.list_workers(PLAN)) == [
        Worker(name, "r:1", WorkerStatus.RUNNING, 1000)
    ]


def test_a_job_may_be_on_demand_and_in_a_network() -> None:
    """SageMaker refuses a time to wait without Spot, and subnets without groups."""
    services = having(l4=1)
    own = {"spot": False, "subnets": ["subnet-1"], "security_groups": ["sg-1"]}
    services.run(JOBS.start(replace(PLAN, means=MEANS | own), 1))
    request = services.calls[0].arguments
    assert request["StoppingCondition"] == {"MaxRuntimeInSeconds": 86_400}
    assert request["EnableManagedSpotTraining"] is False
    assert request["VpcConfig"] == {"Subnets": ["subnet-1"], "SecurityGroupIds": ["sg-1"]}


@pytest.mark.parametrize("model", ["m", "x" * 300, "Qwen/Qwen3.5-122B_It", "模型(*)", "-"])
def test_any_model_has_a_name_that_sagemaker_takes(model: str) -> None:
    """It has at most 63 letters, digits and hyphens, for numbers of the next two centuries."""
    plan = replace(PLAN, model=model)
    services = having(l4=2)
    name = services.run(JOBS.start(plan, 9_999_999_999))
    assert name in services.jobs
    assert release_of(plan, name) == "r:1"


@pytest.mark.parametrize(
    ("secondary", "status"),
    [
        ("Starting", WorkerStatus.STARTING),
        ("Pending", WorkerStatus.STARTING),
        ("Interrupted", WorkerStatus.STARTING),
        ("Training", WorkerStatus.RUNNING),
    ],
)
def test_a_job_without_a_machine_is_still_starting(secondary: str, status: WorkerStatus) -> None:
    """A job in progress may wait for a machine, perhaps for days: it replaces no worker."""
    services = having(l4=1)
    name = services.run(JOBS.start(PLAN, 1))
    services.jobs[name]["SecondaryStatus"] = secondary
    assert [worker.status for worker in services.run(JOBS.list_workers(PLAN))] == [status]
    services.run(JOBS.stop(PLAN, Worker(name, "r:1")))
    assert services.run(JOBS.list_workers(PLAN))[0].status is WorkerStatus.STOPPING


def test_a_number_makes_one_job() -> None:
    """A name that exists is the requested job."""
    services = having(l4=9)
    names = {services.run(JOBS.start(PLAN, 1)) for _ in range(3)}
    assert names == set(services.jobs)
    services.run(JOBS.start(PLAN, 2))
    assert len(services.jobs) == 2


def test_fleets_and_deployments_know_their_own_jobs() -> None:
    """Jobs of another model, or in another bucket, are not listed."""
    services = having(l4=9)
    mine = services.run(JOBS.start(PLAN, 1))
    near = replace(PLAN, model="org/Model-7B:a-b")
    other = replace(PLAN, means=MEANS | {"output_uri": "s3://other/work/sagemaker"})
    for plan in (near, other):
        services.run(JOBS.start(plan, 1))
    assert [worker.id for worker in services.run(JOBS.list_workers(PLAN))] == [mine]
    assert len({jobs_prefix(plan) for plan in (PLAN, near, other)}) == 3


def test_a_job_of_another_release_is_known_as_such() -> None:
    """Its name shows that its release is not the plan's; its actual release does not matter."""
    services = having(l4=9)
    services.run(JOBS.start(PLAN, 1))
    new = replace(PLAN, release="r:2")
    services.run(JOBS.start(new, 2))
    releases = [worker.release for worker in services.run(JOBS.list_workers(new))]
    assert releases[1] == "r:2"
    assert releases[0] not in {"r:1", "r:2", ""}
    assert release_of(PLAN, "a-foreign-job") == ""


@pytest.mark.parametrize("count", [0, 100, 101, 250])
def test_jobs_are_listed_page_by_page(count: int) -> None:
    """Stopping jobs are listed until they have ended."""
    services = having(l4=300)
    names = [services.run(JOBS.start(PLAN, number)) for number in range(count)]
    for name in names[:3]:
        services.run(JOBS.stop(PLAN, Worker(name, "r:1")))
    found = services.run(JOBS.list_workers(PLAN))
    assert {worker.id for worker in found} == set(names)
    stopping = {worker.id for worker in found if worker.status is WorkerStatus.STOPPING}
    assert stopping == set(names[:3])


def test_the_next_type_is_tried_where_a_quota_is_used_up() -> None:
    """Quotas of ml instances begin at 0; when all are used up no machine can be had."""
    services = having(a10=1)
    services.run(JOBS.start(PLAN, 1))
    assert [job["kind"] for job in services.jobs.values()] == [A10]
    with pytest.raises(NoCapacity, match=f"limit for {A10}"):
        services.run(JOBS.start(PLAN, 2))


@pytest.mark.parametrize(
    ("code", "kind"),
    [("ThrottlingException", NotStarted), ("AccessDeniedException", StartRefused)],
)
def test_a_temporary_refusal_is_not_an_error(code: str, kind: type[Exception]) -> None:
    """Throttling passes by itself, a missing permission does not."""
    with pytest.raises(kind, match=code):
        Services(failure=code).run(JOBS.start(PLAN, 1))


def test_a_job_that_has_ended_needs_no_stop() -> None:
    """It ended between the list and the stop; any other refusal is raised."""
    services = having(l4=1)
    worker = Worker(services.run(JOBS.start(PLAN, 1)), "r:1")
    services.run(JOBS.stop(PLAN, worker))
    services.run(JOBS.stop(PLAN, worker))
    services.failure = "AccessDeniedException"
    with pytest.raises(AwsError, match="AccessDenied"):
        services.run(JOBS.stop(PLAN, worker))


@pytest.mark.parametrize(
    "changes",
    [
        {"instance_types": []},
        {"environment": {"A": "x" * 513}},
        {"environment": {f"A{number}": "" for number in range(101)}},
        {"max_run_seconds": 29 * 86_400},
        {"ports": [8080]},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_means_that_sagemaker_would_refuse_are_named(changes: dict[str, Any]) -> None:
    """They are reported before any AWS call."""
    with pytest.raises(ValidationError, match=next(iter(changes))):
        having(l4=1).run(JOBS.start(replace(PLAN, means=MEANS | changes), 1))


def test_an_emulator_makes_and_lists_jobs() -> None:
    """Moto, which has been written by others; its jobs end at once, and cannot be stopped."""
    with mock_aws():
        aws = Aws(lambda service, **options: boto3.client(service, "us-east-1", **options))
        name = aws.run(JOBS.start(PLAN, 1))
        assert aws.run(JOBS.list_workers(PLAN)) == []
        made = aws.clients["sagemaker"].describe_training_job(TrainingJobName=name)
        assert made["AlgorithmSpecification"]["ContainerArguments"] == MEANS["arguments"]
        assert made["EnableManagedSpotTraining"] is True

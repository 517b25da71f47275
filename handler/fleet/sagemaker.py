"""SageMaker launcher: workers as training jobs, on managed Spot, scaled to zero when idle."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field

from tidemill.batch.fleet import FleetPlan, Worker, WorkerStatus

from ..aws.calls import Call, Operation
from ..errors import AwsError
from .names import digest, plain_name, tag_value
from .refusals import classify_refusal

_PAGE = 100
_DAY_SECONDS = 24 * 3600
_EnvironmentValue = Annotated[str, Field(max_length=512)]
_THERE = "ResourceInUse"
_NO_QUOTA = "ResourceLimitExceeded"
_OVER = "ValidationException"
_STATUS: Final = {"InProgress": WorkerStatus.RUNNING, "Stopping": WorkerStatus.STOPPING}
# Secondary states of a job in progress whose container does not run yet.
_BEFORE_START: Final = frozenset(
    {
        "Downloading",
        "DownloadingTrainingImage",
        "Interrupted",
        "LaunchingMLInstances",
        "Pending",
        "PreparingTrainingStack",
        "Restarting",
        "Starting",
    }
)
_NAME = re.compile(r"tidemill-[A-Za-z0-9-]+-(?P<release>[0-9a-f]{8})-[0-9]+")


class SageMakerConfig(BaseModel):
    """Launch configuration of SageMaker training jobs.

    `instance_types` are tried in order if a quota leaves no room. `output_uri` is in the
    deployment's bucket: SageMaker requires one, and writes a job's leftovers there.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    image: str
    role: str
    instance_types: Annotated[tuple[str, ...], Field(min_length=1)]
    output_uri: str
    entrypoint: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    environment: Annotated[dict[str, _EnvironmentValue], Field(max_length=100)] = Field(
        default_factory=dict
    )
    volume_gib: int = 30
    spot: bool = True
    subnets: tuple[str, ...] = ()
    security_groups: tuple[str, ...] = ()
    tags: dict[str, str] = Field(default_factory=dict)
    max_run_seconds: Annotated[int, Field(le=28 * _DAY_SECONDS)] = _DAY_SECONDS


def jobs_prefix(plan: FleetPlan) -> str:
    """Return the prefix of a fleet's job names, unique in the account."""
    config = SageMakerConfig.model_validate(plan.means)
    return f"tidemill-{plain_name(plan.model)}-{digest(config.output_uri, 3)}-"


def release_of(plan: FleetPlan, job_name: str) -> str:
    """Return the release of a fleet's job: the plan's own, or the digest of another release."""
    found = _NAME.fullmatch(job_name)
    mark = found["release"] if found else ""
    return plan.release if mark == _mark(plan.release) else mark


class SageMakerLauncher:
    """Launches workers as training jobs; a `launcher.Launcher`."""

    def list_workers(self, plan: FleetPlan) -> Operation[list[Worker]]:
        """List the jobs that have not ended."""
        workers: list[Worker] = []
        for name, status in _STATUS.items():
            arguments: dict[str, Any] = {
                "NameContains": jobs_prefix(plan),
                "StatusEquals": name,
                "MaxResults": _PAGE,
            }
            while True:
                response = yield Call("sagemaker", "list_training_jobs", arguments)
                workers += [
                    _worker_of(plan, job, status) for job in response["TrainingJobSummaries"]
                ]
                if not (token := response.get("NextToken")):
                    break
                arguments = {**arguments, "NextToken": token}
        return workers

    def start(self, plan: FleetPlan, number: int) -> Operation[str]:
        """Create one job; its name contains `number`, so that a retry creates no second one."""
        config = SageMakerConfig.model_validate(plan.means)
        name = f"{jobs_prefix(plan)}{_mark(plan.release)}-{number}"
        for instance_type in config.instance_types:
            try:
                yield Call(
                    "sagemaker", "create_training_job", _job(plan, config, name, instance_type)
                )
            except AwsError as exc:
                if exc.aws_code == _THERE:
                    return name
                if exc.aws_code == _NO_QUOTA and instance_type != config.instance_types[-1]:
                    continue
                if refusal := classify_refusal(str(exc), exc.aws_code):
                    raise refusal from exc
                raise
            break
        return name

    def stop(self, plan: FleetPlan, worker: Worker) -> Operation[None]:  # noqa: ARG002 - the Protocol's
        """Stop a job: SIGTERM, and two minutes later SIGKILL. Ended jobs are left alone."""
        try:
            yield Call("sagemaker", "stop_training_job", {"TrainingJobName": worker.id})
        except AwsError as exc:
            if exc.aws_code != _OVER:
                raise


def _job(plan: FleetPlan, config: SageMakerConfig, name: str, instance_type: str) -> dict[str, Any]:
    algorithm: dict[str, Any] = {"TrainingImage": config.image, "TrainingInputMode": "File"}
    if config.entrypoint:
        algorithm["ContainerEntrypoint"] = list(config.entrypoint)
    if config.arguments:
        algorithm["ContainerArguments"] = list(config.arguments)
    stopping = {"MaxRuntimeInSeconds": config.max_run_seconds}
    if config.spot:  # includes the wait for a machine
        stopping["MaxWaitTimeInSeconds"] = min(
            28 * _DAY_SECONDS, config.max_run_seconds + _DAY_SECONDS
        )
    tags = {"tidemill:model": tag_value(plan.model), **config.tags}
    network = {"Subnets": list(config.subnets), "SecurityGroupIds": list(config.security_groups)}
    return {
        "TrainingJobName": name,
        "RoleArn": config.role,
        "AlgorithmSpecification": algorithm,
        # Uncompressed, so that the empty folders of a worker become no object.
        "OutputDataConfig": {"S3OutputPath": config.output_uri, "CompressionType": "NONE"},
        "ResourceConfig": {
            "InstanceType": instance_type,
            "InstanceCount": 1,
            "VolumeSizeInGB": config.volume_gib,
        },
        "StoppingCondition": stopping,
        "EnableManagedSpotTraining": config.spot,
        "Environment": dict(config.environment),
        "Tags": [{"Key": key, "Value": value} for key, value in tags.items()],
        **({"VpcConfig": network} if config.subnets else {}),
    }


def _worker_of(plan: FleetPlan, job: Mapping[str, Any], status: WorkerStatus) -> Worker:
    name = job["TrainingJobName"]
    if status is WorkerStatus.RUNNING and job.get("SecondaryStatus") in _BEFORE_START:
        status = WorkerStatus.STARTING
    return Worker(name, release_of(plan, name), status, int(job["CreationTime"].timestamp()))


def _mark(release: str) -> str:
    return digest(release, 4)

"""SageMaker training jobs of one model's workers, with their role."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any, Final

from aws_cdk import Stack
from aws_cdk import aws_iam as iam
from constructs import Construct

from infra import permissions
from infra.api.environment import estimate_value
from infra.compute.network import WorkerNetwork
from infra.config import ConfigRefused, Model
from infra.data.stack import DataStack
from infra.image import WorkerImage
from infra.permissions import allow, service_principal
from infra.worker_flags import worker_flags

_MAX_VARIABLE, _MAX_ARGUMENT, _MAX_ARGUMENTS = 512, 256, 100
# The default limit of an account; a worker that is stopped loses nothing.
_MAX_RUN_SECONDS: Final = 5 * 24 * 3600
# At most the smallest instance-store disk of the types, which SageMaker uses instead.
_VOLUME_GIB: Final = 100
# The entry point looks for the disk of that size.
_ENTRYPOINT: Final = ("python", "-m", "tidemill.cli.scratch")
# SageMaker writes the logs of all jobs of an account to this group.
_LOG_GROUP: Final = "/aws/sagemaker/TrainingJobs"


class WorkerJobs(Construct):
    """The parameters of training jobs that run `tidemill worker` of one model.

    `means` contains the settings for the launcher in `handler/fleet/sagemaker.py`, and `release`
    changes whenever any of them does. `network` is None for SageMaker's own.
    """

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        data: DataStack,
        network: WorkerNetwork | None,
        image: WorkerImage,
        model: Model,
    ) -> None:
        super().__init__(scope, construct_id)
        self._data, self._model = data, model
        self.role = self._add_role(network, image)
        arguments = ["worker", *worker_flags(model)]
        environment = self._environment()
        self._check(arguments, environment)
        self.means: dict[str, Any] = {
            "image": image.uri,
            "role": self.role.role_arn,
            "instance_types": [f"ml.{name}" for name in model.machines],
            "output_uri": f"s3://{data.bucket.bucket_name}/work/sagemaker/{model.slug}",
            "entrypoint": list(_ENTRYPOINT),
            "arguments": arguments,
            "environment": environment,
            "volume_gib": _VOLUME_GIB,
            "spot": data.config.capacity_of(model) == "spot",
            "max_run_seconds": _MAX_RUN_SECONDS,
            "tags": {"tidemill": data.config.name, **data.config.tags},
        }
        if network is not None:
            self.means |= {
                "subnets": [subnet.subnet_id for subnet in network.subnets],
                "security_groups": [group.security_group_id for group in network.groups],
            }

    @property
    def release(self) -> str:
        """A name that covers all settings of new jobs, except tags, which replace no worker."""
        made = {name: value for name, value in self.means.items() if name != "tags"}
        text = json.dumps(Stack.of(self).resolve(made), sort_keys=True)
        return sha256(text.encode()).hexdigest()[:16]

    def _environment(self) -> dict[str, str]:
        return {
            **self._data.worker_settings(self._model),
            "AWS_DEFAULT_REGION": Stack.of(self).region,
            "POWERTOOLS_SERVICE_NAME": "worker",
            # The image does not set it.
            "NVIDIA_VISIBLE_DEVICES": "all",
        }

    def _check(self, arguments: list[str], environment: Mapping[str, str]) -> None:
        """Raise ConfigRefused if a limit of SageMaker jobs is exceeded."""
        name = self._model.name
        stack = self._data
        for variable, value in stack.resolve(dict(environment)).items():
            if len(estimate_value(value, variable, stack.stack_name)) > _MAX_VARIABLE:
                raise ConfigRefused(
                    f"{name} has too many aliases or adapters for a SageMaker job: the variable "
                    f"{variable} is limited to {_MAX_VARIABLE} characters. Use fewer or shorter "
                    "names, or another compute."
                )
        if long := [word for word in arguments if len(word) > _MAX_ARGUMENT]:
            raise ConfigRefused(
                f"{name}: the argument {long[0][:40]}… exceeds the {_MAX_ARGUMENT} characters that "
                "SageMaker allows."
            )
        if len(arguments) > _MAX_ARGUMENTS:
            raise ConfigRefused(
                f"{name} has {len(arguments)} arguments, and a SageMaker job is limited to "
                f"{_MAX_ARGUMENTS}: use fewer args, aliases or adapters."
            )

    def _add_role(self, network: WorkerNetwork | None, image: WorkerImage) -> iam.Role:
        """Add the role of a job, which its container and SageMaker share."""
        stack = Stack.of(self)
        role = iam.Role(self, "Role", assumed_by=service_principal(stack, "sagemaker"))
        statements = [
            *permissions.worker_statements(self._data, self._model),
            *_log_statements(stack),
        ]
        if network is not None:
            # In a VPC shared by another account, ARNs contain that account, unknown here.
            is_existing = self._data.config.network.kind == "existing"
            statements += _vpc_statements(stack, network, "*" if is_existing else stack.account)
        for statement in statements:
            role.add_to_policy(statement)
        image.grant_pull(role)
        return role


def run_jobs(stack: Stack, jobs: Sequence[WorkerJobs]) -> list[iam.PolicyStatement]:
    """Return the permissions to start, list and stop workers as training jobs."""
    ours = stack.format_arn(
        service="sagemaker", resource="training-job", resource_name="tidemill-*"
    )
    return [
        allow(
            [
                "sagemaker:CreateTrainingJob",
                "sagemaker:AddTags",
                "sagemaker:StopTrainingJob",
            ],
            [ours],
        ),
        # ListTrainingJobs does not support resources.
        allow(["sagemaker:ListTrainingJobs"], ["*"]),
        allow(
            ["iam:PassRole"],
            [job.role.role_arn for job in jobs],
            {"StringEquals": {"iam:PassedToService": "sagemaker.amazonaws.com"}},
        ),
    ]


def _log_statements(stack: Stack) -> list[iam.PolicyStatement]:
    group = f"arn:{stack.partition}:logs:{stack.region}:{stack.account}:log-group:{_LOG_GROUP}"
    metrics = allow(
        ["cloudwatch:PutMetricData"],
        ["*"],
        {"StringEquals": {"cloudwatch:namespace": _LOG_GROUP}},
    )
    streams = ["logs:CreateLogStream", "logs:DescribeLogStreams", "logs:PutLogEvents"]
    return [
        allow(["logs:CreateLogGroup", "logs:DescribeLogStreams"], [group]),
        allow(streams, [f"{group}:log-stream:*"]),
        metrics,
    ]


def _vpc_statements(stack: Stack, network: WorkerNetwork, owner: str) -> list[iam.PolicyStatement]:
    """Return the permissions with which SageMaker attaches a job to a network of an account."""

    def arn(resource: str, name: str, account: str = owner) -> str:
        return stack.format_arn(
            service="ec2", account=account, resource=resource, resource_name=name
        )

    interfaces = arn("network-interface", "*", stack.account)
    own = {"ArnEquals": {"ec2:Vpc": arn("vpc", network.vpc.vpc_id)}}
    return [
        allow(
            ["ec2:CreateNetworkInterface"],
            [
                interfaces,
                *(arn("subnet", subnet.subnet_id) for subnet in network.subnets),
                *(arn("security-group", group.security_group_id) for group in network.groups),
            ],
        ),
        allow(
            [
                "ec2:CreateNetworkInterfacePermission",
                "ec2:DeleteNetworkInterface",
                "ec2:DeleteNetworkInterfacePermission",
            ],
            [interfaces],
            own,
        ),
        # Describe actions do not support resources.
        allow(
            [
                "ec2:DescribeDhcpOptions",
                "ec2:DescribeNetworkInterfaces",
                "ec2:DescribeSecurityGroups",
                "ec2:DescribeSubnets",
                "ec2:DescribeVpcs",
            ],
            ["*"],
        ),
    ]

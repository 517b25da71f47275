"""The Compute stack: a network, a cluster, and the launch configuration of each model's workers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aws_cdk import ArnFormat, Stack
from aws_cdk import aws_ecs as ecs
from aws_cdk import aws_iam as iam
from constructs import Construct

from infra.api.stack import ApiStack
from infra.compute.capacity import CapacityProviders
from infra.compute.network import WorkerNetwork
from infra.compute.worker import WorkerTask
from infra.compute.worker_events import WorkerEventRules
from infra.data.stack import DataStack
from infra.fleets import Fleet, FleetAlarms, LaunchPolicies, policy_chunks
from infra.image import WorkerImage
from infra.permissions import allow
from infra.pip_target import ROOT


def run_tasks(cluster: ecs.ICluster, tasks: Sequence[WorkerTask]) -> list[iam.PolicyStatement]:
    """Return the permissions to start, list and stop workers as tasks of one cluster."""
    stack = Stack.of(cluster)
    in_cluster = {"ArnEquals": {"ecs:cluster": cluster.cluster_arn}}
    running = stack.format_arn(
        service="ecs", resource="task", resource_name=f"{cluster.cluster_name}/*"
    )
    families = [
        stack.format_arn(
            service="ecs", resource="task-definition", resource_name=f"{task.task.family}:*"
        )
        for task in tasks
    ]
    return [
        allow(["ecs:RunTask"], families, in_cluster),
        allow(["ecs:TagResource"], [running], {"StringEquals": {"ecs:CreateAction": "RunTask"}}),
        # ListTasks does not support resources.
        allow(["ecs:ListTasks"], ["*"], in_cluster),
        allow(["ecs:DescribeTasks", "ecs:StopTask"], [running], in_cluster),
        allow(
            ["iam:PassRole"],
            [role.role_arn for task in tasks for role in (task.role, task.execution_role)],
            {"StringEquals": {"iam:PassedToService": "ecs-tasks.amazonaws.com"}},
        ),
        # To read the last error of an ended worker.
        allow(
            ["logs:GetLogEvents"],
            [
                stack.format_arn(
                    service="logs",
                    resource="log-group",
                    resource_name=f"{task.logs.log_group_name}:log-stream:*",
                    arn_format=ArnFormat.COLON_RESOURCE_NAME,
                )
                for task in tasks
            ],
        ),
    ]


class ComputeStack(Stack):
    """Workers as ECS tasks: none, until a Lambda of the Api stack starts some.

    Their image is built from the folder `image`, unless the configuration names one.
    """

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        data: DataStack,
        api: ApiStack,
        image: Path = ROOT,
        **stack: Any,
    ) -> None:
        super().__init__(scope, construct_id, **stack)
        config = data.config
        network = WorkerNetwork(self, "Network", config=config)
        cluster = ecs.Cluster(
            self,
            "Cluster",
            vpc=network.vpc,
            cluster_name=config.name,
            # Workers emit their own metrics, and the reaper their number.
            container_insights_v2=ecs.ContainerInsights.DISABLED,
        )
        machines = CapacityProviders(
            self, "Machines", cluster=cluster, network=network, config=config
        )
        pulled = WorkerImage(self, "Image", existing=config.image, folder=image)
        tasks = []
        for model in config.models:
            task = WorkerTask(
                self,
                f"Worker-{model.slug}",
                data=data,
                cluster=cluster,
                network=network,
                machines=machines,
                image=pulled,
                model=model,
            )
            Fleet(
                task,
                "Fleet",
                config=config,
                model=model,
                launcher="ecs",
                release=task.task.task_definition_arn,
                means=task.means,
            )
            FleetAlarms(task, "Alarms", data=data, model=model)
            tasks.append(task)
        LaunchPolicies(
            self,
            "Launching",
            roles=api.launcher_roles,
            policies=[run_tasks(cluster, some) for some in policy_chunks(tasks)],
        )
        in_cluster = {"clusterArn": [cluster.cluster_arn]}
        WorkerEventRules(
            self,
            "Ends",
            data=data,
            source="aws.ecs",
            detail_of={
                "ECS Task State Change": in_cluster | {"lastStatus": ["STOPPED"]},
                "ECS Container Instance State Change": in_cluster | {"status": ["DRAINING"]},
            },
        )

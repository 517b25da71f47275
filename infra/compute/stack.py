"""The Compute stack: a network, a cluster, and what the workers of each model are started from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aws_cdk import Stack
from aws_cdk import aws_ecs as ecs
from constructs import Construct

from infra.api.stack import ApiStack
from infra.compute.capacity import CapacityProviders
from infra.compute.launch_permissions import run_tasks
from infra.compute.network import WorkerNetwork
from infra.compute.worker import WorkerTask
from infra.compute.worker_events import WorkerEventRules
from infra.data.stack import DataStack
from infra.fleets import Fleet, FleetAlarms, LaunchPolicies, policy_chunks
from infra.image import WorkerImage
from infra.pip_target import ROOT


class ComputeStack(Stack):
    """Workers as tasks of ECS: none, until a Lambda of the Api stack starts some.

    Their image is built from `image`, a folder, unless the configuration names one.
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
            # Workers tell what they do, and the reaper how many there are.
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

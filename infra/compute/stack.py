"""The Compute stack: a network, a cluster, and a service for each model."""

from __future__ import annotations

from typing import Any

from aws_cdk import Duration, Stack
from aws_cdk import aws_cloudwatch as cloudwatch
from aws_cdk import aws_ecr as ecr
from aws_cdk import aws_ecs as ecs
from constructs import Construct

from handler.batch.window import window_seconds
from handler.metrics import NAMESPACE
from infra.alarms import add_alarm
from infra.compute.capacity import Machines
from infra.compute.ends import BadEnds
from infra.compute.network import WorkerNetwork
from infra.compute.scaling import backlog
from infra.compute.worker import WorkerService
from infra.data.stack import DataStack

_MINUTE = Duration.minutes(1)
_NO_WORKER_MINUTES = 20


class ComputeStack(Stack):
    """Workers on ECS, from none to as many as each model may have.

    `image` is theirs unless the configuration names one.
    """

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        data: DataStack,
        image: ecs.ContainerImage,
        **stack: Any,
    ) -> None:
        super().__init__(scope, construct_id, **stack)
        config = data.config
        network = WorkerNetwork(self, "Network", network=config.network)
        cluster = ecs.Cluster(
            self,
            "Cluster",
            vpc=network.vpc,
            cluster_name=config.name,
            # Which counts the tasks that run.
            container_insights_v2=ecs.ContainerInsights.ENABLED,
        )
        machines = Machines(self, "Machines", cluster=cluster, network=network, config=config)
        if config.image:
            image = self._ready_image(config.image)
        self.workers = {
            model.name: WorkerService(
                self,
                f"Worker-{model.slug}",
                data=data,
                cluster=cluster,
                network=network,
                machines=machines,
                image=image,
                model=model,
            )
            for model in config.models
        }
        self.running = {name: worker.running_tasks for name, worker in self.workers.items()}
        BadEnds(self, "BadEnds", cluster=cluster, topic=data.topic)
        for worker in self.workers.values():
            self._add_alarms(data, worker)

    def _ready_image(self, url: str) -> ecs.ContainerImage:
        """Return an image that somebody has put into ECR; tasks get the right to pull it."""
        registry, _, named = url.partition("/")
        account, region = registry.split(".")[0], registry.split(".")[3]
        name, _, digest = named.partition("@")
        name, _, tag = name.partition(":")
        arn = f"arn:{self.partition}:ecr:{region}:{account}:repository/{name}"
        repository = ecr.Repository.from_repository_attributes(
            self, "Image", repository_arn=arn, repository_name=name
        )
        return ecs.ContainerImage.from_ecr_repository(repository, tag or digest)

    def _add_alarms(self, data: DataStack, worker: WorkerService) -> None:
        queue = data.doorbells.work[worker.model.name]
        add_alarm(
            worker,
            "NoWorker",
            topic=data.topic,
            metric=cloudwatch.MathExpression(
                # Where no task runs none is counted, which IF takes for 0.
                expression="1 - IF(shards > 0, tasks, 1)",
                label="no task for shards",
                period=_MINUTE,
                using_metrics={"tasks": self.running[worker.model.name], "shards": backlog(queue)},
            ),
            above=0,
            periods=_NO_WORKER_MINUTES,
            description=f"Shards of {worker.model.name} wait and no worker runs.",
        )
        add_alarm(
            worker,
            "OldestMessage",
            topic=data.topic,
            metric=queue.metric_approximate_age_of_oldest_message(
                period=_MINUTE, statistic="Maximum"
            ),
            above=window_seconds(data.config.windows.default, param="default") / 4,
            periods=15,
            description=f"A shard of {worker.model.name} has waited for a quarter of a window.",
        )
        add_alarm(
            worker,
            "LeasesLost",
            topic=data.topic,
            metric=cloudwatch.Metric(
                namespace=NAMESPACE,
                metric_name="LeasesLost",
                dimensions_map={"service": "worker", "model": worker.model.name},
                period=Duration.minutes(5),
                statistic="Sum",
            ),
            above=5,
            periods=3,
            description=f"Workers of {worker.model.name} lose their leases again and again.",
        )

"""ECS task definition of one model's workers, with its roles."""

from __future__ import annotations

from typing import Any

from aws_cdk import Duration, Stack
from aws_cdk import aws_ecs as ecs
from aws_cdk import aws_iam as iam
from constructs import Construct

from infra import permissions
from infra.compute.capacity import CapacityProviders
from infra.compute.network import WorkerNetwork
from infra.config import Model
from infra.data.stack import DataStack
from infra.gpus import GPUS
from infra.image import WorkerImage
from infra.monitoring import log_group
from infra.permissions import service_principal
from infra.worker_flags import worker_flags

# ECS's maximum; a worker needs half of it.
STOP_SECONDS = 120
# As in the image: container/Dockerfile.
_USER = "10001:10001"
_SHARED_MEMORY_MIB = 1024
_CACHE, _SCRATCH, _SHARED = "/var/cache/tidemill", "/tmp", "/dev/shm"  # noqa: S108 - task volumes
_HEALTH_FILE = f"{_SCRATCH}/tidemill-health"
_LOG_PREFIX = "worker"


class WorkerTask(Construct):
    """The task definition that runs `tidemill worker` of one model; nothing runs by itself.

    `task` is its definition, a new revision of which is a new release, and `means` contains the
    settings for the launcher in `handler.fleet.ecs`.
    """

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        data: DataStack,
        cluster: ecs.ICluster,
        network: WorkerNetwork,
        machines: CapacityProviders,
        image: WorkerImage,
        model: Model,
    ) -> None:
        super().__init__(scope, construct_id)
        self._data, self._network, self._model = data, network, model
        capacity = machines.add(self, model)
        self.logs = log_group(self, "Logs", days=data.config.retention.log_days, key=data.key)
        self.role, self.execution_role = self._add_roles(image)
        self.task = self._add_task(image, capacity.compatibility)
        self.means: dict[str, Any] = {
            "cluster": cluster.cluster_arn,
            "task_definition": self.task.task_definition_arn,
            "capacity_provider": capacity.provider,
            "subnets": [subnet.subnet_id for subnet in network.subnets],
            "security_groups": [group.security_group_id for group in network.groups],
            "log_group": self.logs.log_group_name,
            "log_prefix": _LOG_PREFIX,
        }

    def _add_roles(self, image: WorkerImage) -> tuple[iam.Role, iam.Role]:
        """Add the task role, and the execution role that pulls the image and ships logs."""
        stack = Stack.of(self)
        role = iam.Role(self, "Role", assumed_by=service_principal(stack, "ecs-tasks"))
        for statement in permissions.worker_statements(self._data, self._model):
            role.add_to_policy(statement)
        execution = iam.Role(
            self, "ExecutionRole", assumed_by=service_principal(stack, "ecs-tasks")
        )
        image.grant_pull(execution)
        self.logs.grant_write(execution)
        return role, execution

    def _add_task(self, image: WorkerImage, compatibility: ecs.Compatibility) -> ecs.TaskDefinition:
        model, config = self._model, self._data.config
        gpu, count = GPUS[model.gpu], model.gpus_per_worker
        is_managed = compatibility is ecs.Compatibility.MANAGED_INSTANCES
        task = ecs.TaskDefinition(
            self,
            "Task",
            family=config.fleet_name(model),
            compatibility=compatibility,
            network_mode=ecs.NetworkMode.AWS_VPC,
            cpu=str(gpu.vcpus * count * 1024),
            memory_mib=str(model.worker_gib * 1024),
            task_role=self.role,
            execution_role=self.execution_role.without_policy_updates(),
        )
        container = task.add_container(
            "worker",
            image=image.for_ecs(),
            command=["worker", *worker_flags(model)],
            environment={
                **self._data.worker_settings(model),
                **self._network.environment,
                # ECS itself sets this for some kinds of tasks only.
                "AWS_DEFAULT_REGION": Stack.of(self).region,
                "POWERTOOLS_SERVICE_NAME": "worker",
                "TIDEMILL_HEALTH_FILE": _HEALTH_FILE,
                "TIDEMILL_WEIGHTS_CACHE": f"{_CACHE}/weights",
            },
            # The container's limit as well: the engine reads that one, not its task's.
            memory_limit_mib=model.worker_gib * 1024,
            gpu_count=count,
            user=_USER,
            readonly_root_filesystem=True,
            linux_parameters=self._linux(
                shared_memory_mib=None if count == 1 or is_managed else _SHARED_MEMORY_MIB
            ),
            stop_timeout=Duration.seconds(STOP_SECONDS),
            health_check=ecs.HealthCheck(
                command=["CMD", "python", "-m", "tidemill.cli.health"],
                interval=Duration.seconds(30),
                timeout=Duration.seconds(10),
                retries=3,
                start_period=Duration.seconds(120),
            ),
            logging=ecs.LogDrivers.aws_logs(stream_prefix=_LOG_PREFIX, log_group=self.logs),
        )
        mounts = [("cache", _CACHE), ("scratch", _SCRATCH)]
        for name, _ in mounts:
            task.add_volume(name=name)
        if count > 1 and is_managed:
            # ECS rejects `sharedMemorySize` and tmpfs there. A volume gets its owner and mode from
            # a VOLUME of the image: a separate volume would belong to root, with mode 0755.
            mounts.append(("scratch", _SHARED))
        container.add_mount_points(
            *(
                ecs.MountPoint(container_path=path, read_only=False, source_volume=name)
                for name, path in mounts
            )
        )
        return task

    def _linux(self, *, shared_memory_mib: int | None) -> ecs.LinuxParameters:
        """Return the parameters; NCCL needs more shared memory than Docker's 64 MiB."""
        linux = ecs.LinuxParameters(
            self,
            "Linux",
            init_process_enabled=True,
            shared_memory_size=shared_memory_mib,
        )
        linux.drop_capabilities(ecs.Capability.ALL)
        return linux

"""The service of one model: a task definition, its role, and the tasks that there may be."""

from __future__ import annotations

from aws_cdk import Duration, Stack
from aws_cdk import aws_ecs as ecs
from aws_cdk import aws_iam as iam
from constructs import Construct

from infra import permissions as may
from infra.compute.capacity import Machines
from infra.compute.network import WorkerNetwork
from infra.compute.scaling import BacklogScaling, running_tasks
from infra.config import Model
from infra.data.stack import DataStack
from infra.gpus import GPUS
from infra.logs import log_group

# ECS allows no more; a worker needs half of it.
STOP_SECONDS = 120
# Of the image: container/Dockerfile.
_USER = "10001:10001"
_SHARED_MEMORY_MIB = 1024
_CACHE, _SCRATCH = "/var/cache/tidemill", "/tmp"  # noqa: S108 - a volume of the task's own
_HEALTH_FILE = f"{_SCRATCH}/tidemill-health"


class WorkerService(Construct):
    """Runs `tidemill worker` for one model, on machines of its own, from none to `max_workers`."""

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        data: DataStack,
        cluster: ecs.Cluster,
        network: WorkerNetwork,
        machines: Machines,
        image: ecs.ContainerImage,
        model: Model,
    ) -> None:
        super().__init__(scope, construct_id)
        self.model = model
        config = data.config
        capacity = machines.add(self, model)
        self.logs = log_group(self, "Logs", days=config.retention.log_days)
        task = self._add_task(data, image, capacity.compatibility)
        make = (
            ecs.Ec2Service
            if capacity.compatibility is ecs.Compatibility.EC2
            else ecs.FargateService  # the construct's name for what needs no machines of yours
        )
        self.service = make(
            self,
            "Service",
            cluster=cluster,
            service_name=config.service_of(model),
            task_definition=task,
            capacity_provider_strategies=capacity.strategies,
            vpc_subnets={"subnets": network.subnets},
            security_groups=[network.workers],
            # A worker more than there are GPUs could only wait for the one that it replaces.
            min_healthy_percent=0,
            max_healthy_percent=100,
            circuit_breaker=ecs.DeploymentCircuitBreaker(enable=True, rollback=True),
            # What moves tasks to even out zones starts the second before it stops the first.
            availability_zone_rebalancing=ecs.AvailabilityZoneRebalancing.DISABLED,
            desired_count=0,
            enable_ecs_managed_tags=True,
            propagate_tags=ecs.PropagatedTagSource.SERVICE,
        )
        self.running_tasks = running_tasks(
            cluster=config.name, service=self.service.service_name, label=model.name
        )
        BacklogScaling(
            self,
            "Scaling",
            service=self.service,
            queue=data.doorbells.work[model.name],
            tasks=self.running_tasks,
            max_workers=model.max_workers,
        )

    def _add_task(
        self, data: DataStack, image: ecs.ContainerImage, compatibility: ecs.Compatibility
    ) -> ecs.TaskDefinition:
        model = self.model
        gpu, count = GPUS[model.gpu], model.gpus_per_worker
        role = iam.Role(
            self,
            "Role",
            assumed_by=iam.ServicePrincipal(
                "ecs-tasks.amazonaws.com",
                conditions={"StringEquals": {"aws:SourceAccount": Stack.of(self).account}},
            ),
        )
        for statement in may.worker(data, model):
            role.add_to_policy(statement)
        task = ecs.TaskDefinition(
            self,
            "Task",
            compatibility=compatibility,
            network_mode=ecs.NetworkMode.AWS_VPC,
            cpu=str(gpu.vcpus * count * 1024),
            memory_mib=str(gpu.memory_gib * count * 1024),
            task_role=role,
        )
        linux = ecs.LinuxParameters(
            self,
            "Linux",
            init_process_enabled=True,
            # Where GPUs talk through the host's memory, NCCL wants more than Docker gives.
            shared_memory_size=_SHARED_MEMORY_MIB if count > 1 else None,
        )
        linux.drop_capabilities(ecs.Capability.ALL)
        container = task.add_container(
            "worker",
            image=image,
            command=["worker", *worker_flags(model)],
            environment={
                **data.settings(),
                # ECS itself says this to some kinds of tasks only.
                "AWS_DEFAULT_REGION": Stack.of(self).region,
                "POWERTOOLS_SERVICE_NAME": "worker",
                "TIDEMILL_HEALTH_FILE": _HEALTH_FILE,
                "TIDEMILL_WEIGHTS_CACHE": f"{_CACHE}/weights",
            },
            gpu_count=count,
            user=_USER,
            readonly_root_filesystem=True,
            linux_parameters=linux,
            stop_timeout=Duration.seconds(STOP_SECONDS),
            health_check=ecs.HealthCheck(
                command=["CMD", "python", "-m", "cli.health"],
                interval=Duration.seconds(30),
                timeout=Duration.seconds(10),
                retries=3,
                start_period=Duration.seconds(120),
            ),
            logging=ecs.LogDrivers.aws_logs(stream_prefix="worker", log_group=self.logs),
        )
        for name, path in (("cache", _CACHE), ("scratch", _SCRATCH)):
            task.add_volume(name=name)
            container.add_mount_points(
                ecs.MountPoint(container_path=path, read_only=False, source_volume=name)
            )
        return task


def worker_flags(model: Model) -> list[str]:
    """Return the flags of `tidemill worker` that serve a model as the configuration says."""
    # Without its GPU a worker must end: on the processor it would only hold shards up.
    flags = [
        "--served-model-name",
        model.name,
        *model.aliases,
        "--dtype",
        model.dtype,
        "--kv-cache-dtype",
        model.kv_cache_dtype,
        "--device",
        "cuda",
    ]
    if model.gpus_per_worker > 1:
        flags += ["--tensor-parallel-size", str(model.gpus_per_worker)]
    if model.quantization:
        flags += ["--quantization", model.quantization]
    if model.weights:
        flags += ["--model", model.weights]
    if model.weights_region:
        flags += ["--weights-region", model.weights_region]
    flags += adapter_flags(model)
    return [*flags, *model.args]


def adapter_flags(model: Model) -> list[str]:
    """Return the flags of `tidemill worker` that serve a model's adapters."""
    named = [f"{adapter.name}={adapter.weights}" for adapter in model.adapters]
    return ["--lora-modules", *named] if named else []

"""GPU machines of one model: kept by ECS itself, or by an Auto Scaling group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aws_cdk import Size
from aws_cdk import aws_autoscaling as autoscaling
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_ecs as ecs
from aws_cdk import aws_iam as iam
from constructs import Construct

from infra.compute.network import WorkerNetwork
from infra.config import Config, Model
from infra.gpus import GPUS

# For the image, which brings CUDA along, and for a model's weights beside it.
DISK = Size.gibibytes(200)


@dataclass(frozen=True, slots=True)
class Capacity:
    """Machines for the tasks of one service: the name of their provider, and their kind."""

    provider: str
    compatibility: ecs.Compatibility


def add_capacity(
    scope: Construct, *, cluster: ecs.Cluster, network: WorkerNetwork, config: Config, model: Model
) -> Capacity:
    """Add the machines that the configuration asks for; there are none until a task needs one."""
    if config.compute == "asg":
        return _add_group(scope, cluster, network, model, is_spot=config.spot)
    return _add_managed(scope, cluster, network, model, is_spot=config.spot)


def _add_managed(
    scope: Construct, cluster: ecs.Cluster, network: WorkerNetwork, model: Model, *, is_spot: bool
) -> Capacity:
    gpu, count = GPUS[model.gpu], model.gpus_per_worker
    provider = ecs.ManagedInstancesCapacityProvider(
        scope,
        "Machines",
        subnets=network.subnets,
        security_groups=[network.workers],
        capacity_option_type=(
            ecs.CapacityOptionType.SPOT if is_spot else ecs.CapacityOptionType.ON_DEMAND
        ),
        task_volume_storage=DISK,
        propagate_tags=ecs.PropagateManagedInstancesTags.CAPACITY_PROVIDER,
        instance_requirements=ec2.InstanceRequirementsConfig(
            v_cpu_count_min=gpu.vcpus * count,
            memory_min=Size.gibibytes(gpu.memory_gib * count),
            accelerator_count_min=count,
            accelerator_count_max=count,
            accelerator_manufacturers=[ec2.AcceleratorManufacturer.NVIDIA],
            accelerator_types=[ec2.AcceleratorType.GPU],
            allowed_instance_types=list(gpu.families),
        ),
    )
    cluster.add_managed_instances_capacity_provider(provider)
    return Capacity(provider.capacity_provider_name, ecs.Compatibility.MANAGED_INSTANCES)


def _add_group(
    scope: Construct, cluster: ecs.Cluster, network: WorkerNetwork, model: Model, *, is_spot: bool
) -> Capacity:
    template = ec2.LaunchTemplate(
        scope,
        "Template",
        instance_type=ec2.InstanceType(GPUS[model.gpu].instances[model.gpus_per_worker]),
        # Its id is looked up by CloudFormation at each deployment: synthesis asks nobody.
        machine_image=ecs.EcsOptimizedImage.amazon_linux2023(ecs.AmiHardwareType.GPU),
        role=iam.Role(
            scope,
            "MachineRole",
            assumed_by=iam.ServicePrincipal("ec2.amazonaws.com"),
            managed_policies=[
                iam.ManagedPolicy.from_aws_managed_policy_name(
                    "service-role/AmazonEC2ContainerServiceforEC2Role"
                )
            ],
        ),
        security_group=network.workers,
        user_data=ec2.UserData.for_linux(),
        http_tokens=ec2.LaunchTemplateHttpTokens.REQUIRED,
        # Containers cannot reach the credentials of their machine.
        http_put_response_hop_limit=1,
        block_devices=[
            ec2.BlockDevice(
                device_name="/dev/xvda",
                volume=ec2.BlockDeviceVolume.ebs(
                    int(DISK.to_gibibytes()),
                    encrypted=True,
                    volume_type=ec2.EbsDeviceVolumeType.GP3,
                ),
            )
        ],
    )
    group = autoscaling.AutoScalingGroup(
        scope,
        "Group",
        vpc=cluster.vpc,
        vpc_subnets=ec2.SubnetSelection(subnets=network.subnets),
        min_capacity=0,
        max_capacity=model.max_workers,
        new_instances_protected_from_scale_in=True,
        mixed_instances_policy=autoscaling.MixedInstancesPolicy(
            launch_template=template,
            instances_distribution=autoscaling.InstancesDistribution(
                on_demand_percentage_above_base_capacity=0 if is_spot else 100,
                spot_allocation_strategy=autoscaling.SpotAllocationStrategy.PRICE_CAPACITY_OPTIMIZED,
            ),
        ),
        capacity_rebalance=is_spot,
    )
    provider = ecs.AsgCapacityProvider(
        scope,
        "Machines",
        auto_scaling_group=group,
        enable_managed_scaling=True,
        enable_managed_termination_protection=True,
        enable_managed_draining=True,
        target_capacity_percent=100,
    )
    # A Spot notice then becomes a SIGTERM two minutes before the end.
    cluster.add_asg_capacity_provider(provider, spot_instance_draining=is_spot)
    return Capacity(provider.capacity_provider_name, ecs.Compatibility.EC2)


def strategies(capacity: Capacity) -> Sequence[ecs.CapacityProviderStrategy]:
    """Return the strategy of a service that runs on these machines only."""
    return [ecs.CapacityProviderStrategy(capacity_provider=capacity.provider, weight=1)]

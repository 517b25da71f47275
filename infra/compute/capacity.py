"""ECS capacity providers of one model: managed instances, or an Auto Scaling group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from aws_cdk import ArnFormat, Size, Stack
from aws_cdk import aws_autoscaling as autoscaling
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_ecs as ecs
from aws_cdk import aws_iam as iam
from constructs import Construct

from infra.compute.network import WorkerNetwork
from infra.config import Config, Model
from infra.config.model import Capacity
from infra.gpus import GPUS, machine_gib
from infra.permissions import allow

# For the image, which contains CUDA, and for a model's weights: a group's machines have their own
# disks unformatted.
DISK = Size.gibibytes(200)
# Image and weights are written once and read once, at each start: the smallest machine's burst
# throughput. The IOPS are the minimum of any such disk.
_DISK_MBPS, _DISK_IOPS = 500, 3000
# Purchase options by their names in ECS and Auto Scaling.
_OPTION_TYPE: Final[Mapping[Capacity, str]] = {
    "on-demand": "ON_DEMAND",
    "spot": "SPOT",
    "reserved": "RESERVED",
    "reserved-first": "RESERVED",
}
_RESERVATIONS: Final[Mapping[Capacity, tuple[str, str]]] = {
    "reserved": ("RESERVATIONS_ONLY", "capacity-reservations-only"),
    "reserved-first": ("RESERVATIONS_FIRST", "capacity-reservations-first"),
}
# AWS's policy for the infrastructure role may pass only roles whose names begin like this.
_PASSABLE_ROLE = "ecsInstanceRole"
_SUBMISSIONS = (
    "SubmitAttachmentStateChanges",
    "SubmitContainerStateChange",
    "SubmitTaskStateChange",
)


@dataclass(frozen=True, slots=True)
class Provider:
    """Machines for the tasks of one model: the name of their capacity provider, and their kind."""

    provider: str
    compatibility: ecs.Compatibility


class CapacityProviders(Construct):
    """Adds the configured capacity providers; no instance runs until a task needs one.

    All models share one machine role: it serves the ECS agent, and tasks cannot use it.
    """

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        cluster: ecs.Cluster,
        network: WorkerNetwork,
        config: Config,
    ) -> None:
        super().__init__(scope, construct_id)
        self._cluster, self._network, self._config = cluster, network, config

    def add(self, scope: Construct, model: Model) -> Provider:
        """Add the machines of one model below `scope`."""
        add = self._add_group if self._config.compute == "asg" else self._add_managed
        return add(scope, model)

    def _add_managed(self, scope: Construct, model: Model) -> Provider:
        made = ecs.CfnCapacityProvider
        capacity = self._config.capacity_of(model)
        idle = model.machine_idle_minutes
        template = made.InstanceLaunchTemplateProperty(
            ec2_instance_profile_arn=self._profile.instance_profile_arn,
            network_configuration=made.ManagedInstancesNetworkConfigurationProperty(
                subnets=[subnet.subnet_id for subnet in self._network.subnets],
                security_groups=[group.security_group_id for group in self._network.groups],
            ),
            capacity_option_type=_OPTION_TYPE[capacity],
            capacity_reservations=made.CapacityReservationRequestProperty(
                reservation_preference=_RESERVATIONS[capacity][0],
                reservation_group_arn=model.reservation_group or None,
            )
            if capacity in _RESERVATIONS
            else None,
            instance_requirements=_requirements(model, is_spot=capacity == "spot"),
            # EC2 rejects instance tags in the metadata if a key contains a slash or a space.
            instance_metadata_tags_propagation=False,
            # Instance-store disks are faster than any other and cost nothing extra.
            local_storage_configuration=made.ManagedInstancesLocalStorageConfigurationProperty(
                use_local_storage=True
            ),
        )
        provider = made(
            scope,
            "Machines",
            cluster_name=self._cluster.cluster_name,
            managed_instances_provider=made.ManagedInstancesProviderProperty(
                infrastructure_role_arn=self._infrastructure_role.role_arn,
                instance_launch_template=template,
                infrastructure_optimization=None
                if idle is None
                else made.InfrastructureOptimizationProperty(scale_in_after=idle * 60),
                propagate_tags="CAPACITY_PROVIDER",
            ),
        )
        return Provider(provider.ref, ecs.Compatibility.MANAGED_INSTANCES)

    def _add_group(self, scope: Construct, model: Model) -> Provider:
        capacity = self._config.capacity_of(model)
        is_spot = capacity == "spot"
        group = autoscaling.AutoScalingGroup(
            scope,
            "Group",
            vpc=self._cluster.vpc,
            vpc_subnets=ec2.SubnetSelection(subnets=self._network.subnets),
            min_capacity=0,
            max_capacity=model.max_workers,
            mixed_instances_policy=autoscaling.MixedInstancesPolicy(
                launch_template=self._template(scope, model),
                # If one instance type is unavailable, another is used; the cheapest comes first.
                launch_template_overrides=[
                    autoscaling.LaunchTemplateOverrides(instance_type=ec2.InstanceType(name))
                    for name in model.machines
                ],
                instances_distribution=autoscaling.InstancesDistribution(
                    on_demand_percentage_above_base_capacity=0 if is_spot else 100,
                    on_demand_allocation_strategy=autoscaling.OnDemandAllocationStrategy.PRIORITIZED,
                    spot_allocation_strategy=autoscaling.SpotAllocationStrategy.PRICE_CAPACITY_OPTIMIZED,
                ),
            ),
            # A rebalance recommendation is not an interruption: replacing a machine for each would
            # cost a start. An interruption notice costs seconds of work.
            capacity_rebalance=False,
        )
        if capacity in _RESERVATIONS:
            _reserve(group, capacity, model.reservation_group)
        provider = ecs.AsgCapacityProvider(
            scope,
            "Machines",
            auto_scaling_group=group,
            enable_managed_scaling=True,
            # Deleting the provider would leave this protection on its machines, so the group, and
            # with it the stack, could not be deleted. Draining a machine costs only seconds.
            enable_managed_termination_protection=False,
            enable_managed_draining=True,
            target_capacity_percent=100,
        )
        self._cluster.add_asg_capacity_provider(provider)
        return Provider(provider.capacity_provider_name, ecs.Compatibility.EC2)

    def _template(self, scope: Construct, model: Model) -> ec2.LaunchTemplate:
        volume = ec2.BlockDeviceVolume.ebs(
            int(DISK.to_gibibytes()),
            encrypted=True,
            volume_type=ec2.EbsDeviceVolumeType.GP3,
            throughput=_DISK_MBPS,
            iops=_DISK_IOPS,
        )
        first, *more = self._network.groups
        template = ec2.LaunchTemplate(
            scope,
            "Template",
            instance_type=ec2.InstanceType(model.machines[0]),
            # CloudFormation looks up its ID at each deployment: synthesis makes no AWS calls.
            machine_image=ecs.EcsOptimizedImage.amazon_linux2023(ecs.AmiHardwareType.GPU),
            # Unchanged: the cluster would add settings that no machine needs.
            role=self._role.without_policy_updates(),
            security_group=first,
            user_data=_user_data(),
            http_tokens=ec2.LaunchTemplateHttpTokens.REQUIRED,
            http_put_response_hop_limit=1,
            block_devices=[ec2.BlockDevice(device_name="/dev/xvda", volume=volume)],
        )
        for group in more:
            template.add_security_group(group)
        return template

    @cached_property
    def _role(self) -> iam.Role:
        """The role of a machine, for the ECS agent. Images and logs belong to a task's role."""
        is_managed = self._config.compute == "managed-instances"
        role = iam.Role(
            self,
            "Role",
            # Roles belong to the account, not the region: two regions must not share this one.
            role_name=f"{_PASSABLE_ROLE}-{self._config.name}-{Stack.of(self).region}"
            if is_managed
            else None,
            assumed_by=iam.ServicePrincipal("ec2.amazonaws.com"),
        )
        cluster = self._cluster.cluster_arn
        machines = Stack.of(self).format_arn(
            service="ecs",
            resource="container-instance",
            resource_name=f"{self._config.name}/*",
            arn_format=ArnFormat.SLASH_RESOURCE_NAME,
        )
        # The first action supports no resource: it returns the address of the others.
        rights = [
            ("*", ["DiscoverPollEndpoint"]),
            (cluster, ["RegisterContainerInstance", *_SUBMISSIONS]),
            (machines, ["Poll", "StartTelemetrySession"]),
        ]
        if is_managed:
            rights += [(machines, ["PutSystemLogEvents"])]
        else:
            # Machines of a group leave by themselves, and drain at a Spot notice.
            rights += [
                (cluster, ["DeregisterContainerInstance"]),
                (machines, ["UpdateContainerInstancesState"]),
            ]
        for resource, actions in rights:
            role.add_to_policy(
                iam.PolicyStatement(
                    actions=[f"ecs:{action}" for action in actions], resources=[resource]
                )
            )
        return role

    @cached_property
    def _profile(self) -> iam.InstanceProfile:
        return iam.InstanceProfile(
            self, "Profile", role=self._role, instance_profile_name=self._role.role_name
        )

    @cached_property
    def _infrastructure_role(self) -> iam.Role:
        """The role with which ECS starts and ends machines, with AWS's own managed policy."""
        starter = iam.Role(
            self,
            "Starter",
            assumed_by=iam.ServicePrincipal("ecs.amazonaws.com"),
            managed_policies=[
                iam.ManagedPolicy.from_aws_managed_policy_name(
                    "AmazonECSInfrastructureRolePolicyForManagedInstances"
                )
            ],
        )
        if self._config.role_path != "/":
            # AWS's policy supports only roles without a path.
            to_ec2 = {"StringLike": {"iam:PassedToService": "ec2.*"}}
            starter.add_to_policy(allow(["iam:PassRole"], [self._role.role_arn], to_ec2))
        return starter


def _requirements(
    model: Model, *, is_spot: bool
) -> ecs.CfnCapacityProvider.InstanceRequirementsRequestProperty:
    """Return the instance types that fit a worker, without those that are too expensive.

    By default EC2 leaves out types that cost 20% more than the cheapest: every `2xlarge`.
    """
    made = ecs.CfnCapacityProvider
    gpu, count = GPUS[model.gpu], model.gpus_per_worker
    above = round((model.max_price_factor - 1) * 100)
    return made.InstanceRequirementsRequestProperty(
        v_cpu_count=made.VCpuCountRangeRequestProperty(min=gpu.vcpus * count),
        memory_mib=made.MemoryMiBRequestProperty(min=machine_gib(model.machines[0]) * 1024),
        accelerator_count=made.AcceleratorCountRequestProperty(min=count, max=count),
        accelerator_manufacturers=["nvidia"],
        accelerator_types=["gpu"],
        allowed_instance_types=list(gpu.families),
        local_storage="required",
        on_demand_max_price_percentage_over_lowest_price=None if is_spot else above,
        spot_max_price_percentage_over_lowest_price=above if is_spot else None,
    )


def _reserve(group: autoscaling.AutoScalingGroup, capacity: Capacity, target: str) -> None:
    """Let a group use reserved machines, exclusively or before others."""
    made = autoscaling.CfnAutoScalingGroup
    resource = group.node.default_child
    assert isinstance(resource, made)
    resource.capacity_reservation_specification = made.CapacityReservationSpecificationProperty(
        capacity_reservation_preference=_RESERVATIONS[capacity][1],
        capacity_reservation_target=made.CapacityReservationTargetProperty(
            capacity_reservation_resource_group_arns=[target]
        )
        if target
        else None,
    )


def _user_data() -> ec2.UserData:
    """Return the configuration of the ECS agent; the cluster adds its own name."""
    user_data = ec2.UserData.for_linux()
    for setting in (
        # A Spot notice becomes a SIGTERM, two minutes before the end. The CDK would set this only
        # for groups with a Spot price.
        "ECS_ENABLE_SPOT_INSTANCE_DRAINING=true",
        # Tasks must not have their machine's role; the hop limit does not stop awsvpc networks.
        "ECS_AWSVPC_BLOCK_IMDS=true",
    ):
        user_data.add_commands(f"echo {setting} >> /etc/ecs/ecs.config")
    return user_data

"""Machines of each model: the right GPUs, few permissions, and none without demand."""

from __future__ import annotations

import re
from itertools import chain
from typing import Any

import botocore.session
import pytest

from infra.gpus import GPUS, machine_gib
from tests.infra.compute.kinds import Compute
from tests.infra.reading import Grant

# What EC2 says of the machines: processors, GiB of memory, GPUs.
MACHINES = {
    "g4dn.xlarge": (4, 16, 1),
    "g4dn.12xlarge": (48, 192, 4),
    "g5.xlarge": (4, 16, 1),
    "g5.12xlarge": (48, 192, 4),
    "g5.48xlarge": (192, 768, 8),
    "g6.xlarge": (4, 16, 1),
    "g6.12xlarge": (48, 192, 4),
    "g6.48xlarge": (192, 768, 8),
    "g6e.xlarge": (4, 32, 1),
    "g6e.12xlarge": (48, 384, 4),
    "g6e.48xlarge": (192, 1536, 8),
    "p4d.24xlarge": (96, 1152, 8),
    "p5.4xlarge": (16, 256, 1),
    "p5.48xlarge": (192, 2048, 8),
    "p5en.48xlarge": (192, 2048, 8),
}


@pytest.mark.parametrize("name", GPUS)
def test_a_worker_fits_on_the_machines_of_its_gpu(name: str) -> None:
    """A tenth of the memory, and a vCPU, are left for the system and for ECS."""
    gpu = GPUS[name]
    for count, machines in gpu.instances.items():
        processors, gibibytes, gpus = MACHINES[machines[0]]
        assert gpus == count
        assert gpu.vcpus * count < processors
        assert machine_gib(machines[0]) == gibibytes
        assert gpu.memory_gib * count <= 0.9 * gibibytes
        assert gpu.machines(count, gpu.memory_gib * count) == machines
        for machine in machines:
            assert f"{machine.partition('.')[0]}.*" in gpu.families


@pytest.fixture(scope="module")
def machine_names() -> tuple[set[str], set[str]]:
    """Return the names of machines that EC2 and jobs of SageMaker know, as botocore has them."""
    session = botocore.session.get_session()
    ec2 = session.get_service_model("ec2").shape_for("InstanceType").enum
    jobs = session.get_service_model("sagemaker").shape_for("TrainingInstanceType").enum
    return set(ec2), set(jobs)


@pytest.mark.parametrize("name", GPUS)
def test_ec2_and_sagemaker_know_the_machines(
    machine_names: tuple[set[str], set[str]], name: str
) -> None:
    """botocore's own enums contain their names."""
    ec2, jobs = machine_names
    for machine in chain(*GPUS[name].instances.values()):
        assert machine in ec2
        assert f"ml.{machine}" in jobs


def test_managed_machines_have_the_gpus_of_one_worker(compute: dict[str, Compute]) -> None:
    """They have exactly those GPUs, with room for the task and the system."""
    wanted = {"orgbig": ("g6.*", 4, 192), "small": ("g4dn.*", 1, 16)}
    for kind in ("managed", "managed, Spot"):
        made = compute[kind]
        providers = made.of("AWS::ECS::CapacityProvider")
        assert len(providers) == len(wanted)
        for slug, (family, count, gibibytes) in wanted.items():
            launch = providers[f"Worker{slug}Machines"]["ManagedInstancesProvider"]
            needs = launch["InstanceLaunchTemplate"]["InstanceRequirements"]
            task = made.task(slug)
            assert needs["AllowedInstanceTypes"] == [family]
            assert needs["AcceleratorCount"] == {"Min": count, "Max": count}
            assert needs["AcceleratorManufacturers"] == ["nvidia"]
            assert needs["MemoryMiB"] == {"Min": gibibytes * 1024}
            assert int(task["Memory"]) <= 0.9 * gibibytes * 1024
            assert needs["VCpuCount"] == {"Min": int(task["Cpu"]) / 1024}


def test_managed_machines_keep_weights_on_their_own_disks(compute: dict[str, Compute]) -> None:
    """They must have some, and no other disk is paid for."""
    for provider in compute["managed"].of("AWS::ECS::CapacityProvider").values():
        launch = provider["ManagedInstancesProvider"]["InstanceLaunchTemplate"]
        assert launch["InstanceRequirements"]["LocalStorage"] == "required"
        assert launch["LocalStorageConfiguration"] == {"UseLocalStorage": True}
        assert "StorageConfiguration" not in launch


@pytest.mark.parametrize(("kind", "option"), [("managed", "ON_DEMAND"), ("managed, Spot", "SPOT")])
def test_managed_machines_are_spot_if_configured(
    compute: dict[str, Compute], kind: str, option: str
) -> None:
    """The switch of the configuration reaches ECS."""
    assert {
        provider["ManagedInstancesProvider"]["InstanceLaunchTemplate"]["CapacityOptionType"]
        for provider in compute[kind].of("AWS::ECS::CapacityProvider").values()
    } == {option}


def test_a_group_has_a_machine_for_each_worker_or_none(compute: dict[str, Compute]) -> None:
    """It has up to `max_workers` machines, each with one worker's GPUs; ECS sets the number."""
    made = compute["groups"]
    assert {
        name: (group["MinSize"], group["MaxSize"], group.get("DesiredCapacity"))
        for name, group in made.of("AWS::AutoScaling::AutoScalingGroup").items()
    } == {"WorkerorgbigGroupASG": ("0", "8", None), "WorkersmallGroupASG": ("0", "1", None)}
    assert {name: template["InstanceType"] for name, template in templates_of(made).items()} == {
        "WorkerorgbigTemplate": "g6.12xlarge",
        "WorkersmallTemplate": "g4dn.xlarge",
    }


def test_a_group_takes_whatever_machine_has_the_gpus(compute: dict[str, Compute]) -> None:
    """The cheapest first, where that is to be had."""
    for kind in ("groups", "groups, Spot"):
        groups = compute[kind].of("AWS::AutoScaling::AutoScalingGroup")
        taken = {
            name: [
                override["InstanceType"]
                for override in group["MixedInstancesPolicy"]["LaunchTemplate"]["Overrides"]
            ]
            for name, group in groups.items()
        }
        assert taken == {
            "WorkerorgbigGroupASG": ["g6.12xlarge", "g6.24xlarge"],
            "WorkersmallGroupASG": [f"g4dn.{size}xlarge" for size in ("", 2, 4, 8, 16)],
        }
        for group in groups.values():
            shares = group["MixedInstancesPolicy"]["InstancesDistribution"]
            assert shares["OnDemandAllocationStrategy"] == "prioritized"


@pytest.mark.parametrize(("kind", "on_demand"), [("groups", 100), ("groups, Spot", 0)])
def test_a_group_is_all_spot_or_not_at_all(
    compute: dict[str, Compute], kind: str, on_demand: int
) -> None:
    """The switch of the configuration reaches the groups."""
    for group in compute[kind].of("AWS::AutoScaling::AutoScalingGroup").values():
        shares = group["MixedInstancesPolicy"]["InstancesDistribution"]
        assert shares["OnDemandPercentageAboveBaseCapacity"] == on_demand
        assert shares.get("OnDemandBaseCapacity", 0) == 0
        assert shares["SpotAllocationStrategy"] == "price-capacity-optimized"
        # "Capacity Rebalancing" replaces a machine on a recommendation, not an interruption.
        assert group["CapacityRebalance"] is False


def test_ecs_scales_a_group_by_its_tasks(compute: dict[str, Compute]) -> None:
    """No machine more than there are tasks; one that goes is drained, and none is kept from it."""
    made = compute["groups"]
    groups = made.of("AWS::AutoScaling::AutoScalingGroup")
    for group in groups.values():
        assert not group.get("NewInstancesProtectedFromScaleIn", False)
    for provider in made.of("AWS::ECS::CapacityProvider").values():
        group = provider["AutoScalingGroupProvider"]
        assert group["ManagedScaling"] == {"Status": "ENABLED", "TargetCapacity": 100}
        assert group["ManagedTerminationProtection"] == "DISABLED"
        assert group["ManagedDraining"] == "ENABLED"
        assert group["AutoScalingGroupArn"] in groups


def test_a_spot_notice_is_a_signal_to_the_worker(compute: dict[str, Compute]) -> None:
    """ECS's agent drains its machine, which sends SIGTERM."""
    for template in templates_of(compute["groups, Spot"]).values():
        assert settings_of(template)["ECS_ENABLE_SPOT_INSTANCE_DRAINING"] == "true"


def test_machines_join_the_cluster(compute: dict[str, Compute]) -> None:
    """The agent gets the cluster's name."""
    for template in templates_of(compute["groups"]).values():
        assert settings_of(template)["ECS_CLUSTER"] == "Cluster"


def test_no_task_gets_its_machines_rights(compute: dict[str, Compute]) -> None:
    """Neither a bridge, which is one hop more, nor a separate network interface gives them."""
    for template in templates_of(compute["groups"]).values():
        assert template["MetadataOptions"]["HttpTokens"] == "required"
        assert template["MetadataOptions"]["HttpPutResponseHopLimit"] == 1
        assert settings_of(template)["ECS_AWSVPC_BLOCK_IMDS"] == "true"


def test_disks_are_encrypted(compute: dict[str, Compute]) -> None:
    """Weights and a worker's files are on encrypted disks only."""
    for template in templates_of(compute["groups"]).values():
        [disk] = template["BlockDeviceMappings"]
        assert disk["DeviceName"] == "/dev/xvda"
        assert disk["Ebs"]["Encrypted"] is True
        assert disk["Ebs"]["VolumeType"] == "gp3"
        # Its default is an eighth of what S3 gives: an image and weights would take minutes.
        assert (disk["Ebs"]["Throughput"], disk["Ebs"]["Iops"]) == (500, 3000)


def test_the_machine_image_is_looked_up_at_deployment(compute: dict[str, Compute]) -> None:
    """The newest of ECS with drivers for GPUs, and no question while templates are made."""
    made = compute["groups"]
    parameters = made.templates["Compute"]["Parameters"]
    for template in templates_of(made).values():
        [parameter] = [
            found
            for name, found in parameters.items()
            if name.startswith(template["ImageId"]) and name != "BootstrapVersion"
        ]
        assert parameter == {
            "Type": "AWS::SSM::Parameter::Value<AWS::EC2::Image::Id>",
            "Default": "/aws/service/ecs/optimized-ami/amazon-linux-2023/gpu/recommended/image_id",
        }


CLUSTER = "Cluster.Arn"
MACHINES_OF_CLUSTER = "arn:aws:ecs:eu-west-1:111122223333:container-instance/tidemill/*"
OF_EVERY_MACHINE = {
    Grant("ecs:DiscoverPollEndpoint", "*"),
    Grant("ecs:RegisterContainerInstance", CLUSTER),
    Grant("ecs:SubmitAttachmentStateChanges", CLUSTER),
    Grant("ecs:SubmitContainerStateChange", CLUSTER),
    Grant("ecs:SubmitTaskStateChange", CLUSTER),
    Grant("ecs:Poll", MACHINES_OF_CLUSTER),
    Grant("ecs:StartTelemetrySession", MACHINES_OF_CLUSTER),
}
OF_A_GROUP = {
    Grant("ecs:DeregisterContainerInstance", CLUSTER),
    Grant("ecs:UpdateContainerInstancesState", MACHINES_OF_CLUSTER),
}
OF_MANAGED = {Grant("ecs:PutSystemLogEvents", MACHINES_OF_CLUSTER)}


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("managed", OF_MANAGED),
        ("managed, Spot", OF_MANAGED),
        ("groups", OF_A_GROUP),
        ("groups, Spot", OF_A_GROUP),
    ],
)
def test_a_machine_may_serve_its_cluster_and_do_nothing_else(
    compute: dict[str, Compute], kind: str, more: set[Grant]
) -> None:
    """Reading images and writing logs are rights of tasks."""
    made = compute[kind]
    roles = {
        name: role
        for name, role in made.of("AWS::IAM::Role").items()
        if trusted_by(role) == "ec2.amazonaws.com"
    }
    assert set(roles) == {"MachinesRole"}
    assert "ManagedPolicyArns" not in roles["MachinesRole"]
    assert made.grants("MachinesRole") == OF_EVERY_MACHINE | more
    assert {
        tuple(profile["Roles"]) for profile in made.of("AWS::IAM::InstanceProfile").values()
    } == {("MachinesRole",)}


def test_ecs_starts_machines_with_the_policy_that_aws_keeps_for_it(
    compute: dict[str, Compute],
) -> None:
    """AWS's policy passes roles of one name only; two regions of an account need two names."""
    made = compute["managed"]
    roles = made.of("AWS::IAM::Role")
    assert roles["MachinesRole"]["RoleName"] == "ecsInstanceRole-tidemill-eu-west-1"
    assert trusted_by(roles["MachinesStarter"]) == "ecs.amazonaws.com"
    assert roles["MachinesStarter"]["ManagedPolicyArns"] == [
        "arn:aws:iam::aws:policy/AmazonECSInfrastructureRolePolicyForManagedInstances"
    ]
    for provider in made.of("AWS::ECS::CapacityProvider").values():
        managed = provider["ManagedInstancesProvider"]
        assert managed["InfrastructureRoleArn"] == "MachinesStarter.Arn"
        launch = managed["InstanceLaunchTemplate"]
        assert launch["Ec2InstanceProfileArn"] == "MachinesProfile.Arn"
        assert provider["ClusterName"] == "Cluster"


def templates_of(made: Compute) -> dict[str, dict[str, Any]]:
    """Return what the groups' machines are made from."""
    found = made.of("AWS::EC2::LaunchTemplate")
    assert found
    return {name: template["LaunchTemplateData"] for name, template in found.items()}


def settings_of(template: dict[str, Any]) -> dict[str, str]:
    """Return what the first boot of a machine writes into the settings of ECS's agent."""
    script = template["UserData"]["Fn::Base64"]
    return dict(re.findall(r"^echo (\w+)=(\S+) >> /etc/ecs/ecs.config$", script, re.MULTILINE))


def trusted_by(role: dict[str, Any]) -> str:
    """Return the only service that may take a role."""
    [statement] = role["AssumeRolePolicyDocument"]["Statement"]
    service: str = statement["Principal"]["Service"]
    return service

"""A model's own choice of machines: their memory and price, how they are bought, their tags."""

from __future__ import annotations

from typing import Any

import pytest

from tests.infra.compute.kinds import CHANGED_JOBS, LARGE, Compute
from tests.infra.conftest import Synth

GROUP = "arn:aws:resource-groups:eu-west-1:111122223333:group/mine"
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "large": LARGE,
    "dear": {"max_price_factor": 4.5},
    "spot": {"capacity": "spot"},
    "reserved": {"capacity": "reserved", "reservation_group": GROUP},
    "first": {"capacity": "reserved-first"},
}
WARM = {"machine_idle_minutes": 30}
TAGS = {"team": "ml", "acme/cost center": "4711"}
ALL_TAGS = TAGS | {"tidemill": "tidemill"}


def configured(compute: str, **more: dict[str, Any]) -> dict[str, Any]:
    """Return a deployment with all of these models."""
    models = [{"name": name, "gpu": "l4"} | keys for name, keys in (MODELS | more).items()]
    return {"compute": compute, "models": models, "tags": TAGS}


@pytest.fixture
def managed(synth: Synth) -> dict[str, dict[str, Any]]:
    """Return the managed machines of each model."""
    made = Compute(synth(configured("managed-instances", warm=WARM)))
    providers = made.of("AWS::ECS::CapacityProvider")
    return {name: providers[f"Worker{name}Machines"] for name in MODELS | {"warm": WARM}}


@pytest.fixture
def groups(synth: Synth) -> Compute:
    """Return the same in groups."""
    return Compute(synth(configured("asg")))


def launch_of(provider: dict[str, Any]) -> dict[str, Any]:
    """Return what managed machines are made from."""
    return dict(provider["ManagedInstancesProvider"]["InstanceLaunchTemplate"])


def test_a_machine_has_the_memory_that_a_worker_is_to_get(
    managed: dict[str, dict[str, Any]], groups: Compute, synth: Synth
) -> None:
    """ECS is given a minimum above the smallest type's, and a group leaves out smaller types."""
    assert groups.task("large")["Memory"] == str(40 * 1024)
    needs = launch_of(managed["large"])["InstanceRequirements"]
    # As in a group: 32 GiB are too few, and 48 no machine has.
    assert needs["MemoryMiB"] == {"Min": 64 * 1024}
    sizes = [f"g6.{size}xlarge" for size in (4, 8, 16)]
    group = groups.of("AWS::AutoScaling::AutoScalingGroup")["WorkerlargeGroupASG"]
    overrides = group["MixedInstancesPolicy"]["LaunchTemplate"]["Overrides"]
    assert [override["InstanceType"] for override in overrides] == sizes
    template = groups.of("AWS::EC2::LaunchTemplate")["WorkerlargeTemplate"]
    assert template["LaunchTemplateData"]["InstanceType"] == sizes[0]
    plan = Compute(synth(CHANGED_JOBS)).plans()["large"]
    assert plan.means["instance_types"] == [f"ml.{size}" for size in sizes]


def test_larger_machines_are_taken_up_to_a_price(managed: dict[str, dict[str, Any]]) -> None:
    """The default limit is twice the cheapest; EC2's own would exclude every larger type."""
    limits = {
        name: {key: value for key, value in needs.items() if "Price" in key}
        for name, provider in managed.items()
        for needs in [launch_of(provider)["InstanceRequirements"]]
    }
    assert limits["plain"] == {"OnDemandMaxPricePercentageOverLowestPrice": 100}
    assert limits["dear"] == {"OnDemandMaxPricePercentageOverLowestPrice": 350}
    assert limits["spot"] == {"SpotMaxPricePercentageOverLowestPrice": 100}


def test_machines_are_bought_as_each_model_says(
    managed: dict[str, dict[str, Any]], groups: Compute
) -> None:
    """Reserved ones alone or first; any that match, or those of one group of reservations."""
    bought = {
        name: (launch["CapacityOptionType"], launch.get("CapacityReservations"))
        for name, provider in managed.items()
        for launch in [launch_of(provider)]
    }
    only = {"ReservationPreference": "RESERVATIONS_ONLY", "ReservationGroupArn": GROUP}
    assert {bought.pop(name) for name in ("plain", "large", "dear", "warm")} == {
        ("ON_DEMAND", None)
    }
    assert bought == {
        "spot": ("SPOT", None),
        "reserved": ("RESERVED", only),
        "first": ("RESERVED", {"ReservationPreference": "RESERVATIONS_FIRST"}),
    }
    made = groups.of("AWS::AutoScaling::AutoScalingGroup")
    found = {name: made[f"Worker{name}GroupASG"] for name in MODELS}
    assert {
        name: group.get("CapacityReservationSpecification") for name, group in found.items()
    } == {
        "plain": None,
        "large": None,
        "dear": None,
        "spot": None,
        "reserved": {
            "CapacityReservationPreference": "capacity-reservations-only",
            "CapacityReservationTarget": {"CapacityReservationResourceGroupArns": [GROUP]},
        },
        "first": {"CapacityReservationPreference": "capacity-reservations-first"},
    }
    shares = [group["MixedInstancesPolicy"]["InstancesDistribution"] for group in found.values()]
    assert [each["OnDemandPercentageAboveBaseCapacity"] for each in shares] == [
        *(100, 100, 100, 0, 100, 100)
    ]


def test_a_machine_may_stay_for_the_next_worker(managed: dict[str, dict[str, Any]]) -> None:
    """ECS ends an idle one after these seconds; without the key, when it likes."""
    kept = {
        name: provider["ManagedInstancesProvider"].get("InfrastructureOptimization")
        for name, provider in managed.items()
    }
    assert kept.pop("warm") == {"ScaleInAfter": 1800}
    assert set(kept.values()) == {None}


def test_machines_and_tasks_have_the_tags_of_their_deployment(
    managed: dict[str, dict[str, Any]], groups: Compute
) -> None:
    """ECS tags by its provider, a task by its definition, and a group by itself."""

    def tags_of(tags: list[dict[str, str]]) -> dict[str, str]:
        return {tag["Key"]: tag["Value"] for tag in tags if tag["Key"] != "Name"}

    for provider in managed.values():
        assert provider["ManagedInstancesProvider"]["PropagateTags"] == "CAPACITY_PROVIDER"
        # EC2 refuses a machine that is to tell such keys to what runs on it.
        assert launch_of(provider)["InstanceMetadataTagsPropagation"] is False
        assert tags_of(provider["Tags"]) == ALL_TAGS
    for name in MODELS:
        assert tags_of(groups.task(name)["Tags"]) == ALL_TAGS
    for group in groups.of("AWS::AutoScaling::AutoScalingGroup").values():
        assert tags_of(group["Tags"]) == ALL_TAGS
        assert all(tag["PropagateAtLaunch"] for tag in group["Tags"])
    for template in groups.of("AWS::EC2::LaunchTemplate").values():
        specified = template["LaunchTemplateData"]["TagSpecifications"]
        assert {each["ResourceType"] for each in specified} == {"instance", "volume"}
        assert all(tags_of(each["Tags"]) == ALL_TAGS for each in specified)

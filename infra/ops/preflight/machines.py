"""Machines that EC2 offers in the zones of a deployment's network."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from infra.config import Config
from infra.ops.preflight.account import NotReady
from infra.ops.zones import region_zones


def check_machines(config: Config, ec2: Any) -> Iterator[str]:
    """Yield sentences on zones with machines that the network does not cover.

    Raises NotReady for a GPU that none of its zones has. SageMaker tells nobody what it has before
    a job is asked for.
    """
    if config.compute == "sagemaker":
        return
    covered = _covered_zones(config, ec2)
    wanted = ((model.gpu, model.gpus_per_worker, model.machines) for model in config.models)
    for gpu, count, types in dict.fromkeys(wanted):
        machines = f"machines with {count} × {gpu} ({', '.join(types)})"
        offered = _offered_zones(types, ec2)
        if not offered:
            raise NotReady(
                f"{ec2.meta.region_name} has no {machines}: take another region, or another `gpu` "
                "(docs/deploy.md)."
            )
        elsewhere = ", ".join(sorted(offered - covered))
        if not offered & covered:
            raise NotReady(
                f"There are {machines} in {elsewhere} alone, and the network covers "
                f"{', '.join(sorted(covered))}: {_advice(config)}."
            )
        if elsewhere:
            yield f"There are {machines} in {elsewhere}, too: {_advice(config)}."


def _advice(config: Config) -> str:
    if config.network.kind == "existing":
        return "give `subnet_ids` in [network] a subnet there"
    return "name them in `zones` of [network]"


def _covered_zones(config: Config, ec2: Any) -> set[str]:
    """Return the zones of the subnets that workers' machines come to stand in."""
    network = config.network
    if network.kind == "existing":
        found = ec2.describe_subnets(SubnetIds=list(network.subnet_ids))
        return {subnet["AvailabilityZone"] for subnet in found["Subnets"]}
    return set(network.zones or region_zones(ec2))


def _offered_zones(types: Collection[str], ec2: Any) -> set[str]:
    """Return the zones that have machines of any of these types."""
    pages = ec2.get_paginator("describe_instance_type_offerings").paginate(
        LocationType="availability-zone",
        Filters=[{"Name": "instance-type", "Values": list(types)}],
    )
    return {offer["Location"] for page in pages for offer in page["InstanceTypeOfferings"]}

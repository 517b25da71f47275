"""Machines that EC2 offers in the zones of a deployment's network."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from botocore.exceptions import ClientError

from infra.config import Config, Network
from infra.ops.preflight.account import NotReady
from infra.ops.zones import region_zones


def check_machines(config: Config, ec2: Any) -> Iterator[str]:
    """Yield sentences on zones with machines that the network does not cover.

    Raises NotReady for a GPU that none of its zones has, and for missing subnets.
    SageMaker does not report its instance types before a job is requested.
    """
    subnets = _subnet_zones(config.network, ec2) if config.network.kind == "existing" else set()
    if config.compute == "sagemaker":
        return
    covered = subnets or set(config.network.zones or region_zones(ec2))
    wanted = ((model.gpu, model.gpus_per_worker, model.machines) for model in config.models)
    for gpu, count, types in dict.fromkeys(wanted):
        machines = f"machines with {count} × {gpu} ({', '.join(types)})"
        offered = _offered_zones(types, ec2)
        if not offered:
            raise NotReady(
                f"{ec2.meta.region_name} has no {machines}: use another region, or another `gpu` "
                "(docs/reference/configuration.md)."
            )
        elsewhere = ", ".join(sorted(offered - covered))
        if not offered & covered:
            raise NotReady(
                f"There are {machines} only in {elsewhere}, but the network covers "
                f"{', '.join(sorted(covered))}: {_advice(config)}."
            )
        if elsewhere:
            yield f"There are also {machines} in {elsewhere}: {_advice(config)}."


def _advice(config: Config) -> str:
    if config.network.kind == "existing":
        return "add a subnet there to `subnet_ids` in [network]"
    return "add it to `zones` in [network]"


def _subnet_zones(network: Network, ec2: Any) -> set[str]:
    """Return the zones of an existing VPC's subnets, which must be of that VPC."""
    try:
        found = ec2.describe_subnets(SubnetIds=list(network.subnet_ids))["Subnets"]
    except ClientError as exc:
        if exc.response["Error"]["Code"].lower().startswith("invalidsubnet"):
            raise NotReady(
                f"`subnet_ids` in [network] has a subnet not in {ec2.meta.region_name}: {exc}"
            ) from exc
        raise
    others = [each["SubnetId"] for each in found if each["VpcId"] != network.vpc_id]
    if others:
        raise NotReady(
            f"{', '.join(others)} of `subnet_ids` in [network] is in another VPC than "
            f"{network.vpc_id}."
        )
    return {subnet["AvailabilityZone"] for subnet in found}


def _offered_zones(types: Collection[str], ec2: Any) -> set[str]:
    """Return the zones that have machines of any of these types."""
    pages = ec2.get_paginator("describe_instance_type_offerings").paginate(
        LocationType="availability-zone",
        Filters=[{"Name": "instance-type", "Values": list(types)}],
    )
    return {offer["Location"] for page in pages for offer in page["InstanceTypeOfferings"]}

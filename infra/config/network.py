"""`[network]`: the workers' network, a new one or an existing VPC."""

from __future__ import annotations

from ipaddress import AddressValueError, IPv4Network, NetmaskValueError
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints
from pydantic import field_validator as field_check
from pydantic import model_validator as model_check

from infra.config.table import Table

Zone = Annotated[str, StringConstraints(pattern=r"^[a-z]{2}-[a-z0-9-]+-[0-9]+[a-z]$")]
_ID = "[0-9a-f]{8,17}"
SubnetId = Annotated[str, StringConstraints(pattern=rf"^subnet-{_ID}$")]
GroupId = Annotated[str, StringConstraints(pattern=rf"^sg-{_ID}$")]
# Number of zones if the region's zones are not named: a template can count no more of them.
DEFAULT_ZONES = 2
MAX_ZONES = 6
# The largest VPC, and the smallest whose subnets (sixteenths of it) AWS allows.
_PREFIXES = range(16, 25)
# Shared address space of carriers, which companies use behind a NAT if private ranges are scarce.
_SHARED = IPv4Network("100.64.0.0/10")


class Network(Table):
    """Settings of the workers' network.

    `internet` and `endpoint_zones` apply to an isolated one, which reaches AWS services by VPC
    endpoints, and hosts in requests' URLs by a NAT gateway. An existing VPC belongs to its owner,
    with its routes, endpoints and `security_group_ids`; without these, a security group is created.
    """

    kind: Literal["public", "isolated", "existing"] = "public"
    zones: Annotated[tuple[Zone, ...], Field(max_length=MAX_ZONES, strict=False)] = ()
    cidr: str = "10.73.0.0/16"
    internet: bool = False
    endpoint_zones: Annotated[int, Field(ge=1, le=MAX_ZONES)] = 1
    vpc_id: Annotated[str, StringConstraints(pattern=rf"^(vpc-{_ID})?$")] = ""
    subnet_ids: Annotated[tuple[SubnetId, ...], Field(max_length=16, strict=False)] = ()
    security_group_ids: Annotated[tuple[GroupId, ...], Field(max_length=5, strict=False)] = ()

    @field_check("zones", "subnet_ids", "security_group_ids")
    @classmethod
    def _check_twice(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise ValueError(f"has the duplicate {twice[0]}")
        return names

    @field_check("cidr")
    @classmethod
    def _check_cidr(cls, cidr: str) -> str:
        try:
            network = IPv4Network(cidr)
        except (AddressValueError, NetmaskValueError, ValueError) as exc:
            raise ValueError(f'is "{cidr}"; it must be a block such as 10.73.0.0/16') from exc
        is_private = network.is_private or network.subnet_of(_SHARED)
        if network.prefixlen not in _PREFIXES or not is_private:
            raise ValueError(f'is "{cidr}"; it must be a private range from /16 to /24')
        return cidr

    @model_check(mode="after")
    def _check_kind(self) -> Self:
        fields = type(self).model_fields

        def given(*keys: str) -> list[str]:
            return [key for key in keys if getattr(self, key) != fields[key].default]

        if self.kind != "isolated" and (keys := given("internet", "endpoint_zones")):
            raise ValueError(f'supports {keys[0]} only with kind = "isolated"')
        if self.kind == "existing":
            if keys := given("zones", "cidr"):
                raise ValueError(f"does not support {keys[0]} for an existing VPC")
            if not (self.vpc_id and self.subnet_ids):
                raise ValueError('requires vpc_id and subnet_ids with kind = "existing"')
        elif keys := given("vpc_id", "subnet_ids", "security_group_ids"):
            raise ValueError(f'supports {keys[0]} only with kind = "existing"')
        most = len(self.zones) or DEFAULT_ZONES
        if self.endpoint_zones > most:
            raise ValueError(
                f"can have at most endpoint_zones = {most}, unless it names more zones"
            )
        return self

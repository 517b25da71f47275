"""The workers' network: no way in; a way out, or endpoints for what they call."""

from __future__ import annotations

import json
from typing import Any

import pytest
from botocore.config import Config
from botocore.session import Session

from infra.config import DEFAULT_ZONES
from tests.infra.compute.kinds import EXISTING, GROUPS_OF_OTHERS, KINDS, REVISED, Compute
from tests.infra.conftest import Synth
from tests.long_parameters import with_long

WAYS_OUT = {
    "AWS::EC2::InternetGateway",
    "AWS::EC2::EgressOnlyInternetGateway",
    "AWS::EC2::NatGateway",
    "AWS::EC2::Route",
    "AWS::EC2::TransitGatewayAttachment",
    "AWS::EC2::VPNGateway",
    "AWS::EC2::EIP",
}
COST_BY_THE_HOUR = {"AWS::EC2::NatGateway", "AWS::EC2::EIP", "AWS::EC2::TransitGatewayAttachment"}
OURS = {"StringEquals": {"aws:PrincipalAccount": "111122223333"}}


@pytest.fixture(params=[kind for kind, overrides in KINDS.items() if "network" not in overrides])
def public(request: pytest.FixtureRequest, compute: dict[str, Compute]) -> Compute:
    """Return every kind of deployment with a public network in turn."""
    return compute[request.param]


@pytest.fixture(params=["isolated", "isolated, with a way out"])
def isolated(request: pytest.FixtureRequest, compute: dict[str, Compute]) -> Compute:
    """Return every kind of deployment with an isolated network in turn."""
    return compute[request.param]


# Of every network


def test_there_is_no_inbound_access(any_kind: Compute) -> None:
    """Workers and their machines have one group, which allows no inbound traffic."""
    groups = any_kind.of("AWS::EC2::SecurityGroup")
    assert not any(group.get("SecurityGroupIngress") for group in groups.values())
    assert "NetworkWorkers.GroupId" not in {
        rule["GroupId"] for rule in any_kind.of("AWS::EC2::SecurityGroupIngress").values()
    }
    for machine in machines_of(any_kind):
        assert machine == ["NetworkWorkers.GroupId"]


def test_every_subnet_has_the_free_gateways(any_kind: Compute) -> None:
    """S3 and DynamoDB are reached from every zone without paying by the hour."""
    tables = set(any_kind.of("AWS::EC2::RouteTable"))
    gateways = [
        endpoint
        for endpoint in any_kind.of("AWS::EC2::VPCEndpoint").values()
        if endpoint["VpcEndpointType"] == "Gateway"
    ]
    assert {gateway["ServiceName"].rpartition(".")[2] for gateway in gateways} == {
        "s3",
        "dynamodb",
    }
    assert all(set(gateway["RouteTableIds"]) == tables for gateway in gateways)
    assert len(tables) == len(any_kind.of("AWS::EC2::Subnet"))


def test_foreign_keys_cannot_carry_data_away(any_kind: Compute) -> None:
    """The gateways lead to all buckets and tables there are, for this account's roles only."""
    layers = "arn:aws:s3:::prod-eu-west-1-starport-layer-bucket/*"
    gateways = {
        endpoint["ServiceName"].rpartition(".")[2]: statements_of(endpoint)
        for endpoint in any_kind.of("AWS::EC2::VPCEndpoint").values()
        if endpoint["VpcEndpointType"] == "Gateway"
    }
    assert gateways == {
        # Layers of images are in a bucket of AWS's.
        "s3": [("Allow", "s3:*", "*", OURS), ("Allow", "s3:GetObject", layers, None)],
        "dynamodb": [("Allow", "dynamodb:*", "*", OURS)],
    }


# Of a public one


def test_a_public_network_costs_nothing_while_nothing_runs(public: Compute) -> None:
    """No endpoint, no gateway and no address that is paid by the hour."""
    kinds = {resource["Type"] for resource in public.templates["Compute"]["Resources"].values()}
    assert not kinds & COST_BY_THE_HOUR
    assert not interfaces_of(public)


def test_machines_have_an_address_of_each_sort(public: Compute) -> None:
    """The ECS agent pulls images and ships logs by IPv4, and tasks reach SQS by IPv6."""
    subnets = public.of("AWS::EC2::Subnet").values()
    assert len(subnets) == DEFAULT_ZONES
    for subnet in subnets:
        assert subnet["MapPublicIpOnLaunch"] is True
        assert subnet["AssignIpv6AddressOnCreation"] is True
    routes = public.of("AWS::EC2::Route").values()
    for way in ("DestinationCidrBlock", "DestinationIpv6CidrBlock"):
        leading = [route["GatewayId"] for route in routes if way in route]
        assert leading == ["NetworkVpcIGW"] * DEFAULT_ZONES


@pytest.mark.parametrize(
    "region", ["eu-west-1", "us-east-1", "ap-southeast-2", "us-gov-west-1", "cn-north-1"]
)
def test_tasks_reach_sqs_where_it_has_such_addresses(
    compute: dict[str, Compute], region: str
) -> None:
    """Tasks have no public IPv4 address: they use SQS's dual-stack endpoint."""
    made = compute["managed"]
    for slug in ("orgbig", "small"):
        assert made.environment(slug)["AWS_ENDPOINT_URL_SQS"] == "https://sqs.eu-west-1.api.aws"
    [endings] = made.templates["Compute"]["Mappings"].values()
    ending = endings[Session().get_partition_for_region(region)]["suffix"]
    client = Session().create_client("sqs", region, config=Config(use_dualstack_endpoint=True))
    assert client.meta.endpoint_url == f"https://sqs.{region}.{ending}"


def test_a_way_out_is_for_the_web_alone(public: Compute) -> None:
    """Two ports; plain http for what lines name, which tasks reach by their own address."""
    rules = public.of("AWS::EC2::SecurityGroup")["NetworkWorkers"]["SecurityGroupEgress"]
    assert {
        (rule.get("CidrIp") or rule["CidrIpv6"], rule["FromPort"], rule["ToPort"]) for rule in rules
    } == {("0.0.0.0/0", 443, 443), ("::/0", 443, 443), ("::/0", 80, 80)}


@pytest.mark.parametrize(
    ("cidr", "subnets"), with_long([(REVISED["network"]["cidr"], 20)], [("172.20.4.0/22", 26)])
)
def test_a_network_has_the_zones_and_addresses_that_it_is_given(
    synth: Synth, cidr: str, subnets: int
) -> None:
    """A subnet in each zone, with a sixteenth of the addresses."""
    network = REVISED["network"] | {"cidr": cidr}
    made, zones = Compute(synth(REVISED | {"network": network})), network["zones"]
    assert made.only("AWS::EC2::VPC")["CidrBlock"] == cidr
    found = made.of("AWS::EC2::Subnet").values()
    assert sorted(subnet["AvailabilityZone"] for subnet in found) == zones
    assert {subnet["CidrBlock"].partition("/")[2] for subnet in found} == {str(subnets)}
    assert all(len(plan.means["subnets"]) == len(zones) for plan in made.plans().values())


# Of an existing one


@pytest.mark.parametrize(
    ("compute", "groups"),
    with_long([("managed-instances", GROUPS_OF_OTHERS), ("asg", [])], [("asg", GROUPS_OF_OTHERS)]),
)
def test_workers_use_an_existing_network(synth: Synth, compute: str, groups: list[str]) -> None:
    """Only a group without inbound access is added, if none is configured."""
    network = EXISTING | {"security_group_ids": groups}
    made = Compute(synth({"compute": compute, "network": network}))
    kinds = {resource["Type"] for resource in made.templates["Compute"]["Resources"].values()}
    own = {kind for kind in kinds if kind.startswith("AWS::EC2::")} - {"AWS::EC2::LaunchTemplate"}
    assert own == (set() if groups else {"AWS::EC2::SecurityGroup"})
    expected = groups or ["NetworkWorkers.GroupId"]
    assert machines_of(made) == [expected]
    for group in made.of("AWS::EC2::SecurityGroup").values():
        assert group["VpcId"] == EXISTING["vpc_id"]
        assert "SecurityGroupIngress" not in group
    for group in made.of("AWS::AutoScaling::AutoScalingGroup").values():
        assert group["VPCZoneIdentifier"] == EXISTING["subnet_ids"]
    [plan] = made.plans().values()
    assert plan.means["subnets"] == EXISTING["subnet_ids"]
    assert plan.means["security_groups"] == expected
    # SQS by its usual name: whether its routes support others is unknown.
    assert "AWS_ENDPOINT_URL_SQS" not in json.dumps(made.templates["Compute"])


# Of an isolated one


def test_nothing_leads_out_of_an_isolated_network(compute: dict[str, Compute]) -> None:
    """There is no gateway but to S3 and DynamoDB, no route, no public address."""
    made = compute["isolated"]
    kinds = {resource["Type"] for resource in made.templates["Compute"]["Resources"].values()}
    assert not kinds & WAYS_OUT
    assert not any(subnet["MapPublicIpOnLaunch"] for subnet in made.of("AWS::EC2::Subnet").values())
    [rule] = made.of("AWS::EC2::SecurityGroup")["NetworkWorkers"]["SecurityGroupEgress"]
    assert (rule["IpProtocol"], rule["FromPort"], rule["ToPort"]) == ("tcp", 443, 443)


def test_urls_in_lines_are_reached_if_configured(compute: dict[str, Compute]) -> None:
    """They go through one NAT gateway for all zones; workers have no public address."""
    made = compute["isolated, with a way out"]
    [gateway] = made.of("AWS::EC2::NatGateway")
    ways = {
        route["RouteTableId"]: route["NatGatewayId"]
        for route in made.of("AWS::EC2::Route").values()
        if "NatGatewayId" in route
    }
    assert set(ways.values()) == {gateway}
    assert len(ways) == DEFAULT_ZONES
    subnets = made.of("AWS::EC2::Subnet").values()
    assert not any(subnet["MapPublicIpOnLaunch"] for subnet in subnets)
    groups = made.of("AWS::EC2::SecurityGroup")
    ports = [rule["FromPort"] for rule in groups["NetworkWorkers"]["SecurityGroupEgress"]]
    assert sorted(ports) == [80, 443]


def test_another_zone_moves_no_subnet(synth: Synth) -> None:
    """CloudFormation makes the new subnet before it deletes any: addresses must not overlap."""

    def blocks(zones: int) -> dict[str, str]:
        subnets = Compute(synth(zoned(zones))).of("AWS::EC2::Subnet")
        return {name: subnet["CidrBlock"] for name, subnet in subnets.items()}

    two, three = blocks(2), blocks(3)
    assert len(three) == len(two) + 2
    assert two.items() <= three.items()


def test_what_a_worker_and_its_machine_call_has_an_endpoint(isolated: Compute) -> None:
    """Queue, logs, images and ECS itself, under their own names; each costs by the hour."""
    endpoints = interfaces_of(isolated)
    assert set(endpoints) == {
        "sqs",
        "logs",
        "ecr.api",
        "ecr.dkr",
        "ecs",
        "ecs-agent",
        "ecs-telemetry",
    }
    for endpoint in endpoints.values():
        assert endpoint["PrivateDnsEnabled"]
        assert statements_of(endpoint) == [("Allow", "*", "*", OURS)]


def test_workers_find_services_by_their_usual_names(isolated: Compute) -> None:
    """Endpoints answer to them."""
    for slug in ("orgbig", "small"):
        assert "AWS_ENDPOINT_URL_SQS" not in isolated.environment(slug)


def test_endpoints_stand_in_as_many_zones_as_the_configuration_says(synth: Synth) -> None:
    """Each zone costs; one serves all."""
    for zones in (2, 3):
        made = Compute(synth(zoned(zones)))
        found = [subnet["AvailabilityZone"] for subnet in made.of("AWS::EC2::Subnet").values()]
        assert {*found} == {*zoned(zones)["network"]["zones"]}
        assert {len(each["SubnetIds"]) for each in interfaces_of(made).values()} == {zones - 1}


def test_only_workers_come_to_the_endpoints(isolated: Compute) -> None:
    """One port, from one group."""
    groups = isolated.of("AWS::EC2::SecurityGroup")
    ingress = isolated.of("AWS::EC2::SecurityGroupIngress")
    assert set(groups) == {"NetworkWorkers", "NetworkEndpoints"}
    assert {tuple(found["SecurityGroupIds"]) for found in interfaces_of(isolated).values()} == {
        ("NetworkEndpoints.GroupId",)
    }
    assert [
        (rule["GroupId"], rule["SourceSecurityGroupId"], rule["IpProtocol"], rule["FromPort"])
        for rule in ingress.values()
        if rule["FromPort"] == rule["ToPort"]
    ] == [("NetworkEndpoints.GroupId", "NetworkWorkers.GroupId", "tcp", 443)]
    assert len(ingress) == 1


def zoned(zones: int) -> dict[str, Any]:
    """Return a deployment in two or three zones, of which one has no endpoints."""
    names = [f"eu-west-1{letter}" for letter in "abc"[:zones]]
    network = {"kind": "isolated", "internet": True, "zones": names, "endpoint_zones": zones - 1}
    return {"network": network}


def interfaces_of(made: Compute) -> dict[str, dict[str, Any]]:
    """Return the endpoints that cost, by the service that they lead to."""
    return {
        endpoint["ServiceName"].partition("eu-west-1.")[2]: endpoint
        for endpoint in made.of("AWS::EC2::VPCEndpoint").values()
        if endpoint["VpcEndpointType"] == "Interface"
    }


def statements_of(endpoint: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Return what an endpoint lets through."""
    return [
        (
            statement["Effect"],
            statement["Action"],
            statement["Resource"],
            statement.get("Condition"),
        )
        for statement in endpoint["PolicyDocument"]["Statement"]
    ]


def machines_of(made: Compute) -> list[list[str]]:
    """Return the security groups of each model's machines."""
    found = [
        template["LaunchTemplateData"]["SecurityGroupIds"]
        for template in made.of("AWS::EC2::LaunchTemplate").values()
    ] + [
        managed["InstanceLaunchTemplate"]["NetworkConfiguration"]["SecurityGroups"]
        for provider in made.of("AWS::ECS::CapacityProvider").values()
        if (managed := provider.get("ManagedInstancesProvider"))
    ]
    assert len(found) == len(made.plans())
    return found

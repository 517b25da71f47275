"""The workers' network: closed, with endpoints for what they call."""

from __future__ import annotations

from typing import Any

from infra.config import DEFAULT_ZONES
from tests.infra.compute.kinds import Compute
from tests.infra.conftest import Synth


def test_nothing_leads_to_the_internet(any_kind: Compute) -> None:
    """There is no gateway but to S3 and DynamoDB, no route, no public address."""
    kinds = {resource["Type"] for resource in any_kind.templates["Compute"]["Resources"].values()}
    assert not kinds & {
        "AWS::EC2::InternetGateway",
        "AWS::EC2::EgressOnlyInternetGateway",
        "AWS::EC2::NatGateway",
        "AWS::EC2::Route",
        "AWS::EC2::TransitGatewayAttachment",
        "AWS::EC2::VPNGateway",
        "AWS::EC2::EIP",
    }
    assert not any(
        subnet["MapPublicIpOnLaunch"] for subnet in any_kind.of("AWS::EC2::Subnet").values()
    )
    assert {
        service["NetworkConfiguration"]["AwsvpcConfiguration"]["AssignPublicIp"]
        for service in any_kind.of("AWS::ECS::Service").values()
    } == {"DISABLED"}


def test_urls_in_lines_are_reached_where_that_is_asked_for(synth: Synth) -> None:
    """By one NAT gateway for all zones; workers have no public address, and nobody comes in."""
    made = Compute(synth({"network": {"internet": True}}))
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
    for service in made.of("AWS::ECS::Service").values():
        used = service["NetworkConfiguration"]["AwsvpcConfiguration"]
        assert used["AssignPublicIp"] == "DISABLED"
        assert all("Workers" in name for name in used["Subnets"])
    groups = made.of("AWS::EC2::SecurityGroup")
    ports = [rule["FromPort"] for rule in groups["NetworkWorkers"]["SecurityGroupEgress"]]
    assert sorted(ports) == [80, 443]
    assert "SecurityGroupIngress" not in groups["NetworkWorkers"]


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


def test_nobody_carries_data_away_with_keys_of_his_own(any_kind: Compute) -> None:
    """The gateways lead to all buckets and tables there are, for this account's roles only."""
    account = {"StringEquals": {"aws:PrincipalAccount": "111122223333"}}
    layers = "arn:aws:s3:::prod-eu-west-1-starport-layer-bucket/*"
    gateways = {
        endpoint["ServiceName"].rpartition(".")[2]: [
            (
                statement["Effect"],
                statement["Action"],
                statement["Resource"],
                statement.get("Condition"),
            )
            for statement in endpoint["PolicyDocument"]["Statement"]
        ]
        for endpoint in any_kind.of("AWS::EC2::VPCEndpoint").values()
        if endpoint["VpcEndpointType"] == "Gateway"
    }
    assert gateways == {
        # Layers of images lie in a bucket of AWS's.
        "s3": [("Allow", "s3:*", "*", account), ("Allow", "s3:GetObject", layers, None)],
        "dynamodb": [("Allow", "dynamodb:*", "*", account)],
    }


def test_what_a_worker_and_its_machine_call_has_an_endpoint(any_kind: Compute) -> None:
    """Queue, logs, images and ECS itself, under their own names; each costs by the hour."""
    endpoints = interfaces_of(any_kind)
    assert set(endpoints) == {
        "sqs",
        "logs",
        "ecr.api",
        "ecr.dkr",
        "ecs",
        "ecs-agent",
        "ecs-telemetry",
    }
    assert all(endpoint["PrivateDnsEnabled"] for endpoint in endpoints.values())


def test_endpoints_stand_in_as_many_zones_as_the_configuration_says(synth: Synth) -> None:
    """Each zone costs; one serves all."""
    zones = ["eu-west-1a", "eu-west-1b", "eu-west-1c"]
    for count in (1, 2):
        network = {"zones": zones, "endpoint_zones": count}
        made = Compute(synth({"network": network}))
        subnets = made.of("AWS::EC2::Subnet")
        assert sorted(subnet["AvailabilityZone"] for subnet in subnets.values()) == zones
        assert {len(each["SubnetIds"]) for each in interfaces_of(made).values()} == {count}


def test_only_workers_come_to_the_endpoints(any_kind: Compute) -> None:
    """One port, from one group; and nothing comes to the workers."""
    groups = any_kind.of("AWS::EC2::SecurityGroup")
    ingress = any_kind.of("AWS::EC2::SecurityGroupIngress")
    assert set(groups) == {"NetworkWorkers", "NetworkEndpoints"}
    assert {tuple(found["SecurityGroupIds"]) for found in interfaces_of(any_kind).values()} == {
        ("NetworkEndpoints.GroupId",)
    }
    assert [
        (rule["GroupId"], rule["SourceSecurityGroupId"], rule["IpProtocol"], rule["FromPort"])
        for rule in ingress.values()
        if rule["FromPort"] == rule["ToPort"]
    ] == [("NetworkEndpoints.GroupId", "NetworkWorkers.GroupId", "tcp", 443)]
    assert len(ingress) == 1
    assert not any(group.get("SecurityGroupIngress") for group in groups.values())


def test_workers_speak_tls_only(any_kind: Compute) -> None:
    """One port goes out."""
    [rule] = any_kind.of("AWS::EC2::SecurityGroup")["NetworkWorkers"]["SecurityGroupEgress"]
    assert (rule["IpProtocol"], rule["FromPort"], rule["ToPort"]) == ("tcp", 443, 443)


def test_workers_and_machines_are_in_the_workers_group(compute: dict[str, Compute]) -> None:
    """Tasks have network interfaces of their own, beside that of their machine."""
    for made in compute.values():
        for service in made.of("AWS::ECS::Service").values():
            network = service["NetworkConfiguration"]["AwsvpcConfiguration"]
            assert network["SecurityGroups"] == ["NetworkWorkers.GroupId"]
        for machine in machines_of(made):
            assert machine == ["NetworkWorkers.GroupId"]


def interfaces_of(made: Compute) -> dict[str, dict[str, Any]]:
    """Return the endpoints that cost, by the service that they lead to."""
    return {
        endpoint["ServiceName"].partition("eu-west-1.")[2]: endpoint
        for endpoint in made.of("AWS::EC2::VPCEndpoint").values()
        if endpoint["VpcEndpointType"] == "Interface"
    }


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
    assert len(found) == len(made.of("AWS::ECS::Service"))
    return found

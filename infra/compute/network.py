"""The workers' network: no way in, none to the internet unless asked for, endpoints for AWS."""

from __future__ import annotations

from collections.abc import Iterator

from aws_cdk import Stack
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_iam as iam
from constructs import Construct

from infra.config import DEFAULT_ZONES, Network

_CIDR = "10.73.0.0/16"
_CIDR_MASK = 20
_OUT_CIDR_MASK = 28
# What a worker, and ECS on its machine, speak to. S3 and DynamoDB have gateways: they cost nothing.
_GATEWAYS = {
    "s3": ec2.GatewayVpcEndpointAwsService.S3,
    "dynamodb": ec2.GatewayVpcEndpointAwsService.DYNAMODB,
}
_SERVICES = {
    "Sqs": ec2.InterfaceVpcEndpointAwsService.SQS,
    "Logs": ec2.InterfaceVpcEndpointAwsService.CLOUDWATCH_LOGS,
    "EcrApi": ec2.InterfaceVpcEndpointAwsService.ECR,
    "EcrImages": ec2.InterfaceVpcEndpointAwsService.ECR_DOCKER,
    "Ecs": ec2.InterfaceVpcEndpointAwsService.ECS,
    "EcsAgent": ec2.InterfaceVpcEndpointAwsService.ECS_AGENT,
    "EcsTelemetry": ec2.InterfaceVpcEndpointAwsService.ECS_TELEMETRY,
}


class WorkerNetwork(Construct):
    """A `vpc` of subnets that nobody reaches, and the security group of the `workers` in it.

    What lines name by url, such as recordings, is fetched through a NAT gateway where there is one.
    Every interface endpoint costs by the hour in each zone that it stands in, also when nothing
    runs: they stand in `endpoint_zones` of the zones, and serve all of them.
    """

    def __init__(self, scope: Construct, construct_id: str, *, network: Network) -> None:
        super().__init__(scope, construct_id)
        zones = list(network.zones) or None
        workers = ec2.SubnetConfiguration(
            name="Workers",
            subnet_type=ec2.SubnetType.PRIVATE_WITH_EGRESS
            if network.internet
            else ec2.SubnetType.PRIVATE_ISOLATED,
            cidr_mask=_CIDR_MASK,
        )
        out = ec2.SubnetConfiguration(
            name="Out",
            subnet_type=ec2.SubnetType.PUBLIC,
            cidr_mask=_OUT_CIDR_MASK,
            map_public_ip_on_launch=False,
        )
        self.vpc = ec2.Vpc(
            self,
            "Vpc",
            ip_addresses=ec2.IpAddresses.cidr(_CIDR),
            nat_gateways=1 if network.internet else 0,
            availability_zones=zones,
            max_azs=None if zones else DEFAULT_ZONES,
            restrict_default_security_group=False,
            subnet_configuration=[workers, out] if network.internet else [workers],
        )
        self.workers = ec2.SecurityGroup(
            self,
            "Workers",
            vpc=self.vpc,
            description="Workers and their machines: nothing comes in",
            allow_all_outbound=False,
        )
        # Without a NAT gateway there is no route but to endpoints, S3 and DynamoDB.
        self.workers.add_egress_rule(ec2.Peer.any_ipv4(), ec2.Port.tcp(443), "AWS")
        if network.internet:
            self.workers.add_egress_rule(ec2.Peer.any_ipv4(), ec2.Port.tcp(80), "Urls in lines")
        self.subnets = self.vpc.select_subnets(subnet_group_name="Workers").subnets
        for name, gateway in _GATEWAYS.items():
            endpoint = self.vpc.add_gateway_endpoint(name.upper(), service=gateway)
            for statement in self._let_through(name):
                endpoint.add_to_policy(statement)
        endpoints = ec2.SecurityGroup(
            self,
            "Endpoints",
            vpc=self.vpc,
            description="Endpoints of AWS services, for workers only",
            allow_all_outbound=False,
        )
        endpoints.add_ingress_rule(self.workers, ec2.Port.tcp(443), "Workers")
        for name, service in _SERVICES.items():
            self.vpc.add_interface_endpoint(
                name,
                service=service,
                open=False,
                private_dns_enabled=True,
                security_groups=[endpoints],
                subnets=ec2.SubnetSelection(subnets=self.subnets[: network.endpoint_zones]),
            )

    def _let_through(self, name: str) -> Iterator[iam.PolicyStatement]:
        """Yield what a gateway lets through: identities of this account, and images from ECR.

        It leads to everybody's buckets or tables: what runs here could otherwise carry data away
        with somebody else's keys. What this account's identities may do, their policies say.
        """
        stack, everybody = Stack.of(self), [iam.AnyPrincipal()]
        yield iam.PolicyStatement(
            principals=everybody,
            actions=[f"{name}:*"],
            resources=["*"],
            conditions={"StringEquals": {"aws:PrincipalAccount": stack.account}},
        )
        if name == "s3":
            # ECR keeps the layers of images in a bucket of AWS's, and signs requests for them.
            layers = f"prod-{stack.region}-starport-layer-bucket"
            yield iam.PolicyStatement(
                principals=everybody,
                actions=["s3:GetObject"],
                resources=[f"arn:{stack.partition}:s3:::{layers}/*"],
            )

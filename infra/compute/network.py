"""The workers' VPC: no ingress; internet egress, or VPC endpoints of AWS services only.

An existing VPC is used unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from aws_cdk import Annotations, Aws, CfnMapping, Stack
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_iam as iam
from constructs import Construct

from infra.config import DEFAULT_ZONES, Config

# A subnet has a sixteenth of its VPC's addresses: at most six zones, with two subnets each.
_SUBNET_BITS = 4
_OUT_CIDR_MASK = 28
_GROUP = "Workers"
# S3 and DynamoDB have gateway endpoints, which are free.
_GATEWAYS = {
    "s3": ec2.GatewayVpcEndpointAwsService.S3,
    "dynamodb": ec2.GatewayVpcEndpointAwsService.DYNAMODB,
}
# Other services that a worker calls, and those that ECS calls on its machine.
_SQS = {"Sqs": ec2.InterfaceVpcEndpointAwsService.SQS}
_INSTANCE_ENDPOINTS = {
    "Logs": ec2.InterfaceVpcEndpointAwsService.CLOUDWATCH_LOGS,
    "EcrApi": ec2.InterfaceVpcEndpointAwsService.ECR,
    "EcrImages": ec2.InterfaceVpcEndpointAwsService.ECR_DOCKER,
    "Ecs": ec2.InterfaceVpcEndpointAwsService.ECS,
    "EcsAgent": ec2.InterfaceVpcEndpointAwsService.ECS_AGENT,
    "EcsTelemetry": ec2.InterfaceVpcEndpointAwsService.ECS_TELEMETRY,
}


# Suffix of dual-stack DNS names.
_DUAL_STACK = {
    "aws": "api.aws",
    "aws-cn": "api.amazonwebservices.com.cn",
    "aws-us-gov": "api.aws",
}


class WorkerNetwork(Construct):
    """A `vpc` without inbound access, its `subnets`, and the security `groups` of its workers.

    A public one costs nothing while nothing runs: machines have a public address, and tasks, which
    ECS gives a private one only, reach SQS by IPv6. An isolated one has an endpoint for each
    service, which costs by the hour in each of its zones, and serves the others too; URLs in
    requests are fetched through a NAT gateway if there is one. An existing VPC gets nothing but a
    security group, unless some are configured.

    `environment` contains the variables that workers in it need.
    """

    def __init__(self, scope: Construct, construct_id: str, *, config: Config) -> None:
        super().__init__(scope, construct_id)
        self._config, self._settings = config, config.network
        self._is_public = self._settings.kind == "public"
        if self._settings.kind == "existing":
            self._use_existing()
            return
        self.vpc: ec2.IVpc = self._add_public() if self._is_public else self._add_isolated()
        self.subnets = self.vpc.select_subnets(subnet_group_name=_GROUP).subnets
        workers = self._add_group()
        self.groups: Sequence[ec2.ISecurityGroup] = [workers]
        for name, gateway in _GATEWAYS.items():
            endpoint = self.vpc.add_gateway_endpoint(name.upper(), service=gateway)
            for statement in self._endpoint_policy(name):
                endpoint.add_to_policy(statement)
        if not self._is_public:
            self._add_endpoints(workers)

    @cached_property
    def environment(self) -> Mapping[str, str]:
        """The dual-stack address of SQS, if workers cannot reach the usual one."""
        if not self._is_public:
            return {}
        ends = CfnMapping(
            self, "DualStack", mapping={key: {"suffix": end} for key, end in _DUAL_STACK.items()}
        )
        suffix = ends.find_in_map(Aws.PARTITION, "suffix")
        return {"AWS_ENDPOINT_URL_SQS": f"https://sqs.{Stack.of(self).region}.{suffix}"}

    def _use_existing(self) -> None:
        """Use a VPC that its owner routes, who also decides which destinations tasks may reach."""
        settings = self._settings
        self.vpc = ec2.Vpc.from_vpc_attributes(
            self,
            "Vpc",
            vpc_id=settings.vpc_id,
            availability_zones=Stack.of(self).availability_zones,
        )
        self.subnets = [
            ec2.Subnet.from_subnet_attributes(self, name, subnet_id=name)
            for name in settings.subnet_ids
        ]
        for subnet in self.subnets:  # nothing here adds routes
            Annotations.of(subnet).acknowledge_warning("@aws-cdk/aws-ec2:noSubnetRouteTableId")
        self.groups = [
            ec2.SecurityGroup.from_security_group_id(self, name, name, mutable=False)
            for name in settings.security_group_ids
        ] or [self._add_group()]

    def _add_public(self) -> ec2.Vpc:
        return self._add_vpc(
            ip_protocol=ec2.IpProtocol.DUAL_STACK,
            subnet_configuration=[
                ec2.SubnetConfiguration(
                    name=_GROUP,
                    subnet_type=ec2.SubnetType.PUBLIC,
                    cidr_mask=self._subnet_mask,
                    map_public_ip_on_launch=True,
                )
            ],
        )

    def _add_isolated(self) -> ec2.Vpc:
        has_way_out = self._settings.internet
        workers = ec2.SubnetConfiguration(
            name=_GROUP,
            subnet_type=ec2.SubnetType.PRIVATE_WITH_EGRESS
            if has_way_out
            else ec2.SubnetType.PRIVATE_ISOLATED,
            cidr_mask=self._subnet_mask,
        )
        out = ec2.SubnetConfiguration(
            name="Out",
            subnet_type=ec2.SubnetType.PUBLIC,
            cidr_mask=_OUT_CIDR_MASK,
            map_public_ip_on_launch=False,
        )
        # Addresses are assigned in this order: those of workers stay when a zone is added.
        return self._add_vpc(
            nat_gateways=1 if has_way_out else 0,
            subnet_configuration=[out, workers] if has_way_out else [workers],
        )

    @property
    def _subnet_mask(self) -> int:
        return int(self._settings.cidr.partition("/")[2]) + _SUBNET_BITS

    def _add_vpc(self, **properties: object) -> ec2.Vpc:
        settings = self._settings
        zones = list(settings.zones) or None
        return ec2.Vpc(
            self,
            "Vpc",
            ip_addresses=ec2.IpAddresses.cidr(settings.cidr),
            availability_zones=zones,
            max_azs=None if zones else DEFAULT_ZONES,
            restrict_default_security_group=False,
            **properties,  # type: ignore[arg-type]
        )

    def _add_group(self) -> ec2.SecurityGroup:
        """Add the workers' security group: outbound if the network allows it, never inbound."""
        workers = ec2.SecurityGroup(
            self,
            _GROUP,
            vpc=self.vpc,
            description="Workers and their machines: nothing comes in",
            allow_all_outbound=False,
        )
        # In an isolated network the only routes lead to endpoints, S3 and DynamoDB.
        workers.add_egress_rule(ec2.Peer.any_ipv4(), ec2.Port.tcp(443), "AWS")
        if self._settings.kind != "isolated":
            workers.add_egress_rule(ec2.Peer.any_ipv6(), ec2.Port.tcp(443), "AWS")
            workers.add_egress_rule(ec2.Peer.any_ipv6(), ec2.Port.tcp(80), "Urls in lines")
        if self._settings.internet or self._settings.kind == "existing":
            workers.add_egress_rule(ec2.Peer.any_ipv4(), ec2.Port.tcp(80), "Urls in lines")
        return workers

    def _add_endpoints(self, workers: ec2.SecurityGroup) -> None:
        group = ec2.SecurityGroup(
            self,
            "Endpoints",
            vpc=self.vpc,
            description="Endpoints of AWS services, for workers only",
            allow_all_outbound=False,
        )
        group.add_ingress_rule(workers, ec2.Port.tcp(443), "Workers")
        # SageMaker's own machines pull images and ship logs from a separate network.
        instance_endpoints = {} if self._config.compute == "sagemaker" else _INSTANCE_ENDPOINTS
        for name, service in (_SQS | instance_endpoints).items():
            endpoint = self.vpc.add_interface_endpoint(
                name,
                service=service,
                open=False,
                private_dns_enabled=True,
                security_groups=[group],
                subnets=ec2.SubnetSelection(subnets=self.subnets[: self._settings.endpoint_zones]),
            )
            endpoint.add_to_policy(self._allow_own_account("*"))

    def _allow_own_account(self, actions: str) -> iam.PolicyStatement:
        return iam.PolicyStatement(
            principals=[iam.AnyPrincipal()],
            actions=[actions],
            resources=["*"],
            conditions={"StringEquals": {"aws:PrincipalAccount": Stack.of(self).account}},
        )

    def _endpoint_policy(self, name: str) -> Iterator[iam.PolicyStatement]:
        """Yield a gateway endpoint's policy: identities of this account, and images from ECR.

        The endpoint leads to every account's buckets or tables: with another account's keys, a
        worker could otherwise carry data away. Identities of this account have their own policies.
        """
        stack = Stack.of(self)
        yield self._allow_own_account(f"{name}:*")
        if name == "s3":
            # ECR stores image layers in a bucket of AWS's, and signs requests for them.
            layers = f"prod-{stack.region}-starport-layer-bucket"
            yield iam.PolicyStatement(
                principals=[iam.AnyPrincipal()],
                actions=["s3:GetObject"],
                resources=[f"arn:{stack.partition}:s3:::{layers}/*"],
            )

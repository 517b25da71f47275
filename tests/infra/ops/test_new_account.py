"""The preflight in accounts as AWS describes them: a new one has no GPUs, no roles, ten Lambdas."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import boto3
import pytest
from botocore import xform_name
from botocore.stub import Stubber

from infra.config import make_config
from infra.gpus import num_vcpus
from infra.ops.linked_roles import SERVICES
from infra.ops.preflight.__main__ import deployment_problems
from infra.ops.preflight.quotas import quota_link

G, G_SPOT, P, P_SPOT, P5_SPOT = "L-DB2E81BA", "L-3819A6DF", "L-417A185B", "L-7212CCBC", "L-C4BD4855"
NAMES = {
    G: "Running On-Demand G and VT instances",
    G_SPOT: "All G and VT Spot Instance Requests",
    P: "Running On-Demand P instances",
    P_SPOT: "All P Spot Instance Requests",
    P5_SPOT: "All P5 Spot Instance Requests",
}
JOB, SPOT_JOB = "for training job usage", "for spot training job usage"
ZONES = ("eu-west-1a", "eu-west-1b", "eu-west-1c")
QUOTAS = "https://eu-west-1.console.aws.amazon.com/servicequotas/home/services"
# What an operation answers to its parameters: a response, or the code of an error.
Answer = Callable[[str, Mapping[str, Any]], dict[str, Any] | str]


@dataclass(frozen=True)
class Account:
    """Replies of an account's APIs; by default, those of a new account.

    `quotas` are its own by code or by name, `defaults` AWS's; a quota in neither does not exist.
    `denied` services reply with nothing but the `error`.
    """

    quotas: Mapping[str, int] = field(default_factory=dict)
    defaults: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(NAMES, 0))
    zones: tuple[str, ...] = ZONES
    concurrency: int = 10
    roles: tuple[str, ...] = ()
    denied: tuple[str, ...] = ()
    error: str = "AccessDenied"
    subnets: tuple[str, ...] = ("subnet-01234567",)

    def client(self, service: str) -> Any:
        """Return a client that is answered for each call, by botocore's Stubber: in AWS's form."""
        client = boto3.client(
            service, region_name="eu-west-1", aws_access_key_id="k", aws_secret_access_key="s"
        )
        answers: dict[str, Answer] = {
            "iam": self._roles,
            "ec2": self._ec2,
            "service-quotas": self._quota,
            "lambda": self._concurrency,
        }
        stubber = Stubber(client)

        def prepare(params: Mapping[str, Any], model: Any, **_: Any) -> None:
            found = self.error if service in self.denied else answers[service](model.name, params)
            method = xform_name(model.name)
            if isinstance(found, str):
                stubber.add_client_error(method, found)
            else:
                stubber.add_response(method, found)

        client.meta.events.register_first("before-parameter-build.*.*", prepare)
        stubber.activate()
        return client

    def _concurrency(self, *_: Any) -> dict[str, Any]:
        return {"AccountLimit": {"ConcurrentExecutions": self.concurrency}}

    def _roles(self, _: str, request: Mapping[str, Any]) -> dict[str, Any]:
        found = [service for service in self.roles if f"/{service}/" in request["PathPrefix"]]
        return {"Roles": [_role(service) for service in found]}

    def _ec2(self, operation: str, request: Mapping[str, Any]) -> dict[str, Any] | str:
        if operation == "DescribeAvailabilityZones":
            return {"AvailabilityZones": [{"ZoneName": zone} for zone in ZONES]}
        if operation == "DescribeSubnets":
            if not set(request["SubnetIds"]) <= set(self.subnets):
                return "InvalidSubnetID.NotFound"
            found = {"AvailabilityZone": "eu-west-1a", "VpcId": "vpc-01234567"}
            return {"Subnets": [found | {"SubnetId": name} for name in request["SubnetIds"]]}
        [wanted] = request["Filters"]
        return {
            "InstanceTypeOfferings": [
                {"InstanceType": wanted["Values"][0], "Location": zone} for zone in self.zones
            ]
        }

    def _quota(self, operation: str, request: Mapping[str, Any]) -> dict[str, Any] | str:
        known = self.defaults if "Default" in operation else self.quotas
        if operation.startswith("List"):
            return {"Quotas": [_quota(name, "sagemaker", value) for name, value in known.items()]}
        code = request["QuotaCode"]
        if code not in known:
            return "NoSuchResourceException"
        return {"Quota": _quota(code, "ec2", known[code])}


def _role(service: str) -> dict[str, Any]:
    return {
        "Path": f"/aws-service-role/{service}/",
        "RoleName": "AWSServiceRole",
        "RoleId": "A" * 16,
        "Arn": "arn:aws:iam::111122223333:role/x",
        "CreateDate": datetime(2026, 1, 1, tzinfo=UTC),
    }


def _quota(code: str, service: str, value: int) -> dict[str, Any]:
    name = NAMES.get(code, code)
    return {"ServiceCode": service, "QuotaCode": code, "QuotaName": name, "Value": float(value)}


def jobs(usage: str, *types: str) -> dict[str, int]:
    """Return AWS's defaults of SageMaker, which are 0 by the type and its usage."""
    return {f"ml.{name} {usage}": 0 for name in types}


@dataclass(frozen=True)
class Case:
    """An account, its configuration, the expected refusals and the expected warnings.

    Each expected sentence is given by its significant words, in order.
    """

    account: Account
    config: Mapping[str, Any] = field(default_factory=dict)
    refused: tuple[tuple[str, ...], ...] = ()
    warned: tuple[tuple[str, ...], ...] = ()


def models(*given: Mapping[str, Any]) -> dict[str, Any]:
    """Return models `a`, `b` … of such keys."""
    return {"models": [{"name": chr(97 + n), **keys} for n, keys in enumerate(given)]}


L4, H100 = {"gpu": "l4"}, {"gpu": "h100"}
# An account that lacks nothing but what a case takes from it.
READY: dict[str, Any] = {
    "quotas": dict.fromkeys(NAMES, 1000),
    "concurrency": 1000,
    "roles": SERVICES,
}
NO_ROLES = ("no service-linked role of ecs.amazonaws.com, ecs-compute.amazonaws.com", "bootstrap")
TEN_RUNS = (
    "concurrency limit of this account is 10:",
    "get 8 instead of 155",
    f"{QUOTAS}/lambda/quotas/L-B99A9384",
)
EVERYTHING = ("iam", "ec2", "service-quotas", "lambda")
EXISTING = {"kind": "existing", "vpc_id": "vpc-01234567", "subnet_ids": ["subnet-01234567"]}
CASES = {
    "a new account": Case(
        Account(),
        refused=(
            NO_ROLES,
            (
                NAMES[G],
                "is 0 vCPUs",
                "one worker of a needs 4",
                "Request 8",
                f"{QUOTAS}/ec2/quotas/{G}",
            ),
        ),
        warned=(TEN_RUNS,),
    ),
    "a new account, all kinds of GPUs on Spot": Case(
        Account(),
        models(L4, {"gpu": "t4", "gpus_per_worker": 4}, H100) | {"spot": True},
        refused=(
            ("ecs-compute.amazonaws.com, spot.amazonaws.com",),
            (NAMES[G_SPOT], "one worker of a, b needs 48", "Request 52", G_SPOT),
            (NAMES[P_SPOT], "one worker of c needs 16", "Request 16", P_SPOT),
        ),
        warned=(TEN_RUNS,),
    ),
    "a new account, groups": Case(
        Account(),
        {"compute": "asg"},
        refused=(("role of ecs.amazonaws.com, autoscaling.amazonaws.com",), ("is 0 vCPUs",)),
        warned=(TEN_RUNS,),
    ),
    "a new account, SageMaker": Case(
        Account(defaults=jobs(JOB, "g6.xlarge", "g6.2xlarge")),
        {"compute": "sagemaker"},
        refused=((f"ml.g6.xlarge {JOB}", "is 0 machines", "Request 2", "/sagemaker/quotas/"),),
        warned=(TEN_RUNS,),
    ),
    "SageMaker on Spot, part of the quota": Case(
        Account(
            defaults=jobs(SPOT_JOB, "g6.xlarge", "g6.2xlarge"),
            quotas={f"ml.g6.xlarge {JOB}": 9, f"ml.g6.2xlarge {SPOT_JOB}": 1},
            concurrency=1000,
        ),
        {"compute": "sagemaker", "spot": True},
        warned=((SPOT_JOB, "is 1 machines", "all workers need 2: only 1 of a", "Request 2"),),
    ),
    "all exist": Case(Account(**READY)),
    "SageMaker, and a type that it has no quota of": Case(
        Account(**READY), {"compute": "sagemaker"}
    ),
    "fewer GPUs than configured": Case(
        Account(**READY | {"quotas": {G: 12}}),
        models(L4 | {"max_workers": 2}, {"gpu": "l40s", "max_workers": 2}),
        warned=(
            (NAMES[G], "is 12 vCPUs", "all workers need 16: only 3 of a or 3 of b", "Request 16"),
        ),
    ),
    "P5's own Spot quota": Case(
        Account(**READY | {"quotas": {P_SPOT: 0, P5_SPOT: 192}}), models(H100) | {"spot": True}
    ),
    "reserved machines, and larger ones on Spot": Case(
        Account(**READY | {"quotas": {G_SPOT: 15, P: 0}}),
        models(L4 | {"capacity": "spot", "memory_gib": 40}, H100 | {"capacity": "reserved"}),
        refused=((NAMES[G_SPOT], "is 15 vCPUs", "one worker of a needs 16"),),
    ),
    "no such GPU in the region": Case(
        Account(**READY, zones=()),
        refused=(("eu-west-1 has no machines with 1 × l4 (g6.xlarge,", "another region"),),
    ),
    "a GPU in a zone that the network leaves out": Case(
        Account(**READY, zones=("eu-west-1c",)),
        {"network": {"zones": ["eu-west-1a"]}},
        refused=(("only in eu-west-1c", "covers eu-west-1a", "`zones` in [network]"),),
    ),
    "a GPU in more zones than the network has": Case(
        Account(**READY),
        {"network": {"zones": ["eu-west-1b", "eu-west-1a"]}},
        warned=(("There are also", "l4 (g6.xlarge", "in eu-west-1c"),),
    ),
    "a GPU in no subnet of an existing VPC": Case(
        Account(**READY, zones=("eu-west-1b",)),
        {"network": EXISTING},
        refused=(("only in eu-west-1b", "covers eu-west-1a", "`subnet_ids`"),),
    ),
    "subnets that are not there, also of SageMaker": Case(
        Account(**READY, subnets=()),
        {"network": EXISTING, "compute": "sagemaker"},
        refused=(("`subnet_ids`", "not in eu-west-1", "InvalidSubnetID.NotFound"),),
    ),
    "subnets of another VPC": Case(
        Account(**READY),
        {"network": EXISTING | {"vpc_id": "vpc-76543210"}},
        refused=(("subnet-01234567", "another VPC than vpc-76543210"),),
    ),
    "who may not ask": Case(Account(denied=EVERYTHING)),
    "throttled requests": Case(Account(denied=EVERYTHING, error="ThrottlingException")),
    "a question that AWS refuses": Case(
        Account(**READY, denied=("lambda",), error="InvalidParameterValueException"),
        refused=(("AWS rejects a value", "InvalidParameterValueException"),),
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_missing_quotas_and_roles_are_reported(
    case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error that stops every worker is refused; one that slows a deployment is a warning."""
    demo = models(L4 | {"max_workers": 2})
    config = make_config(demo | dict(case.config), "test")
    problems = deployment_problems(config, case.account.client)
    refused = [line for problem in problems for line in problem.splitlines()]
    warned = capsys.readouterr().out.splitlines()
    for found, wanted in ((refused, case.refused), (warned, case.warned)):
        assert len(found) == len(wanted), found
        for sentence, words in zip(found, wanted, strict=True):
            places = [sentence.find(each) for each in words]
            assert -1 not in places, (sentence, words)
            assert places == sorted(places)


@pytest.mark.parametrize(
    ("region", "host"),
    [
        ("us-gov-west-1", "us-gov-west-1.console.amazonaws-us-gov.com"),
        ("cn-north-1", "cn-north-1.console.amazonaws.cn"),
        ("us-east-1", "us-east-1.console.aws.amazon.com"),
    ],
)
def test_links_are_of_the_partition(region: str, host: str) -> None:
    """Each partition has a separate console."""
    assert (
        quota_link(region, "ec2", G) == f"https://{host}/servicequotas/home/services/ec2/quotas/{G}"
    )


def test_vcpus_are_those_of_the_types() -> None:
    """The size in a type's name determines them, as on EC2's pages."""
    known = {
        "g6.xlarge": 4,
        "g4dn.12xlarge": 48,
        "p4d.24xlarge": 96,
        "p5.4xlarge": 16,
        "p5.48xlarge": 192,
    }
    assert {name: num_vcpus(name) for name in known} == known

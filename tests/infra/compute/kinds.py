"""The kinds of deployments that the Compute stack makes, and its resources by name."""

from __future__ import annotations

import re
from typing import Any

from pydantic import TypeAdapter

from tests.infra.reading import Deployment
from tidemill.batch.fleet import FleetPlan

BIG = {
    "name": "org/Big",
    "gpu": "l4",
    "gpus_per_worker": 4,
    "max_workers": 8,
    "weights": "s3://weights-of-big/models/big",
    "dtype": "bfloat16",
    "kv_cache_dtype": "fp8",
    "quantization": "fp8",
    "args": ["--max-num-seqs", "64"],
}
SMALL = {"name": "small", "gpu": "t4", "weights": "s3://weights-of-small/small/"}
TWO = {"models": [BIG, SMALL]}
GROUPS = TWO | {"compute": "asg"}
SPOT_GROUPS = GROUPS | {"spot": True}
PRICES = {"org/Big": 0.5, "small": 2.0}
PRICED = {"models": [model | {"gpu_hour_price": PRICES[model["name"]]} for model in TWO["models"]]}
SPOT_MANAGED = PRICED | {"spot": True}
ISOLATED = TWO | {"network": "isolated"}
WAY_OUT = GROUPS | {"network": {"kind": "isolated", "internet": True}}
EXISTING = {
    "kind": "existing",
    "vpc_id": "vpc-0123456789abcdef0",
    "subnet_ids": ["subnet-0123456789abcdef0", "subnet-0123456789abcdef1"],
}
GROUPS_OF_OTHERS = ["sg-0123456789abcdef0", "sg-0123456789abcdef1"]
ADAPTERS = [{"name": name, "weights": f"s3://tuned/{name}"} for name in ("sql", "lab/tone")]
SMALL_ADJUSTED = SMALL | {
    "weights_region": "us-west-2",
    "min_workers": 1,
    "min_workers_hours": "Mon-Fri 07:00-18:00",
    "adapters": ADAPTERS,
    "args": ["--lora-modules", "more=/models/more"],
}
PRODUCERS = [
    {"arn": "arn:aws:iam::444455556666:role/partner"},
    {"arn": "arn:aws:iam::444455556666:role/search", "tenant": "search"},
    {"arn": "arn:aws:iam::444455556666:role/second", "tenant": "search"},
]
OIDC = {"issuer": "https://login.example.com", "audience": "a", "tenant_claim": "team"}
REGISTRY = "444455556666.dkr.ecr.eu-west-1.amazonaws.com"
# Keys that do not depend on each other: one deployment shows what each of them changes.
ADJUSTED: dict[str, Any] = {
    "name": "mill-two",
    "image": f"{REGISTRY}/team/tidemill:v1.2",
    "models": [
        BIG,
        SMALL_ADJUSTED,
        {"name": "Qwen/Qwen3-0.6B", "gpu": "l4", "gpu_hour_price": 4},
    ],
    "retention": {"output_days": 0, "work_days": 20, "log_days": 7, "table_days": 30},
    "alarm_messages": "chat",
    "alarm_email": "ops@example.com",
    "drop_tenants": True,
    "producers": PRODUCERS,
    "lambda_concurrency": 10,
    "oidc": OIDC,
    "budget": {"gpu_hours_per_day": 40},
    "limits": {"gpu_hours_per_day": 9},
}
SHORT = {"retention": {"input_days": 3, "output_days": 2, "erase_batches": True}}
SIGNED = {
    "compute": "asg",
    "auth": "iam",
    "tracing": True,
    "models": [{"name": "small", "gpu": "t4", "weights": "s3://weights/small"}],
}
JOBS: dict[str, dict[str, Any]] = {
    "jobs": TWO | {"compute": "sagemaker"},
    "jobs, Spot": TWO
    | {"compute": "sagemaker", "spot": True}
    | {"network": EXISTING | {"security_group_ids": GROUPS_OF_OTHERS}},
    "jobs, isolated": TWO | {"compute": "sagemaker", "network": "isolated"},
}
LARGE = {"name": "large", "gpu": "l4", "memory_gib": 40}
# Jobs of which each differs from those above.
CHANGED_JOBS = JOBS["jobs"] | {
    "models": [BIG | {"dtype": "float16"}, SMALL | {"args": ["--max-num-seqs", "8"]}, LARGE]
}
CERTIFICATE = "arn:aws:acm:eu-west-1:111122223333:certificate/abc"
KEY_OF_WEIGHTS = "arn:aws:kms:us-west-2:111122223333:key/abc"
# Others of that sort, whose values exclude the first ones.
REVISED: dict[str, Any] = {
    "image": f"{REGISTRY}/team/tidemill@sha256:{'0' * 64}",
    "models": [
        SMALL,
        {
            "name": "large",
            "gpu": "l4",
            "weights": "s3://weights/large/v2",
            "adapters": [{"name": "sql", "weights": "s3://tuned/sql/"}],
        },
        {
            "name": "secret",
            "gpu": "l4",
            "weights": "s3://weights/secret",
            "weights_key": KEY_OF_WEIGHTS,
            "weights_region": "us-west-2",
        },
    ],
    "network": {"zones": [f"us-east-1{letter}" for letter in "abcdef"], "cidr": "10.73.0.0/16"},
    "domain": {"name": "llm.example.com", "certificate": CERTIFICATE},
}
# Every kind of deployment: what holds for workers holds in each of them.
KINDS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "managed": TWO,
    "managed, Spot": SPOT_MANAGED,
    "groups": GROUPS,
    "groups, Spot": SPOT_GROUPS,
    "isolated": ISOLATED,
    "isolated, with a way out": WAY_OUT,
}


class Compute(Deployment):
    """All stacks of a configuration, and the Compute stack's resources by type."""

    def plain(self, value: Any) -> Any:
        """Return a value with names in place of references, also within a text."""
        match value:
            case {"Fn::Sub": str(text)}:
                return re.sub(
                    r"\$\{(.+?)\}", lambda found: str(self.plain({"Ref": found[1]})), text
                )
        return super().plain(value)

    def of(self, kind: str) -> dict[str, dict[str, Any]]:
        """Return the properties of the Compute stack's resources of a type."""
        return {
            name.removesuffix(tail): self.plain(resource.get("Properties", {}))
            for name, resource in self.templates["Compute"]["Resources"].items()
            if resource["Type"] == kind
            for tail in [re.search(r"[0-9A-F]{8}$|$", name)[0]]  # type: ignore[index]
        }

    def only(self, kind: str) -> dict[str, Any]:
        """Return the properties of the only resource of a type."""
        [properties] = self.of(kind).values()
        return properties

    def plans(self) -> dict[str, FleetPlan]:
        """Return what Lambdas read of each model's workers, by the model."""
        values = [parameter["Value"] for parameter in self.of("AWS::SSM::Parameter").values()]
        return {plan.model: plan for plan in map(TypeAdapter(FleetPlan).validate_json, values)}

    def task(self, slug: str) -> dict[str, Any]:
        """Return the task definition of a model."""
        return self.of("AWS::ECS::TaskDefinition")[f"Worker{slug.replace('-', '')}Task"]

    def container(self, slug: str) -> dict[str, Any]:
        """Return the only container of a model's tasks."""
        [container] = self.task(slug)["ContainerDefinitions"]
        return dict(container)

    def environment(self, slug: str) -> dict[str, str]:
        """Return the variables that a model's worker gets."""
        return {item["Name"]: item["Value"] for item in self.container(slug)["Environment"]}

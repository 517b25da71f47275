"""A whole deployment: the top level of the file, and checks across its tables."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, Field, StringConstraints
from pydantic import field_validator as field_check
from pydantic import model_validator as model_check

from infra.config.api import Domain, EndpointId, Oidc
from infra.config.data import Budget, Limits, Retention, Reuse, Windows
from infra.config.model import KEY, Capacity, Model
from infra.config.network import Network
from infra.config.producers import Producer
from infra.config.table import Table

_BOUNDARY = r"arn:aws[a-z-]*:iam::([0-9]{12}|aws):policy/[A-Za-z0-9_+=,.@/-]+"
Boundary = Annotated[str, StringConstraints(pattern=rf"^({_BOUNDARY})?$")]
KmsKey = Annotated[str, StringConstraints(pattern=rf"^({KEY})?$")]
RolePath = Annotated[str, StringConstraints(pattern=r"^/([A-Za-z0-9+=,.@_-]{1,64}/){0,7}$")]

# AWS allows 50 tags per resource; the CDK, CloudFormation and Tidemill set some themselves.
_MAX_TAGS: Final = 40
_MAX_KEY, _MAX_VALUE = 128, 256
# Characters that all services allow in tags.
_TEXT: Final = re.compile(r"[\w .:/=+@-]*")
# `tidemill` is the deployment's own tag key: permissions and costs depend on it. IAM compares
# keys without regard to case.
_RESERVED: Final = "tidemill"


def _check_tags(tags: dict[str, str]) -> dict[str, str]:
    if len(tags) > _MAX_TAGS:
        raise ValueError(f"must have at most {_MAX_TAGS} tags")
    keys: dict[str, str] = {}
    for key, value in tags.items():
        if key.lower() == _RESERVED or key.lower().startswith("aws:"):
            raise ValueError(f'has the key "{key}", which is reserved')
        if (other := keys.setdefault(key.lower(), key)) != key:
            raise ValueError(f'has "{other}" and "{key}", which IAM treats as the same key')
        if not 0 < len(key) <= _MAX_KEY or len(value) > _MAX_VALUE:
            raise ValueError(
                f'has "{key}" with a key or value that is too long: a key has 1 to {_MAX_KEY} '
                f"characters, a value at most {_MAX_VALUE}"
            )
        if not _TEXT.fullmatch(key) or not _TEXT.fullmatch(value):
            raise ValueError(
                f'has "{key}" with a character that not every service supports: use letters, '
                "digits, spaces and _ . : / = + - @"
            )
    return tags


Tags = Annotated[dict[str, str], AfterValidator(_check_tags)]


# An image in ECR, the only registry that workers reach, by its tag or its digest.
_IMAGE = (
    r"[0-9]{12}\.dkr\.ecr\.[a-z0-9-]+\.amazonaws\.com(\.cn)?/[a-z0-9][a-z0-9._/-]*"
    r"(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}|@sha256:[0-9a-f]{64})"
)
# Prefixes that capacity providers must not have; theirs begin with the deployment's name.
_PROVIDERS_OF_AWS: Final = ("aws", "ecs", "fargate")
# Keys of the top level that have moved, and their new places.
_MOVED: Final = {"zones": "[network] zones", "isolated": "[network] internet and endpoint_zones"}


class Config(Table):
    """A whole deployment."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-z]([a-z0-9-]{0,22}[a-z0-9])?$")] = (
        "tidemill"
    )
    alarm_email: Annotated[str, StringConstraints(pattern=r"^([^@\s]+@[^@\s]+\.[^@\s]+)?$")] = ""
    compute: Literal["managed-instances", "asg", "sagemaker", "none"] = "managed-instances"
    spot: bool = False
    image: Annotated[str, StringConstraints(pattern=rf"^({_IMAGE})?$")] = ""
    auth: Literal["keys", "iam"] = "keys"
    api: Literal["public", "private", "none"] = "public"
    vpc_endpoint_ids: Annotated[tuple[EndpointId, ...], Field(strict=False)] = ()
    domain: Domain | None = None
    oidc: Oidc | None = None
    strict_endpoint: bool = False
    drop_tenants: bool = False
    producers: Annotated[tuple[Producer, ...], Field(max_length=100, strict=False)] = ()
    currency: Annotated[str, StringConstraints(pattern=r"^[A-Z]{3}$")] = "USD"
    alarm_messages: Literal["text", "chat"] = "text"
    kms_key: KmsKey = ""
    tracing: bool = False
    # The account's limit for functions without reserved concurrency; `make deploy` looks it up.
    lambda_concurrency: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    permissions_boundary: Boundary = ""
    role_path: RolePath = "/"
    # Set on every resource; machines and jobs that start later get theirs from infra/compute.
    tags: Tags = Field(default_factory=dict)
    windows: Windows = Field(default_factory=Windows)
    retention: Retention = Field(default_factory=Retention)
    reuse: Reuse | None = None
    limits: Limits = Field(default_factory=Limits)
    network: Network = Field(default_factory=Network)
    budget: Budget = Field(default_factory=Budget)
    models: Annotated[tuple[Model, ...], Field(min_length=1, strict=False)]

    @field_check("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if name == "default":
            raise ValueError('is "default", which is an event bus and a cluster in every account')
        if name.startswith(_PROVIDERS_OF_AWS):
            raise ValueError(
                f'is "{name}": ECS reserves names of capacity providers that begin with aws, ecs '
                "or fargate"
            )
        return name

    @model_check(mode="before")
    @classmethod
    def _check_moved(cls, found: Any) -> Any:
        """Refuse keys of the top level that have moved."""
        for key, place in _MOVED.items():
            if key in found:
                raise ValueError(f"{key} has moved: set it in {place}")
        return found

    @field_check("network", mode="before")
    @classmethod
    def _read_network(cls, network: Any) -> Any:
        """Accept a string as the kind: `network = "isolated"`."""
        return {"kind": network} if isinstance(network, str) else network

    @field_check("reuse", mode="before")
    @classmethod
    def _read_reuse(cls, reuse: Any) -> Any:
        """Accept `reuse = true` for its defaults."""
        if isinstance(reuse, bool):
            return {} if reuse else None
        if reuse is not None and not isinstance(reuse, dict):
            raise ValueError("must be true, false or a table")
        return reuse

    @field_check("models")
    @classmethod
    def _check_models(cls, models: tuple[Model, ...]) -> tuple[Model, ...]:
        own = {model.name for model in models}
        aliases = [alias for model in models for alias in model.aliases]
        adapters = [adapter.name for model in models for adapter in model.adapters]
        if taken := own & set(aliases):
            raise ValueError(f"has the alias {min(taken)}, which is also the name of a model")
        if taken := {*own, *aliases} & set(adapters):
            raise ValueError(f"has the adapter {min(taken)}, which is also a model or an alias")
        for words, names in (
            ("has a duplicate name:", [model.name for model in models]),
            ("has a duplicate alias:", aliases),
            ("has a duplicate adapter:", adapters),
            ("has names that are the same in AWS:", [model.slug for model in models]),
        ):
            twice = {name for name in names if names.count(name) > 1}
            if twice:
                raise ValueError(f"{words} {min(twice)}")
        return models

    @model_check(mode="after")
    def _check_api(self) -> Self:
        if self.api == "private" and not self.vpc_endpoint_ids:
            raise ValueError(
                'api = "private" requires VPC endpoints for the service execute-api: '
                "list them in vpc_endpoint_ids"
            )
        if self.vpc_endpoint_ids and self.api != "private":
            raise ValueError('vpc_endpoint_ids requires api = "private"')
        if self.domain and self.api != "public":
            raise ValueError('[domain] requires api = "public"')
        if self.oidc and (self.auth != "keys" or self.api == "none"):
            raise ValueError('[oidc] requires an API with auth = "keys"')
        return self

    @model_check(mode="after")
    def _check_producers(self) -> Self:
        named = [producer.tenant for producer in self.producers if producer.tenant]
        if named and not self.drop_tenants:
            raise ValueError(
                f"producers names the tenant {named[0]}, but tenants have folders only with "
                "drop_tenants"
            )
        return self

    @model_check(mode="after")
    def _check_network(self) -> Self:
        if self.network.zones and self.starts_workers and not self.has_network:
            raise ValueError("zones must be empty with SageMaker's public network")
        far = [model.name for model in self.models if model.weights_region]
        if far and self.network.kind == "isolated" and not self.network.internet:
            raise ValueError(
                f"{far[0]} has weights_region, but an isolated network reaches other regions "
                "only with network.internet"
            )
        return self

    @model_check(mode="after")
    def _check_elsewhere(self) -> Self:
        """Refuse settings of workers that run elsewhere: nothing would read them."""
        settings = {
            "spot": self.spot,
            "image": bool(self.image),
            "[network]": self.network != Network(),
        }
        for key, is_set in settings.items():
            if is_set and not self.starts_workers:
                raise ValueError(f'compute = "none" starts no workers, so {key} must not be set')
        return self

    @model_check(mode="after")
    def _check_machines(self) -> Self:
        for number, model in enumerate(self.models, start=1):
            where = f"{model.name} has"
            if self.starts_workers and not model.gpu:
                raise ValueError(f"models[{number}].gpu is required")
            if self.compute == "sagemaker" and self.capacity_of(model) not in {"on-demand", "spot"}:
                raise ValueError(
                    f'{where} capacity = "{model.capacity}", which SageMaker does not support'
                )
            if self.compute != "managed-instances" and model.machine_idle_minutes is not None:
                raise ValueError(
                    f"{where} machine_idle_minutes, which only managed-instances supports"
                )
        return self

    def capacity_of(self, model: Model) -> Capacity:
        """Return the purchase option of a model's machines."""
        return model.capacity or ("spot" if self.spot else "on-demand")

    @property
    def starts_workers(self) -> bool:
        """Return whether the deployment starts workers itself; otherwise they run elsewhere."""
        return self.compute != "none"

    @property
    def has_network(self) -> bool:
        """Return whether workers have a network in the account, and not SageMaker's."""
        return self.starts_workers and (
            self.compute != "sagemaker" or self.network.kind != "public"
        )

    @property
    def lacks_zones(self) -> bool:
        """Return whether the workers' network is created here without named zones."""
        return self.has_network and self.network.kind != "existing" and not self.network.zones

    @property
    def fleets_path(self) -> str:
        """Return the path of the parameters with the fleet plans."""
        # SSM rejects parameters whose names begin with `ssm` or `aws`.
        return f"/tidemill/{self.name}/fleets"

    def fleet_name(self, model: Model) -> str:
        """Return the name of a model's launch configuration, such as its tasks' family."""
        return f"{self.name}-{model.slug}"

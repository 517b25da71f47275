"""A whole deployment: the top level of the file, and what its tables must agree on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints
from pydantic import field_validator as field_check
from pydantic import model_validator as model_check

from infra.config.access import Boundary, RolePath, Tags
from infra.config.data import Limits, Retention, Windows
from infra.config.model import Model
from infra.config.network import Isolated
from infra.config.producers import Producer
from infra.config.table import Table

Zone = Annotated[str, StringConstraints(pattern=r"^[a-z]{2}-[a-z0-9-]+-[0-9]+[a-z]$")]
# In ECR, which is all that workers reach; by its tag or its digest.
_IMAGE = (
    r"[0-9]{12}\.dkr\.ecr\.[a-z0-9-]+\.amazonaws\.com(\.cn)?/[a-z0-9][a-z0-9._/-]*"
    r"(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}|@sha256:[0-9a-f]{64})"
)
# What a network gets that names no zones: CDK knows no more of an account it must not ask.
DEFAULT_ZONES = 2


class Config(Table):
    """A whole deployment."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-z]([a-z0-9-]{0,22}[a-z0-9])?$")] = (
        "tidemill"
    )
    alarm_email: Annotated[str, StringConstraints(pattern=r"^([^@\s]+@[^@\s]+\.[^@\s]+)?$")] = ""
    compute: Literal["managed-instances", "asg", "sagemaker"] = "managed-instances"
    spot: bool = False
    network: Literal["public", "isolated"] = "public"
    zones: Annotated[tuple[Zone, ...], Field(max_length=6, strict=False)] = ()
    image: Annotated[str, StringConstraints(pattern=rf"^({_IMAGE})?$")] = ""
    auth: Literal["keys", "iam"] = "keys"
    strict_endpoint: bool = False
    drop_tenants: bool = False
    producers: Annotated[tuple[Producer, ...], Field(max_length=100, strict=False)] = ()
    currency: Annotated[str, StringConstraints(pattern=r"^[A-Z]{3}$")] = "USD"
    permissions_boundary: Boundary = ""
    role_path: RolePath = "/"
    # On every resource; machines and jobs that start later get theirs from infra/compute.
    tags: Tags = Field(default_factory=dict)
    windows: Windows = Field(default_factory=Windows)
    retention: Retention = Field(default_factory=Retention)
    limits: Limits = Field(default_factory=Limits)
    isolated: Isolated = Field(default_factory=Isolated)
    models: Annotated[tuple[Model, ...], Field(min_length=1, strict=False)]

    @field_check("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if name == "default":
            raise ValueError('is "default", as an event bus and a cluster of every account are')
        return name

    @field_check("network", mode="before")
    @classmethod
    def _check_network(cls, network: object) -> object:
        if isinstance(network, Mapping):
            raise ValueError(  # noqa: TRY004 - pydantic takes these
                'is no table any more: say network = "public" or "isolated" and put zones beside '
                "it, internet and endpoint_zones into [isolated]"
            )
        return network

    @field_check("zones")
    @classmethod
    def _check_zones(cls, zones: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(zones)) < len(zones):
            raise ValueError("names a zone twice")
        return zones

    @field_check("models")
    @classmethod
    def _check_models(cls, models: tuple[Model, ...]) -> tuple[Model, ...]:
        own = {model.name for model in models}
        aliases = [alias for model in models for alias in model.aliases]
        adapters = [adapter.name for model in models for adapter in model.adapters]
        if taken := own & set(aliases):
            raise ValueError(f"has the alias {min(taken)}, which is the name of a model")
        if taken := {*own, *aliases} & set(adapters):
            raise ValueError(f"has the adapter {min(taken)}, as a model or an alias is called")
        for words, names in (
            ("has twice the name", [model.name for model in models]),
            ("has twice the alias", aliases),
            ("has twice the adapter", adapters),
            ("has names that are the same in AWS:", [model.slug for model in models]),
        ):
            twice = {name for name in names if names.count(name) > 1}
            if twice:
                raise ValueError(f"{words} {min(twice)}")
        return models

    @model_check(mode="after")
    def _check_producers(self) -> Self:
        named = [producer.tenant for producer in self.producers if producer.tenant]
        if named and not self.drop_tenants:
            raise ValueError(
                f"producers names the tenant {named[0]}, and tenants have folders with "
                "drop_tenants alone"
            )
        return self

    @model_check(mode="after")
    def _check_isolated(self) -> Self:
        if self.network == "public" and self.isolated != Isolated():
            raise ValueError('[isolated] is of networks that are: say network = "isolated"')
        zones = len(self.zones) or DEFAULT_ZONES
        if self.isolated.endpoint_zones > zones:
            raise ValueError(
                f"isolated.endpoint_zones must be at most {zones}, the zones there are"
            )
        if self.zones and not self.has_network:
            raise ValueError("zones are SageMaker's own choice where the network is public")
        far = [model.name for model in self.models if model.weights_region]
        if far and self.network == "isolated" and not self.isolated.internet:
            raise ValueError(
                f"{far[0]} has weights_region, and an isolated network has a way to other "
                "regions by isolated.internet alone"
            )
        return self

    @property
    def has_network(self) -> bool:
        """Say whether workers have a network of this deployment's, and not SageMaker's."""
        return self.compute != "sagemaker" or self.network == "isolated"

    @property
    def fleets_path(self) -> str:
        """Return the path of the parameters that say how workers are started."""
        # SSM takes no parameter whose name begins with its own or with AWS's.
        return f"/tidemill/{self.name}/fleets"

    def fleet_name(self, model: Model) -> str:
        """Return the name of what a model's workers are started from, such as its tasks' family."""
        return f"{self.name}-{model.slug}"

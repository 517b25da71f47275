"""Launch configuration of Kubernetes Jobs: the `means` of a fleet plan."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")]
Quantity = Annotated[str, StringConstraints(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$")]


class Toleration(BaseModel):
    """Toleration of a pod, in Kubernetes's own format."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str | None = None
    operator: Literal["Exists", "Equal"] | None = None
    value: str | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    tolerationSeconds: int | None = None  # noqa: N815 - Kubernetes' own name


class JobConfig(BaseModel):
    """Settings of a worker's pod; `cpu` and `memory` are both requests and limits.

    `service_account` has the AWS role of workers, by IRSA or EKS Pod Identity; the keys of
    `secrets` become environment variables. `queue_name` is a Kueue LocalQueue.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    image: Annotated[str, StringConstraints(min_length=1)]
    args: tuple[str, ...] = ()
    gpus: Annotated[int, Field(ge=0, le=16)] = 1
    cpu: Quantity | None = None
    memory: Quantity | None = None
    node_selector: dict[str, str] = Field(default_factory=dict)
    tolerations: tuple[Toleration, ...] = ()
    service_account: Name | None = None
    queue_name: Name | None = None
    environment: dict[str, str] = Field(default_factory=dict)
    secrets: tuple[Name, ...] = ()


class KubernetesConfig(JobConfig):
    """Launch configuration of a fleet's Jobs, in one namespace.

    `deployment` (its table) distinguishes deployments that share the namespace.
    """

    namespace: Name
    deployment: str

"""The workers' image: an existing one in ECR, or one built at deployment."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from aws_cdk import Stack
from aws_cdk import aws_ecr as ecr
from aws_cdk import aws_ecs as ecs
from aws_cdk import aws_iam as iam
from aws_cdk.aws_ecr_assets import DockerImageAsset, Platform
from constructs import Construct

from infra.pip_target import ROOT

DOCKERFILE: Final = "container/Dockerfile"


class WorkerImage(Construct):
    """An image at `uri`, which ECS and SageMaker can both pull.

    `existing` names one in ECR by its tag or its digest; without it, `folder` is built by the
    Dockerfile there.
    """

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        existing: str,
        folder: Path = ROOT,
        file: str = DOCKERFILE,
    ) -> None:
        super().__init__(scope, construct_id)
        if existing:
            self._repository, self._tag = self._parse(existing)
            self.uri = existing
        else:
            built = DockerImageAsset(
                self, "Built", directory=str(folder), file=file, platform=Platform.LINUX_AMD64
            )
            self._repository, self._tag = built.repository, built.image_tag
            self.uri = built.image_uri

    def for_ecs(self) -> ecs.ContainerImage:
        """Return the image for a task definition, which gets the permission to pull it."""
        return ecs.ContainerImage.from_ecr_repository(self._repository, self._tag)

    def grant_pull(self, role: iam.IGrantable) -> None:
        """Grant a role the permission to pull the image."""
        self._repository.grant_pull(role)

    def _parse(self, url: str) -> tuple[ecr.IRepository, str]:
        registry, _, named = url.partition("/")
        account, region = registry.split(".")[0], registry.split(".")[3]
        name, _, digest = named.partition("@")
        name, _, tag = name.partition(":")
        arn = f"arn:{Stack.of(self).partition}:ecr:{region}:{account}:repository/{name}"
        repository = ecr.Repository.from_repository_attributes(
            self, "Repository", repository_arn=arn, repository_name=name
        )
        return repository, tag or digest

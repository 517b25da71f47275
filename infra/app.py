"""`python -m infra.app`, which `cdk` runs: from the configuration to the stacks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jsii
from aws_cdk import App, Aspects, CfnOutput, Environment, IAspect, Stack, Tags
from aws_cdk import aws_iam as iam
from constructs import Construct, IConstruct

from infra import permissions
from infra.api.stack import ApiStack
from infra.bundle import Bundle, host_processor, make_bundle
from infra.compute.sagemaker.stack import SageMakerStack
from infra.compute.stack import ComputeStack
from infra.config import (
    DEFAULT_PATH,
    Config,
    ConfigRefused,
    read_config,
    with_aliases,
    with_concurrency,
    with_name,
    with_zones,
)
from infra.dashboard import Dashboard
from infra.data.stack import DataStack
from infra.nag_exceptions import add_checks
from infra.pip_target import LAMBDA_PYTHON, ROOT, python_version


class WorkerPolicies(Construct):
    """Managed policies that are attached to nothing yet, and outputs with the workers' settings.

    They are for roles that the user creates: for service accounts (IRSA, EKS Pod Identity), or for
    any other place in which workers run.
    """

    def __init__(self, scope: Construct, construct_id: str, *, data: DataStack) -> None:
        super().__init__(scope, construct_id)
        stack, name = Stack.of(self), data.config.name
        workers = {
            model.name: iam.ManagedPolicy(
                self,
                f"Worker-{model.slug}",
                description=f"Workers of {model.name} of the deployment {name}",
                statements=permissions.worker_statements(data, model),
            )
            for model in data.config.models
        }
        launcher = iam.ManagedPolicy(
            self,
            "Launcher",
            description=f"The launcher of the workers of the deployment {name}",
            statements=permissions.launcher_statements(data),
        )
        arns = {model: policy.managed_policy_arn for model, policy in workers.items()}
        for output, value in (
            ("WorkerPolicyArns", stack.to_json_string(arns)),
            ("LauncherPolicyArn", launcher.managed_policy_arn),
            ("WorkerEnvironment", stack.to_json_string(data.launcher_settings())),
        ):
            CfnOutput(stack, output, value=value)


def add_stacks(
    app: App,
    config: Config,
    bundle: Bundle,
    image: Path | None = None,
    env: Environment | None = None,
) -> None:
    """Add the stacks of a deployment to the app; without an image folder, no machines."""
    data = DataStack(app, "Data", config=config, stack_name=f"{config.name}-data", env=env)
    api = ApiStack(app, "Api", data=data, bundle=bundle, stack_name=f"{config.name}-api", env=env)
    if not config.starts_workers:
        WorkerPolicies(data, "Policies", data=data)
    elif image is not None:
        kind = SageMakerStack if config.compute == "sagemaker" else ComputeStack
        kind(
            app,
            "Compute",
            data=data,
            api=api,
            image=image,
            stack_name=f"{config.name}-compute",
            env=env,
        )
    if image is not None:
        # Next to the API: if another stack imports the gateway's ID, it can never change.
        Dashboard(api, "Page", data=data, api=api)
    Tags.of(app).add("tidemill", config.name)
    for key, value in config.tags.items():
        Tags.of(app).add(key, value)
    if config.permissions_boundary:
        boundary = iam.ManagedPolicy.from_managed_policy_arn(
            data, "Boundary", config.permissions_boundary
        )
        iam.PermissionsBoundary.of(app).apply(boundary)
    if config.role_path != "/":
        Aspects.of(app).add(RolePath(config.role_path))


@jsii.implements(IAspect)
class RolePath:
    """Puts roles, policies and instance profiles under one path."""

    def __init__(self, path: str) -> None:
        self._path = path

    def visit(self, node: IConstruct) -> None:
        """Set the path of a resource that has one."""
        if isinstance(node, iam.CfnRole | iam.CfnManagedPolicy | iam.CfnInstanceProfile):
            node.path = self._path


def main() -> int:
    """Synthesise the stacks of the context; report a wrong configuration in one sentence."""
    app = App()
    path = Path(app.node.try_get_context("config") or DEFAULT_PATH)
    try:
        config = read_config(path)
        config = with_name(config, app.node.try_get_context("model_name") or "", "model_name")
        more = json.loads(app.node.try_get_context("aliases") or "[]")
        config = with_aliases(config, more, "aliases")
        zones = (app.node.try_get_context("zones") or "").split(",")
        config = with_zones(config, [zone for zone in zones if zone], "zones")
        config = with_concurrency(config, app.node.try_get_context("lambda_concurrency") or "")
    except ConfigRefused as exc:
        sys.stderr.write(f"{exc}\n")
        return 1
    is_local = app.node.try_get_context("local") == "true"
    bundle = make_bundle(
        host_processor() if is_local else "arm64",
        # The emulator runs functions on a Python of this machine.
        python=python_version() if is_local else LAMBDA_PYTHON,
        has_oidc=config.oidc is not None,
    )
    try:
        add_stacks(app, config, bundle, None if is_local else ROOT)
    except ConfigRefused as exc:
        sys.stderr.write(f"{path}: {exc}\n")
        return 1
    add_checks(app)
    app.synth()
    return 0


if __name__ == "__main__":
    sys.exit(main())

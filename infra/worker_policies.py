"""Policies for workers that run elsewhere, such as on Kubernetes, and for their launcher."""

from __future__ import annotations

from aws_cdk import CfnOutput, Stack
from aws_cdk import aws_iam as iam
from constructs import Construct

from infra import permissions
from infra.data.stack import DataStack


class WorkerPolicies(Construct):
    """Managed policies that nothing has yet, and outputs of all that such workers must know.

    They are for roles of another's making: of service accounts (IRSA, EKS Pod Identity), or of
    whatever else runs workers.
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

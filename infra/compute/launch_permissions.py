"""IAM statements for starting, listing and stopping workers as ECS tasks."""

from __future__ import annotations

from collections.abc import Sequence

from aws_cdk import ArnFormat, Stack
from aws_cdk import aws_ecs as ecs
from aws_cdk import aws_iam as iam

from infra.compute.worker import WorkerTask
from infra.permissions import allow


def run_tasks(cluster: ecs.ICluster, tasks: Sequence[WorkerTask]) -> list[iam.PolicyStatement]:
    """Return the rights to start, list and stop workers as tasks of one cluster."""
    stack = Stack.of(cluster)
    in_cluster = {"ArnEquals": {"ecs:cluster": cluster.cluster_arn}}
    running = stack.format_arn(
        service="ecs", resource="task", resource_name=f"{cluster.cluster_name}/*"
    )
    families = [
        stack.format_arn(
            service="ecs", resource="task-definition", resource_name=f"{task.task.family}:*"
        )
        for task in tasks
    ]
    return [
        allow(["ecs:RunTask"], families, in_cluster),
        allow(["ecs:TagResource"], [running], {"StringEquals": {"ecs:CreateAction": "RunTask"}}),
        # AWS knows no resource for a list of tasks.
        allow(["ecs:ListTasks"], ["*"], in_cluster),
        allow(["ecs:DescribeTasks", "ecs:StopTask"], [running], in_cluster),
        allow(
            ["iam:PassRole"],
            [role.role_arn for task in tasks for role in (task.role, task.execution_role)],
            {"StringEquals": {"iam:PassedToService": "ecs-tasks.amazonaws.com"}},
        ),
        # The last words of a worker that has ended.
        allow(
            ["logs:GetLogEvents"],
            [
                stack.format_arn(
                    service="logs",
                    resource="log-group",
                    resource_name=f"{task.logs.log_group_name}:log-stream:*",
                    arn_format=ArnFormat.COLON_RESOURCE_NAME,
                )
                for task in tasks
            ],
        ),
    ]

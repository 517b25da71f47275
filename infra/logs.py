"""Log groups: kept for as long as the configuration says, gone with their stack."""

from __future__ import annotations

from aws_cdk import RemovalPolicy
from aws_cdk import aws_logs as logs
from constructs import Construct


def log_group(scope: Construct, construct_id: str, *, days: int) -> logs.LogGroup:
    """Return a new log group."""
    group = logs.LogGroup(scope, construct_id, removal_policy=RemovalPolicy.DESTROY)
    resource = group.node.default_child
    assert isinstance(resource, logs.CfnLogGroup)
    resource.retention_in_days = days
    return group

"""Alarms: each description has the meaning and refers to docs/guides/operate.md."""

from __future__ import annotations

from aws_cdk import RemovalPolicy
from aws_cdk import aws_cloudwatch as cloudwatch
from aws_cdk import aws_cloudwatch_actions as actions
from aws_cdk import aws_kms as kms
from aws_cdk import aws_logs as logs
from aws_cdk import aws_sns as sns
from constructs import Construct


def add_alarm(
    scope: Construct,
    construct_id: str,
    *,
    topic: sns.ITopic,
    metric: cloudwatch.IMetric,
    above: float,
    periods: int,
    description: str,
) -> cloudwatch.Alarm:
    """Add an alarm on the topic for a metric above a value for `periods` in a row.

    Missing data is fine: most of these metrics exist only while something happens.
    """
    alarm = cloudwatch.Alarm(
        scope,
        construct_id,
        metric=metric,
        threshold=above,
        comparison_operator=cloudwatch.ComparisonOperator.GREATER_THAN_THRESHOLD,
        evaluation_periods=periods,
        treat_missing_data=cloudwatch.TreatMissingData.NOT_BREACHING,
        alarm_description=f"{description} See docs/guides/operate.md.",
    )
    alarm.add_alarm_action(actions.SnsAction(topic))
    return alarm


def log_group(
    scope: Construct,
    construct_id: str,
    *,
    days: int,
    key: kms.IKey | None = None,
    name: str | None = None,
) -> logs.LogGroup:
    """Return a new log group, encrypted by the key if there is one."""
    group = logs.LogGroup(
        scope,
        construct_id,
        log_group_name=name,
        encryption_key=key,
        removal_policy=RemovalPolicy.DESTROY,
    )
    resource = group.node.default_child
    assert isinstance(resource, logs.CfnLogGroup)
    resource.retention_in_days = days
    return group

"""Who is told of a worker that ends badly, within minutes: ECS's own events say so."""

from __future__ import annotations

from typing import Any

from aws_cdk import aws_ecs as ecs
from aws_cdk import aws_events as events
from aws_cdk import aws_events_targets as targets
from aws_cdk import aws_sns as sns
from constructs import Construct

# A worker that is stopped, or idle, ends with 0; one that is stopped before it can hear that, 143.
_GOOD_EXITS = [0, 143]
# The machine goes: what a worker has of its two minutes is no fault of its own.
_TAKEN_AWAY = ["SpotInterruption", "TerminationNotice"]


class BadEnds(Construct):
    """Tells the topic of each task of a cluster that died, did not start, or was not healthy."""

    def __init__(
        self, scope: Construct, construct_id: str, *, cluster: ecs.ICluster, topic: sns.ITopic
    ) -> None:
        super().__init__(scope, construct_id)
        self._cluster, self._topic = cluster, topic
        group = events.EventField.from_path("$.detail.group")
        reason = events.EventField.from_path("$.detail.stoppedReason")
        code = events.EventField.from_path("$.detail.containers[0].exitCode")
        self._tell(
            "Died",
            f"A worker of {group} has ended with status {code}: {reason}. See docs/operate.md.",
            {
                "stopCode": [{"anything-but": _TAKEN_AWAY}],
                "containers": {"exitCode": [{"anything-but": _GOOD_EXITS}]},
            },
        )
        self._tell(
            "Unfit",
            f"A worker of {group} did not start, or was not healthy: {reason}. "
            "See docs/operate.md.",
            {
                "$or": [
                    {"stopCode": ["TaskFailedToStart"]},
                    {"stoppedReason": [{"prefix": "Task failed container health checks"}]},
                ]
            },
        )

    def _tell(self, name: str, words: str, detail: dict[str, Any]) -> None:
        rule = events.Rule(
            self,
            name,
            description="A worker that ended badly",
            event_pattern=events.EventPattern(
                source=["aws.ecs"],
                detail_type=["ECS Task State Change"],
                detail={
                    "clusterArn": [self._cluster.cluster_arn],
                    "lastStatus": ["STOPPED"],
                    **detail,
                },
            ),
        )
        rule.add_target(
            targets.SnsTopic(self._topic, message=events.RuleTargetInput.from_text(words))
        )

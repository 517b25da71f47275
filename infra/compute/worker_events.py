"""Event rules that send worker exits and draining instances to the control queue."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aws_cdk import aws_events as events
from aws_cdk import aws_events_targets as targets
from aws_cdk import aws_sqs as sqs
from constructs import Construct

from infra.data.stack import DataStack


class WorkerEventRules(Construct):
    """Sends events to the control queue as they are; the handler judges them.

    `detail_of` maps what tells of an end to what its details must be. The queue's policy knows the
    rules by their names (`infra.data.stack`), which is why they have some.
    """

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        data: DataStack,
        source: str,
        detail_of: Mapping[str, Mapping[str, Any]],
    ) -> None:
        super().__init__(scope, construct_id)
        control = sqs.Queue.from_queue_arn(self, "Control", data.queues.control.queue_arn)
        for number, (kind, detail) in enumerate(detail_of.items(), start=1):
            events.Rule(
                self,
                f"Rule{number}",
                rule_name=f"{data.config.name}-ends-{number}",
                description=f"{kind}: what it means for workers",
                event_pattern=events.EventPattern(
                    source=[source], detail_type=[kind], detail=detail
                ),
                targets=[targets.SqsQueue(control)],
            )

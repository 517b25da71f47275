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
    """Forwards events to the control queue unchanged; the handler interprets them.

    `detail_of` maps the kinds of events about ends to the details that they must have. The queue's
    policy refers to the rules by name (`infra.data.stack`), which is why they are named.
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

"""The event bus for batch statuses, and the SNS topic for alarms."""

from __future__ import annotations

from aws_cdk import aws_events as events
from aws_cdk import aws_events_targets as targets
from aws_cdk import aws_iam as iam
from aws_cdk import aws_kms as kms
from aws_cdk import aws_sns as sns
from aws_cdk import aws_sns_subscriptions as subscriptions
from aws_cdk import aws_sqs as sqs
from constructs import Construct

from infra.config import Config
from tidemill.batch.states import Status
from tidemill.handler.aws.events import DETAIL_TYPE, SOURCE

_BAD_ENDS = [str(Status.FAILED), str(Status.EXPIRED)]


class BatchEvents(Construct):
    """A `bus` that carries every batch's statuses, and a `topic` for alarms and bad ends."""

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        config: Config,
        key: kms.IKey | None,
        undeliverable: sqs.Queue,
    ) -> None:
        super().__init__(scope, construct_id)
        # The name that CDK would make up is the same for every deployment of an account.
        self.bus = events.EventBus(self, "Bus", event_bus_name=config.name)
        self.topic = sns.Topic(self, "Alarms", enforce_ssl=True, master_key=key)
        if config.alarm_email:
            self.topic.add_subscription(subscriptions.EmailSubscription(config.alarm_email))
        ended_badly = events.Rule(
            self,
            "EndedBadly",
            event_bus=self.bus,
            description="A batch that failed or expired",
            event_pattern=events.EventPattern(
                source=[SOURCE], detail_type=[DETAIL_TYPE], detail={"status": _BAD_ENDS}
            ),
        )
        ended_badly.add_target(
            targets.SnsTopic(
                self.topic,
                dead_letter_queue=undeliverable,
                message=_message(is_chat=config.alarm_messages == "chat"),
            )
        )
        self.topic.add_to_resource_policy(
            iam.PolicyStatement(
                sid="AlarmsPublish",
                principals=[iam.ServicePrincipal("cloudwatch.amazonaws.com")],
                actions=["sns:Publish"],
                resources=[self.topic.topic_arn],
                conditions={"StringEquals": {"aws:SourceAccount": self.topic.stack.account}},
            )
        )


def _message(*, is_chat: bool) -> events.RuleTargetInput:
    """Return a sentence, or what Amazon Q Developer shows of it in chat applications.

    Alarms of CloudWatch need nothing: it knows their form.
    """
    batch, source, status = (
        events.EventField.from_path(f"$.detail.{name}") for name in ("batch_id", "input", "status")
    )
    words = f"Batch {batch} of {source} is {status}."
    if not is_chat:
        return events.RuleTargetInput.from_text(words)
    content = {"textType": "client-markdown", "title": f"Batch {status}", "description": words}
    return events.RuleTargetInput.from_object(
        {"version": "1.0", "source": "custom", "content": content}
    )

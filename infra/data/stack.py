"""The Data stack: everything that must survive a redeployment, and its alarms."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from aws_cdk import CfnOutput, Duration, Stack
from aws_cdk import aws_events as events
from aws_cdk import aws_events_targets as targets
from aws_cdk import aws_iam as iam
from aws_cdk import aws_kms as kms
from aws_cdk import aws_sns as sns
from aws_cdk import aws_sns_subscriptions as subscriptions
from aws_cdk import aws_sqs as sqs
from constructs import Construct

from infra.config import Config, Model
from infra.data.bucket import DropBucket
from infra.data.table import BatchTable
from infra.monitoring import add_alarm
from tidemill.batch.states import Status
from tidemill.handler.aws.events import DETAIL_TYPE, SOURCE
from tidemill.handler.aws.queues import LAMBDA_SECONDS, MAX_CONTROL_RECEIVES

# How long a queue reuses a KMS data key; at five minutes, the default, idle queues cost dollars.
_DATA_KEY_REUSE = Duration.hours(1)
# A queue that calls a Lambda function must hide a message for longer than it runs.
_LAMBDA_VISIBILITY = Duration.seconds(LAMBDA_SECONDS + 60)
# A worker renews its messages; this is the time between receipt and first renewal.
_WORK_VISIBILITY = Duration.seconds(60)
# Failures are counted in the table, without waiting: a message gets a few additional receives.
_MAX_WORK_RECEIVES = 5
_DEAD_LETTER_SECONDS = 6 * 60
# Long enough for a day's outage: a failed upload is recorded only in its message.
_MAX_DEAD_LETTER_RECEIVES = 24 * 3600 // _DEAD_LETTER_SECONDS

# The maximum: shards of a batch wait their turn here, and an upload is recorded only in its
# message until that is processed.
_RETENTION = Duration.days(14)


class Queues(Construct):
    """`control`, `intake`, `drops`, `work` (one per model, by its name) and their `dead_letters`.

    Uploads to the bucket and ranges of files have separate queues, so that many of them do not
    delay a cancel. S3's events have no message group: a fair queue delivers them first.
    """

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        models: Iterable[Model],
        key: kms.IKey | None,
    ) -> None:
        super().__init__(scope, construct_id)
        self._key = key
        # Messages that even the handler cannot process stay here for a person, and raise an alarm.
        self.undeliverable = self._queue("Undeliverable")
        self.dead_letters = self._queue(
            "DeadLetters",
            visibility_timeout=Duration.seconds(_DEAD_LETTER_SECONDS),
            dead_letter_queue=sqs.DeadLetterQueue(
                queue=self.undeliverable, max_receive_count=_MAX_DEAD_LETTER_RECEIVES
            ),
        )
        self.control, self.intake, self.drops = (
            self._queue(
                name,
                visibility_timeout=_LAMBDA_VISIBILITY,
                dead_letter_queue=sqs.DeadLetterQueue(
                    queue=self.dead_letters, max_receive_count=MAX_CONTROL_RECEIVES
                ),
            )
            for name in ("Control", "Intake", "Drops")
        )
        self.work = {
            model.name: self._queue(
                f"Work-{model.slug}",
                visibility_timeout=_WORK_VISIBILITY,
                dead_letter_queue=sqs.DeadLetterQueue(
                    queue=self.dead_letters, max_receive_count=_MAX_WORK_RECEIVES
                ),
            )
            for model in models
        }

    def _queue(
        self,
        construct_id: str,
        *,
        visibility_timeout: Duration | None = None,
        dead_letter_queue: sqs.DeadLetterQueue | None = None,
    ) -> sqs.Queue:
        return sqs.Queue(
            self,
            construct_id,
            encryption=sqs.QueueEncryption.KMS if self._key else sqs.QueueEncryption.SQS_MANAGED,
            encryption_master_key=self._key,
            data_key_reuse=_DATA_KEY_REUSE if self._key else None,
            enforce_ssl=True,
            visibility_timeout=visibility_timeout,
            retention_period=_RETENTION,
            dead_letter_queue=dead_letter_queue,
        )


_BAD_ENDS = [str(Status.FAILED), str(Status.EXPIRED)]


class BatchEvents(Construct):
    """A `bus` with every batch's status changes, and a `topic` for alarms and failed batches."""

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
        # The CDK's generated name would be the same for every deployment of an account.
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
    """Return a sentence, or a message that Amazon Q Developer shows in chat applications.

    CloudWatch alarms need no conversion.
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


_MINUTE = Duration.minutes(1)


class DataStack(Stack):
    """Bucket, table, queues and events of one deployment, for the other stacks to use."""

    def __init__(
        self, scope: Construct, construct_id: str, *, config: Config, **stack: Any
    ) -> None:
        super().__init__(scope, construct_id, **stack)
        self.config = config
        # The user's key; its policy must allow AWS services: docs/reference/configuration.md.
        self.key = kms.Key.from_key_arn(self, "Key", config.kms_key) if config.kms_key else None
        self.queues = Queues(self, "Doorbells", models=config.models, key=self.key)
        drops = DropBucket(
            self,
            "Drops",
            retention=config.retention,
            reuse=config.reuse,
            drops=self.queues.drops,
            key=self.key,
        )
        drops.let_in(config.producers)
        self.bucket = drops.bucket
        self._allow_worker_events()
        # In an older version the bucket sends uploads to this queue: that must stop first.
        self.queues.control.node.find_child("Policy").node.add_dependency(self.bucket)
        self.table = BatchTable(self, "Batches", key=self.key).table
        events = BatchEvents(
            self,
            "Events",
            config=config,
            key=self.key,
            undeliverable=self.queues.undeliverable,
        )
        self.bus, self.topic = events.bus, events.topic
        self._add_alarms()
        self._add_outputs()

    def settings(self) -> dict[str, str]:
        """Return the variables that `handler.settings` reads, for every Lambda."""
        return {
            **self._settings_for(self.config.models),
            "TIDEMILL_INTAKE_QUEUE": self.queues.intake.queue_url,
            "TIDEMILL_DROPS_QUEUE": self.queues.drops.queue_url,
            "TIDEMILL_GPU_HOURS_PER_DAY": str(self.config.budget.gpu_hours_per_day),
            **({"TIDEMILL_ERASE_BATCHES": "1"} if self.config.retention.erase_batches else {}),
            **({"TIDEMILL_DROP_TENANTS": "1"} if self.config.drop_tenants else {}),
            "TIDEMILL_FLEETS": self.config.fleets_path,
        }

    def worker_settings(self, model: Model) -> dict[str, str]:
        """Return the variables of a model's workers: a Lambda's, without those of other models."""
        return self._settings_for([model]) | self._reuse_settings()

    def launcher_settings(self) -> dict[str, str]:
        """Return the variables of a launcher outside of the deployment, and of its workers."""
        return {
            **self._settings_for(self.config.models),
            **self._reuse_settings(),
            "TIDEMILL_GPU_HOURS_PER_DAY": str(self.config.budget.gpu_hours_per_day),
            "AWS_REGION": self.region,
        }

    def _reuse_settings(self) -> dict[str, str]:
        if (reuse := self.config.reuse) is None:
            return {}
        return {
            "TIDEMILL_REUSE": "1",
            "TIDEMILL_REUSE_SAMPLED": str(int(reuse.sampled)),
            "TIDEMILL_REUSE_MAX_SIZE": str(reuse.max_gib * 2**30),
        }

    def _settings_for(self, models: Sequence[Model]) -> dict[str, str]:
        config = self.config
        queues = self.queues.work
        return {
            "TIDEMILL_BUCKET": self.bucket.bucket_name,
            "TIDEMILL_TABLE": self.table.table_name,
            "TIDEMILL_CONTROL_QUEUE": self.queues.control.queue_url,
            "TIDEMILL_WORK_QUEUES": self.to_json_string(
                {model.name: queues[model.name].queue_url for model in models}
            ),
            "TIDEMILL_MODEL_ALIASES": json.dumps(
                {alias: model.name for model in models for alias in model.aliases}
            ),
            "TIDEMILL_MODEL_ADAPTERS": json.dumps(
                {own.name: model.name for model in models for own in model.adapters}
            ),
            "TIDEMILL_EVENT_BUS": self.bus.event_bus_name,
            "TIDEMILL_AUTH": config.auth,
            "TIDEMILL_STRICT_ENDPOINT": str(int(config.strict_endpoint)),
            "TIDEMILL_GPU_HOUR_PRICES": json.dumps(
                {model.name: model.gpu_hour_price for model in models if model.gpu_hour_price}
            ),
            "TIDEMILL_CURRENCY": config.currency,
            "TIDEMILL_LIMITS": config.limits.model_dump_json(),
            "TIDEMILL_DEFAULT_WINDOW": config.windows.default,
            "TIDEMILL_FILE_DAYS": str(config.retention.file_days),
            "TIDEMILL_KEEP_DAYS": str(config.retention.table_days),
        }

    def _allow_worker_events(self) -> None:
        """Allow event rules of this deployment to send worker events to the control queue.

        The rules are in other stacks, so the queue's only policy refers to them by name.
        """
        rules = self.format_arn(
            service="events", resource="rule", resource_name=f"{self.config.name}-*"
        )
        self.queues.control.add_to_resource_policy(
            iam.PolicyStatement(
                principals=[iam.ServicePrincipal("events.amazonaws.com")],
                actions=["sqs:SendMessage"],
                resources=[self.queues.control.queue_arn],
                conditions={
                    "StringEquals": {"aws:SourceAccount": self.account},
                    "ArnLike": {"aws:SourceArn": rules},
                },
            )
        )

    def _add_alarms(self) -> None:
        queues = self.queues
        add_alarm(
            self,
            "UndeliverableAlarm",
            topic=self.topic,
            metric=queues.undeliverable.metric_approximate_number_of_messages_visible(
                period=_MINUTE, statistic="Maximum"
            ),
            above=0,
            periods=1,
            description="A message that even the handler of dead letters could not process.",
        )
        add_alarm(
            self,
            "DeadLetterAlarm",
            topic=self.topic,
            # Not their number: a message that is retried is hidden nearly all the time.
            metric=queues.dead_letters.metric_approximate_age_of_oldest_message(
                period=_MINUTE, statistic="Maximum"
            ),
            above=10 * 60,
            periods=1,
            description="Dead letters are not being processed.",
        )
        for name, queue, words in (
            ("ControlAgeAlarm", queues.control, "batches do not advance"),
            ("IntakeAgeAlarm", queues.intake, "files are not being read"),
            ("DropsAgeAlarm", queues.drops, "uploads do not become batches"),
        ):
            add_alarm(
                self,
                name,
                topic=self.topic,
                metric=queue.metric_approximate_age_of_oldest_message(
                    period=_MINUTE, statistic="Maximum"
                ),
                above=30 * 60,
                periods=5,
                description=f"A message has waited for half an hour: {words}.",
            )

    def _add_outputs(self) -> None:
        for name, value in (
            ("BucketName", self.bucket.bucket_name),
            ("TableName", self.table.table_name),
            ("ControlQueueUrl", self.queues.control.queue_url),
            ("IntakeQueueUrl", self.queues.intake.queue_url),
            ("DropsQueueUrl", self.queues.drops.queue_url),
            ("WorkQueueUrls", self.settings()["TIDEMILL_WORK_QUEUES"]),
            ("FleetsPath", self.config.fleets_path),
            ("DeadLetterQueueUrl", self.queues.dead_letters.queue_url),
            ("UndeliverableQueueUrl", self.queues.undeliverable.queue_url),
            ("EventBusName", self.bus.event_bus_name),
            ("AlarmTopicArn", self.topic.topic_arn),
        ):
            CfnOutput(self, name, value=value)

"""The Data stack: everything that must survive a redeployment, and its alarms."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from aws_cdk import CfnOutput, Duration, Stack
from aws_cdk import aws_iam as iam
from aws_cdk import aws_kms as kms
from constructs import Construct

from infra.config import Config, Model
from infra.data.bucket import DropBucket
from infra.data.events import BatchEvents
from infra.data.queues import Queues
from infra.data.table import BatchTable
from infra.monitoring import add_alarm

_MINUTE = Duration.minutes(1)


class DataStack(Stack):
    """Bucket, table, queues and events of one deployment, for the other stacks to use."""

    def __init__(
        self, scope: Construct, construct_id: str, *, config: Config, **stack: Any
    ) -> None:
        super().__init__(scope, construct_id, **stack)
        self.config = config
        # The user's own, whose policy lets AWS's services use it: docs/deploy.md.
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
        # Of an older version the bucket sends uploads to this queue: it stops first.
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
        """Return the variables of a model's workers: those of a Lambda, of other models nothing."""
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

        They stand in other stacks, so the queue's one policy knows them by their name.
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
            description="A message that even the handler of dead letters could not deal with.",
        )
        add_alarm(
            self,
            "DeadLetterAlarm",
            topic=self.topic,
            # Not their number: one that is tried again and again is hidden nearly all the time.
            metric=queues.dead_letters.metric_approximate_age_of_oldest_message(
                period=_MINUTE, statistic="Maximum"
            ),
            above=10 * 60,
            periods=1,
            description="Dead letters are not being dealt with.",
        )
        for name, queue, words in (
            ("ControlAgeAlarm", queues.control, "what batches wait for is stuck"),
            ("IntakeAgeAlarm", queues.intake, "files are not being read"),
            ("DropsAgeAlarm", queues.drops, "uploads become no batches"),
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
                description=f"A message has waited for half an hour to be handled: {words}.",
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
            ("EventBusName", self.bus.event_bus_name),
            ("AlarmTopicArn", self.topic.topic_arn),
        ):
            CfnOutput(self, name, value=value)

"""SQS queues of the Lambdas and of each model's workers, and their dead-letter queues."""

from __future__ import annotations

from collections.abc import Iterable

from aws_cdk import Duration
from aws_cdk import aws_kms as kms
from aws_cdk import aws_sqs as sqs
from constructs import Construct

from infra.config import Model
from tidemill.handler.aws.queues import LAMBDA_SECONDS, MAX_CONTROL_RECEIVES

# A queue asks KMS for a key so often; at five minutes, the default, idle queues cost dollars.
_DATA_KEY_REUSE = Duration.hours(1)
# A queue that calls a Lambda function must hide a message for longer than it runs.
_LAMBDA_VISIBILITY = Duration.seconds(LAMBDA_SECONDS + 60)
# A worker renews its messages; this is what a message has between receipt and first renewal.
_WORK_VISIBILITY = Duration.seconds(60)
# Failures are counted in the table, where waiting is none: a message gets some receipts more.
_MAX_WORK_RECEIVES = 5
_DEAD_LETTER_SECONDS = 6 * 60
# Through the outage of a day: an upload that died is known to nobody else.
_MAX_DEAD_LETTER_RECEIVES = 24 * 3600 // _DEAD_LETTER_SECONDS

# The longest there is: shards of a batch wait their turn here, and an upload is known to nobody
# else until its message is dealt with.
_RETENTION = Duration.days(14)


class Queues(Construct):
    """`control`, `intake`, `drops`, `work` (one a model, by its name) and their `dead_letters`.

    Uploads to the bucket and files that are read have queues of their own, so that many of them
    stop no cancel. S3's events are in no message group: a fair queue hands them out first.
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
        # What even its own handler cannot deal with stays here for a person, and raises an alarm.
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

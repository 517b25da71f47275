"""Creates a deployment's resources on an emulator: bucket, table, queues, notifications.

It uses the same names and shapes as the CDK app; for tests and benchmarks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import boto3

from tidemill.handler.aws.queues import MAX_CONTROL_RECEIVES

_MAX_WORK_RECEIVES = 5
# Browsers upload files by presigned URLs.
BROWSERS = {"AllowedMethods": ["PUT"], "AllowedOrigins": ["*"]}


@dataclass(frozen=True, slots=True)
class Resources:
    """One deployment on an emulator; queue fields are URLs, `work` maps models to them."""

    bucket: str
    table: str
    control: str
    intake: str
    drops: str
    dead_letters: str
    work: Mapping[str, str]

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables that `handler.settings` reads."""
        return {
            "TIDEMILL_BUCKET": self.bucket,
            "TIDEMILL_TABLE": self.table,
            "TIDEMILL_CONTROL_QUEUE": self.control,
            "TIDEMILL_INTAKE_QUEUE": self.intake,
            "TIDEMILL_DROPS_QUEUE": self.drops,
            "TIDEMILL_WORK_QUEUES": json.dumps(dict(self.work)),
        }


def create_resources(
    endpoint_url: str,
    *,
    prefix: str,
    models: Sequence[str],
    control_visibility_seconds: int = 60,
    work_visibility_seconds: int = 60,
) -> Resources:
    """Create the resources, or find existing ones under the same prefix."""
    sqs, s3, dynamodb = (_client(endpoint_url, name) for name in ("sqs", "s3", "dynamodb"))
    dead_letters = _create_queue(sqs, f"{prefix}-dead-letters", {"VisibilityTimeout": "60"})
    dead_letters_arn = _arn(sqs, dead_letters)

    def queue(name: str, visibility_seconds: int, max_receives: int) -> str:
        redrive = {"deadLetterTargetArn": dead_letters_arn, "maxReceiveCount": max_receives}
        attributes = {
            "VisibilityTimeout": str(visibility_seconds),
            "RedrivePolicy": json.dumps(redrive),
        }
        return _create_queue(sqs, f"{prefix}-{name}", attributes)

    control, intake, drops = (
        queue(name, control_visibility_seconds, MAX_CONTROL_RECEIVES)
        for name in ("control", "intake", "drops")
    )
    work = {
        model: queue(f"work-{model}", work_visibility_seconds, _MAX_WORK_RECEIVES)
        for model in models
    }
    _create_table(dynamodb, prefix)
    s3.create_bucket(Bucket=prefix)
    s3.put_bucket_versioning(Bucket=prefix, VersioningConfiguration={"Status": "Enabled"})
    s3.put_bucket_cors(Bucket=prefix, CORSConfiguration={"CORSRules": [BROWSERS]})
    s3.put_bucket_notification_configuration(
        Bucket=prefix, NotificationConfiguration=_notifications(_arn(sqs, drops))
    )
    return Resources(prefix, prefix, control, intake, drops, dead_letters, work)


# Tests create a thousand deployments, and creating a client takes longer than its calls.
@cache
def _client(endpoint_url: str, service: str) -> Any:
    return boto3.client(
        service,
        endpoint_url=endpoint_url,
        region_name="us-east-1",
        aws_access_key_id="test",
        aws_secret_access_key="test",
    )


def _create_queue(sqs: Any, name: str, attributes: Mapping[str, str]) -> str:
    url: str = sqs.create_queue(QueueName=name, Attributes=attributes)["QueueUrl"]
    return url


def _arn(sqs: Any, url: str) -> str:
    found = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["QueueArn"])
    arn: str = found["Attributes"]["QueueArn"]
    return arn


def _create_table(dynamodb: Any, name: str) -> None:
    strings = ("pk", "sk", "tenant", "created_id")
    try:
        dynamodb.create_table(
            TableName=name,
            BillingMode="PAY_PER_REQUEST",
            AttributeDefinitions=[
                {"AttributeName": field, "AttributeType": "S"} for field in strings
            ],
            KeySchema=[
                {"AttributeName": "pk", "KeyType": "HASH"},
                {"AttributeName": "sk", "KeyType": "RANGE"},
            ],
            GlobalSecondaryIndexes=[
                {
                    "IndexName": "by_tenant",
                    "KeySchema": [
                        {"AttributeName": "tenant", "KeyType": "HASH"},
                        {"AttributeName": "created_id", "KeyType": "RANGE"},
                    ],
                    "Projection": {"ProjectionType": "ALL"},
                }
            ],
        )
    except dynamodb.exceptions.ResourceInUseException:
        return


def _notifications(queue_arn: str) -> dict[str, Any]:
    rules = [{"Name": "prefix", "Value": "input/"}]
    return {
        "QueueConfigurations": [
            {
                "QueueArn": queue_arn,
                "Events": ["s3:ObjectCreated:*"],
                "Filter": {"Key": {"FilterRules": rules}},
            }
        ]
    }

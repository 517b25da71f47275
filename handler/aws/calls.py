"""Operations without I/O: written once, run by boto3 in a Lambda and by aiobotocore in a worker.

An operation is a generator. It yields a `Call`, receives the response, and returns its result;
AWS errors are raised inside it as this package's exceptions.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar, get_args

from botocore.exceptions import BotoCoreError, ClientError

from ..errors import AwsError, ConditionFailed, NotThere, ObjectChanged
from .items import from_item
from .s3_store import explain

AwsService = Literal["dynamodb", "s3", "sqs", "events", "ecs", "sagemaker", "ssm", "logs"]
# The Kubernetes client is in `fleet.kubernetes.api_server`.
Service = Literal[AwsService, "kubernetes"]
SERVICES: tuple[AwsService, ...] = get_args(AwsService)
# Services of a worker, which does not start other workers.
WORKER_SERVICES: tuple[Service, ...] = ("dynamodb", "s3", "sqs", "events")
T = TypeVar("T")

_CONDITION = "ConditionalCheckFailed"
_NOT_THERE = frozenset(
    {
        "404",
        "AWS.SimpleQueueService.MessageNotInflight",
        "AWS.SimpleQueueService.NonExistentQueue",
        "MessageNotInflight",
        "NoSuchKey",
        "NoSuchUpload",
        "NoSuchVersion",
        "QueueDoesNotExist",
        "ReceiptHandleIsInvalid",
    }
)
_CHANGED = frozenset({"412", "PreconditionFailed"})
# The message of SQS's error for a message whose visibility timeout cannot be extended; its code
# is the same for all errors.
_INVALID_VALUE = "InvalidParameterValue"
_MESSAGE_GONE = ("ReceiptHandle", "Total VisibilityTimeout")
# Reasons for a cancelled transaction that may succeed later.
_PASSING = frozenset({"ProvisionedThroughputExceeded", "ThrottlingError", "TransactionConflict"})


def region() -> str | None:
    """Return the region of clients made here; None leaves it to AWS_DEFAULT_REGION or the profile.

    AWS_REGION takes precedence, as in the CDK, the AWS CLI and all other SDKs. boto3 alone ignores
    it, and would use another region than the CDK's, or none.
    """
    return os.environ.get("AWS_REGION") or None


@dataclass(frozen=True, slots=True)
class Call:
    """One request to AWS, sent after a delay: a client's method and its arguments.

    The `Body` of a response is read whole before it is sent back.
    """

    service: Service
    method: str
    arguments: Mapping[str, Any]
    delay_seconds: float = 0.0


Operation = Generator[Call, Any, T]


class OperationDriver(Protocol):
    """Runs operations; `aio.AioAws` is one."""

    async def run(self, operation: Operation[T]) -> T:
        """Return the operation's result; raises an AwsError that the operation does not handle."""


# For both kinds of clients. The operation handles errors that remain after these tries.
_CLIENT_OPTIONS: Mapping[str, Any] = {
    "connect_timeout": 5,
    "read_timeout": 25,  # long polling takes up to 20
    "retries": {"mode": "standard", "total_max_attempts": 6},
    "max_pool_connections": 32,
}
_BRIEF: Mapping[str, Any] = {
    "connect_timeout": 2,
    "read_timeout": 10,
    "retries": {"mode": "standard", "total_max_attempts": 3},
}
# Overrides for single services. If a worker cannot be started now, it is started in a minute, so
# calls that start workers do not retry.
_OPTIONS_OF_SERVICE: Mapping[str, Mapping[str, Any]] = {
    # Presigned URLs use the regional host, with a signature that every region accepts.
    "s3": {
        "signature_version": "s3v4",
        "s3": {"addressing_style": "virtual", "us_east_1_regional_endpoint": "regional"},
        # Finalize copies that many parts at once.
        "max_pool_connections": 64,
    },
    "ecs": _BRIEF,
    "sagemaker": _BRIEF,
    "ssm": _BRIEF,
    "logs": _BRIEF,
}
# Delays before retries of writes that conflicted with a transaction, and of transactions that were
# throttled or conflicted: nothing was written, and clients do not retry these themselves. Nor do
# they request the unprocessed keys of a batch read again.
RETRY_DELAYS_SECONDS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)


def client_options(service: str) -> dict[str, Any]:
    """Return the options of a service's client, a new dict each time: botocore modifies it."""
    return deepcopy({**_CLIENT_OPTIONS, **_OPTIONS_OF_SERVICE.get(service, {})})


def is_retryable(error: ClientError | BotoCoreError) -> bool:
    """Return whether a write failed because of concurrent calls, and nothing was written."""
    if not isinstance(error, ClientError):
        return False
    if error.response.get("Error", {}).get("Code") == "TransactionConflictException":
        return True
    reasons = {reason.get("Code") for reason in error.response.get("CancellationReasons") or ()}
    return bool(reasons & _PASSING) and _CONDITION not in reasons


def translate(error: ClientError | BotoCoreError, call: Call) -> AwsError:
    """Convert a client's exception to the AwsError for an operation."""
    message = f"{call.service} {call.method}: {error}"
    if call.service == "s3":
        message += explain(error)
    if isinstance(error, BotoCoreError):
        return AwsError(message, aws_code=type(error).__name__)
    response: Mapping[str, Any] = error.response
    code = str(response.get("Error", {}).get("Code", ""))
    if code == f"{_CONDITION}Exception":
        item = response.get("Item")
        return ConditionFailed(message, item=from_item(item) if item else None)
    if code == "TransactionCanceledException":
        reasons = response.get("CancellationReasons") or ()
        if any(reason.get("Code") == _CONDITION for reason in reasons) or _CONDITION in message:
            return ConditionFailed(message)
    if code in _NOT_THERE or (code == _INVALID_VALUE and _tells_of_gone_message(error)):
        return NotThere(message, aws_code=code)
    if code in _CHANGED:
        return ObjectChanged(message, aws_code=code)
    return AwsError(message, aws_code=code)


def _tells_of_gone_message(error: ClientError) -> bool:
    return any(words in str(error) for words in _MESSAGE_GONE)

"""Operations without I/O: written once, driven by boto3 in a Lambda and by aiobotocore in a worker.

An operation is a generator. It yields a `Call`, is sent the response, and returns its result; what
AWS refuses is thrown into it as one of this package's exceptions.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from botocore.exceptions import BotoCoreError, ClientError

from handler.aws.items import from_item
from handler.errors import AwsError, ConditionFailed, NotThere, ObjectChanged

Service = Literal["dynamodb", "s3", "sqs", "events"]
SERVICES: tuple[Service, ...] = ("dynamodb", "s3", "sqs", "events")
T = TypeVar("T")

_CONDITION = "ConditionalCheckFailed"
_NOT_THERE = frozenset(
    {
        "404",
        "AWS.SimpleQueueService.MessageNotInflight",
        "AWS.SimpleQueueService.NonExistentQueue",
        "InvalidParameterValue",
        "MessageNotInflight",
        "NoSuchKey",
        "NoSuchUpload",
        "NoSuchVersion",
        "QueueDoesNotExist",
        "ReceiptHandleIsInvalid",
    }
)
_CHANGED = frozenset({"412", "PreconditionFailed"})


@dataclass(frozen=True, slots=True)
class Call:
    """One request to AWS: a client's method and its arguments.

    The `Body` of a response is read whole before it is sent back.
    """

    service: Service
    method: str
    arguments: Mapping[str, Any]


Operation = Generator[Call, Any, T]

# Of both kinds of clients. What is still refused after these tries is the operation's to handle.
CLIENT_OPTIONS: Mapping[str, Any] = {
    "connect_timeout": 5,
    "read_timeout": 25,  # a wait for messages takes up to 20
    "retries": {"mode": "standard", "total_max_attempts": 6},
    "max_pool_connections": 32,
}
# A write met a transaction on its item: nothing was done, and clients do not try again themselves.
CONFLICT_DELAYS_SECONDS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)


def is_conflict(error: ClientError | BotoCoreError) -> bool:
    """Say whether a write met another one's transaction and should simply be sent again."""
    if not isinstance(error, ClientError):
        return False
    if error.response.get("Error", {}).get("Code") == "TransactionConflictException":
        return True
    reasons = [reason.get("Code") for reason in error.response.get("CancellationReasons") or ()]
    return "TransactionConflict" in reasons and _CONDITION not in reasons


def translate(error: ClientError | BotoCoreError, call: Call) -> AwsError:
    """Return what a client's exception means to an operation."""
    what = f"{call.service} {call.method}"
    if isinstance(error, BotoCoreError):
        return AwsError(f"{what}: {error}", aws_code=type(error).__name__)
    response: Mapping[str, Any] = error.response
    code = str(response.get("Error", {}).get("Code", ""))
    message = f"{what}: {error}"
    if code == f"{_CONDITION}Exception":
        item = response.get("Item")
        return ConditionFailed(message, item=from_item(item) if item else None)
    if code == "TransactionCanceledException":
        reasons = response.get("CancellationReasons") or ()
        if any(reason.get("Code") == _CONDITION for reason in reasons) or _CONDITION in message:
            return ConditionFailed(message)
    if code in _NOT_THERE:
        return NotThere(message, aws_code=code)
    if code in _CHANGED:
        return ObjectChanged(message, aws_code=code)
    return AwsError(message, aws_code=code)

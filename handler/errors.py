"""Exceptions of this package; the API, a Batch or a log line shows their `code`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tidemill.batch.errors import HandlerError


class AwsError(HandlerError):
    """A service refused a call or was unreachable, after the client's own retries."""

    code = "aws_error"

    def __init__(self, message: str, *, aws_code: str = "") -> None:
        super().__init__(message)
        self.aws_code = aws_code


class ConditionFailed(AwsError):
    """A conditional write found another state; `item` is the stored item, if it was returned."""

    code = "condition_failed"

    def __init__(self, message: str, *, item: Mapping[str, Any] | None = None) -> None:
        super().__init__(message, aws_code="ConditionalCheckFailedException")
        self.item = item


class NotThere(AwsError):
    """An object, upload, message or queue that does not exist (any more)."""

    code = "not_there"


class ObjectChanged(AwsError):
    """The pinned object was replaced."""

    code = "input_changed"


class LeaseLost(HandlerError):
    """Another owner has the shard's lease: nothing may be written for it any more."""

    code = "lease_lost"

"""Last error of a worker, read from its log after it has ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pydantic_core import from_json

from ..aws.calls import Call, Operation
from ..errors import AwsError
from ..observability import logger
from .worker_events import LogStream

# The last log lines of a container may arrive a few seconds after its end.
_DELAYS_SECONDS: Final = (0.0, 3.0)
_NUM_LINES: Final = 100
_MAX_CHARS: Final = 500
_OWN_COMPLAINT: Final = "tidemill: "


def read_last_error(place: LogStream) -> Operation[str | None]:
    """Return the last error in a log; None if there is none, or the log is unreadable."""
    for delay_seconds in _DELAYS_SECONDS:
        arguments = {
            "logGroupName": place.group,
            "logStreamName": place.stream,
            "limit": _NUM_LINES,
            "startFromHead": False,
        }
        try:
            response = yield Call("logs", "get_log_events", arguments, delay_seconds)
        except AwsError as exc:
            logger.warning("log could not be read", log_stream=place.stream, reason=str(exc))
            return None
        if words := last_error([event["message"] for event in response["events"]]):
            return words
    return None


def last_error(lines: Sequence[str]) -> str | None:
    """Return the last error that one of our commands printed, shortened."""
    for line in reversed(lines):
        if line.startswith(_OWN_COMPLAINT):
            return line.removeprefix(_OWN_COMPLAINT).strip()[:_MAX_CHARS]
        if (complaint := _complaint_of(line)) is not None:
            return complaint[:_MAX_CHARS]
    return None


def _complaint_of(line: str) -> str | None:
    try:
        event = from_json(line)
    except ValueError:
        return None
    if not isinstance(event, dict) or event.get("level") not in {"ERROR", "CRITICAL"}:
        return None
    reason = event.get("reason")
    return f"{event.get('message')}: {reason}" if reason else str(event.get("message"))

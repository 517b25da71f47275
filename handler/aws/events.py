"""Status changes on EventBridge, so that clients need not poll."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic_core import to_json

from ..errors import AwsError
from .calls import Call, Operation

SOURCE = "tidemill"
DETAIL_TYPE = "Batch Status Change"


@dataclass(frozen=True, slots=True)
class EventBus:
    """Creates operations on one event bus."""

    name: str

    def publish(self, detail: dict[str, Any]) -> Operation[None]:
        """Publish one status change; raises AwsError if the bus refuses it."""
        entry = {
            "Source": SOURCE,
            "DetailType": DETAIL_TYPE,
            "Detail": to_json(detail, ensure_ascii=True).decode(),
            "EventBusName": self.name,
        }
        response = yield Call("events", "put_events", {"Entries": [entry]})
        if response.get("FailedEntryCount"):
            raise AwsError(f"events put_events: {response['Entries'][0]}")

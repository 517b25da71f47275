"""Status events that are published for batches."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tidemill.handler.aws.sync import Aws


@contextmanager
def listening(aws: Aws) -> Iterator[list[str]]:
    """Note the statuses that a driver publishes, in their order."""
    statuses: list[str] = []

    def note(params: Mapping[str, Any], **_: object) -> None:
        [entry] = json.loads(params["body"])["Entries"]
        statuses.append(json.loads(entry["Detail"])["status"])

    events = aws.clients["events"].meta.events
    events.register("before-call", note, unique_id="listening")
    try:
        yield statuses
    finally:
        events.unregister("before-call", unique_id="listening")

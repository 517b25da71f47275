"""Every status is announced at least once, and an ended batch then leaves the active ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pydantic_core import from_json

from tidemill.batch.errors import HandlerError
from tidemill.batch.model import Batch, Options, Source
from tidemill.batch.object_keys import outputs_of_request
from tidemill.batch.states import TERMINAL, Status
from tidemill.handler.aws.calls import Call
from tidemill.handler.aws.items import dump, from_item, to_item
from tidemill.handler.deployment import Deployment
from tidemill.handler.errors import AwsError, ConditionFailed
from tidemill.handler.lifecycle.announce import announce
from tidemill.handler.settings import read_settings

DEPLOYMENT = Deployment(
    read_settings({"TIDEMILL_TABLE": "t", "TIDEMILL_BUCKET": "b", "TIDEMILL_CONTROL_QUEUE": "q"})
)
BATCH = Batch(
    "batch_1",
    "default",
    Source("bucket", "input/ü.jsonl", '"etag"', 9),
    "file-1",
    Options(output_url="https://example.com/secret", metadata={"team": "søk"}),
    outputs_of_request("default", "batch_1"),
    0,
    86_400,
    num_rows=3,
)


def calls_of(batch: Batch, failures: dict[str, HandlerError] | None = None) -> list[Call]:
    """Return the calls that announcing a batch makes; those to some methods fail."""
    operation, calls = announce(DEPLOYMENT, batch), []
    try:
        call = next(operation)
        while True:
            calls.append(call)
            failure = (failures or {}).get(call.method)
            answer: dict[str, Any] = {"Attributes": to_item(dump(batch))}
            call = operation.throw(failure) if failure else operation.send(answer)
    except StopIteration:
        return calls


def methods_of(calls: list[Call]) -> list[str]:
    """Return what was called."""
    return [call.method for call in calls]


@pytest.mark.parametrize("status", Status)
def test_a_new_status_is_published_and_then_noted(status: Status) -> None:
    """The order prevents a status that is noted but not published; an end leaves the list."""
    batch = replace(BATCH, status=status)
    calls = calls_of(batch)
    noting = ["transact_write_items", "delete_item"] if status in TERMINAL else ["update_item"]
    assert methods_of(calls) == ["put_events", *noting]
    [entry] = calls[0].arguments["Entries"]
    assert (entry["Source"], entry["EventBusName"]) == ("tidemill", "default")
    assert from_json(entry["Detail"]) == {
        "batch_id": "batch_1",
        "tenant": "default",
        "status": str(status),
        "input": "s3://bucket/input/ü.jsonl",
        "num_rows": 3,
        "output_key": "files/default/batch_1.jsonl",
        "metadata": {"team": "søk"},
    }
    write = calls[1].arguments
    if status in TERMINAL:  # the counts of the tenant and of the month are in the same transaction
        write = write["TransactItems"][0]["Update"]
    noted = from_item(write["ExpressionAttributeValues"])
    assert noted == {":expected": str(status), ":set_announced": str(status)}


@pytest.mark.parametrize("status", Status)
def test_an_announced_status_is_not_announced_again(status: Status) -> None:
    """An end still leaves the list: that step may have failed the last time."""
    batch = replace(BATCH, status=status, announced=status)
    assert methods_of(calls_of(batch)) == (["delete_item"] if status in TERMINAL else [])


def test_the_previous_status_does_not_count() -> None:
    """Each status is announced separately."""
    batch = replace(BATCH, status=Status.FINALIZING, announced=Status.IN_PROGRESS)
    assert methods_of(calls_of(batch)) == ["put_events", "update_item"]


def test_a_bus_that_fails_leaves_the_batch_to_the_reaper() -> None:
    """Nothing is noted and the batch stays active, but the caller continues."""
    batch = replace(BATCH, status=Status.COMPLETED)
    assert methods_of(calls_of(batch, {"put_events": AwsError("down")})) == ["put_events"]


def test_a_batch_that_moved_on_meanwhile_is_not_a_failure() -> None:
    """The run that moved it announces its new status."""
    calls = calls_of(BATCH, {"update_item": ConditionFailed("moved")})
    assert methods_of(calls) == ["put_events", "update_item"]


def test_delivery_urls_are_not_announced() -> None:
    """A presigned URL is a secret."""
    assert "secret" not in repr(calls_of(BATCH))

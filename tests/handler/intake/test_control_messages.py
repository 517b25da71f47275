"""Messages on the control queue: recorded from AWS's documents and from emulators."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import to_json

from tidemill.handler.aws.queues import advance_message, shard_message
from tidemill.handler.intake.control_messages import (
    Advance,
    Drop,
    Ignored,
    UploadEvent,
    WorkerEvent,
    parse_control,
)

EVENTS = Path(__file__).parents[2] / "events"
BUCKET = "tidemill-data"
AWS_BUCKET = "amzn-s3-demo-bucket"


def recorded(name: str) -> str:
    """Return the body of a message that was recorded."""
    return (EVENTS / f"{name}.json").read_text()


def record_of(name: str, number: int = 0) -> Any:
    """Return one record of it, to be changed."""
    return json.loads(recorded(name))["Records"][number]


def parse_record(record: Any) -> Any:
    """Return the request in a message with this record alone; for an upload, its drop."""
    [request] = parse_control(json.dumps({"Records": [record]}))
    return request.drop if isinstance(request, UploadEvent) else request


@pytest.mark.parametrize("source", ["aws", "ministack", "moto"])
def test_the_test_event_requests_nothing(source: str) -> None:
    """It comes when notifications are set up, and must not raise an alarm."""
    [request] = parse_control(recorded(f"{source}_test_event"))
    assert isinstance(request, Ignored)
    assert request.is_expected


def test_the_form_in_awss_documents() -> None:
    """Key, sequencer and version as they stand there."""
    drop = Drop(
        AWS_BUCKET,
        "input/happy face.jsonl",
        "0055AED6DCD90281E5",
        "096fKKXTRTtl3on89fVO.nfljtsv6qko",
    )
    assert parse_control(recorded("aws_put")) == [UploadEvent(drop)]


def test_a_bucket_without_versions() -> None:
    """The version is simply not known; an escaped plus sign is one."""
    assert parse_control(recorded("aws_put_unversioned")) == [
        UploadEvent(Drop(AWS_BUCKET, "input/café 1+1.jsonl", "0055AED6DCD90281E5"))
    ]


def test_several_records_are_taken_one_by_one() -> None:
    """Uploads in parts and copies are drops, a deletion among them is not."""
    first, second, third = parse_control(recorded("aws_several_records"))
    assert isinstance(first, UploadEvent)
    assert first.drop.key == "input/big.jsonl"
    assert isinstance(second, Ignored)
    assert second.is_expected
    assert isinstance(third, UploadEvent)
    assert third.drop.key == "input/copy.jsonl"


@pytest.mark.parametrize("name", ["aws_delete_marker", "ministack_delete_marker"])
def test_a_delete_marker_is_not_a_drop(name: str) -> None:
    """It is expected if notifications cover all events."""
    [request] = parse_control(recorded(name))
    assert isinstance(request, Ignored)
    assert request.is_expected


@pytest.mark.parametrize("source", ["ministack", "moto"])
@pytest.mark.parametrize(
    ("event", "key"),
    [
        ("put", "input/plain.jsonl"),
        ("put_spaces_and_plus", "input/a b+c é ü.jsonl"),
        ("put_dots_and_percent", "input/../x%20y.jsonl"),
        ("multipart", "input/big.jsonl"),
        ("copy", "input/copy.jsonl"),
    ],
)
def test_events_of_emulators(source: str, event: str, key: str) -> None:
    """The key is that of the upload, whatever the emulator's encoding."""
    [request] = parse_control(recorded(f"{source}_{event}"))
    assert isinstance(request, UploadEvent)
    assert (request.drop.bucket, request.drop.key) == (BUCKET, key)
    assert request.drop.sequencer


def test_without_a_sequencer_the_time_orders() -> None:
    """Two uploads of one moment differ in their ETag or version."""
    earlier = record_of("moto_put")
    later = json.loads(json.dumps(earlier).replace(earlier["eventTime"], "2999-01-01T00:00:00Z"))
    other = json.loads(json.dumps(earlier))
    other["s3"]["object"]["eTag"] = "0" * 32
    sequencers = [parse_record(record).sequencer for record in (earlier, later, other)]
    assert sequencers[0] < sequencers[1]
    assert len(set(sequencers)) == 3
    assert parse_record(earlier).sequencer == sequencers[0]


def test_a_null_version_is_none() -> None:
    """S3 names the version of an object that has none `null`."""
    record = record_of("aws_put")
    record["s3"]["object"]["versionId"] = "null"
    assert parse_record(record).version_id is None


def test_the_longest_key_and_odd_letters_come_through() -> None:
    """1,024 bytes of anything that UTF-8 can say."""
    record = record_of("aws_put")
    record["s3"]["object"]["key"] = "input/" + "%F0%9F%8C%8A" * 253 + ".jsonl"
    key = parse_record(record).key
    assert key == "input/" + "🌊" * 253 + ".jsonl"


def test_a_key_that_is_not_utf8_is_left_alone() -> None:
    """No object can have it, so nothing can be read."""
    record = record_of("aws_put")
    record["s3"]["object"]["key"] = "input/%ff.jsonl"
    request = parse_record(record)
    assert isinstance(request, Ignored)
    assert "UTF-8" in request.reason


def test_a_message_of_ours_names_a_batch() -> None:
    """Other components send it to have a batch advanced."""
    body = to_json(advance_message("batch_1")).decode()
    assert parse_control(body) == [Advance("batch_1")]


@pytest.mark.parametrize(
    "body",
    [
        "",
        "nonsense",
        "[]",
        "null",
        "{}",
        '{"kind": "advance"}',
        '{"kind": "advance", "batch_id": 5}',
        '{"kind": "advance", "batch_id": ""}',
        '{"kind": "retreat", "batch_id": "b"}',
        '{"Records": {}}',
        '{"Records": [null]}',
        '{"Records": [{"eventName": "ObjectCreated:Put"}]}',
        '{"Records": [{"eventName": "ObjectCreated:Put", "s3": {"bucket": {"name": "b"}}}]}',
        to_json(shard_message("batch_1", 3)).decode(),
    ],
)
def test_a_malformed_message_is_reported_and_dropped(body: str) -> None:
    """It is a sender's mistake, so the log contains the reason."""
    [request] = parse_control(body)
    assert isinstance(request, Ignored)
    assert request.reason
    assert not request.is_expected


def test_no_records_ask_for_nothing() -> None:
    """An empty list is an event about nothing."""
    assert parse_control('{"Records": []}') == []


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@given(st.text() | json_values.map(json.dumps))
def test_no_text_is_more_than_nothing(body: str) -> None:
    """Parsing any text never fails, and yields no upload."""
    assert all(isinstance(request, Ignored) for request in parse_control(body))


@given(st.data())
def test_a_record_with_anything_in_any_place_is_a_drop_or_ignored(data: st.DataObject) -> None:
    """Replace one field, at any depth, by any value: no exception comes of it."""
    record = record_of("aws_put")
    place = record
    for name in data.draw(
        st.sampled_from([[], ["s3"], ["s3", "object"], ["s3", "bucket"]]), label="where"
    ):
        place = place[name]
    place[data.draw(st.sampled_from(sorted(place)), label="name")] = data.draw(json_values)
    assert isinstance(parse_record(record), Drop | Ignored)


def test_events_about_workers() -> None:
    """The fleets decide which are ours, so events are passed on whole."""
    event = json.loads(recorded("ecs_task_stopped"))
    assert parse_control(json.dumps(event)) == [WorkerEvent(event)]
    [request] = parse_control(json.dumps({**event, "detail": None}))
    assert isinstance(request, Ignored)

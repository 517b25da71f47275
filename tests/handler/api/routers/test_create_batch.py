"""`POST /v1/batches`: what is taken, what is refused, and what a repeated request gets."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.emulators import Emulator, active_ids
from tests.handler.api.rig import answer_to, refusal_in, request_of, serving
from tests.handler.intake.rig import Cloud, lines_of
from tidemill.batch.states import Status
from tidemill.batch.stored_file import File

GOOD = {
    "input_file_id": "file-1",
    "endpoint": "/v1/chat/completions",
    "completion_window": "24h",
}
SIGNED = "https://example.com/rows?X-Amz-Signature=abc"


@pytest.fixture
def cloud(emulator: Emulator) -> Iterator[Cloud]:
    """Return a separate deployment on each emulator, with a file of each of two tenants."""
    with serving(Cloud.on(emulator, shard_lines="10")) as cloud:
        for file_id, tenant in (("file-1", "default"), ("file-2", "others")):
            drop = cloud.put(lines_of(2), f"files/{tenant}/{file_id}")
            file = File(file_id, tenant, drop.key, 10, 1, "lines.jsonl", "batch")
            cloud.run(cloud.deployment.files.put_file(file))
        yield cloud


def event_of_body(body: str | bytes, **headers: str) -> dict[str, Any]:
    """Return the event of a request with a body, of the tenant `default`."""
    event = request_of("/v1/batches", "POST")
    event["headers"] |= {"content-type": "application/json"} | headers
    if isinstance(body, bytes):
        return event | {"body": base64.b64encode(body).decode(), "isBase64Encoded": True}
    return event | {"body": body, "isBase64Encoded": False}


def refusal_of(body: str | bytes, **headers: str) -> tuple[int, dict[str, Any]]:
    """Return the status and the error of a request that is refused."""
    return refusal_in(answer_to(event_of_body(body, **headers)))


def test_a_batch_is_made_of_a_file(cloud: Cloud, client: OpenAI) -> None:
    """The SDK's call as its guide has it; the batch is found at once and its file is read."""
    batch = client.batches.create(
        input_file_id="file-1",
        endpoint="/v1/chat/completions",
        completion_window="24h",
        metadata={"für": "søk"},
    )
    assert batch.status == "validating"
    assert (batch.input_file_id, batch.endpoint) == ("file-1", "/v1/chat/completions")
    assert batch.metadata == {"für": "søk"}
    found = client.batches.retrieve(batch.id).to_dict()
    assert found | {"tidemill": {}} == batch.to_dict() | {"tidemill": {}}  # its seconds go on
    assert cloud.messages()[-1]["batch_id"] == batch.id
    assert cloud.ingest(cloud.batch(batch.id)).status is Status.IN_PROGRESS


def test_our_own_parameters_ride_along(cloud: Cloud, client: OpenAI) -> None:
    """They are passed in `extra_body`; unknown ones are ignored, as by OpenAI."""
    batch = client.batches.create(
        input_file_id="file-1",
        endpoint="/v1/chat/completions",
        completion_window="30m",  # type: ignore[arg-type]
        output_expires_after={"anchor": "created_at", "seconds": 7200},
        extra_body={
            "output_url": SIGNED,
            "error_url": SIGNED,
            "on_invalid_line": "skip",
            "max_cost": 12.5,
            "priority": -5,
        },
    )
    options = cloud.batch(batch.id).options
    assert (options.output_url, options.error_url, options.on_invalid_line) == (
        SIGNED,
        SIGNED,
        "skip",
    )
    assert (options.output_expires_seconds, options.max_cost) == (7200, 12.5)
    assert options.priority == -5
    assert options.completion_window == batch.completion_window == "30m"
    assert "Signature" not in json.dumps(batch.to_dict())


def test_a_null_counts_as_not_there(cloud: Cloud, client: OpenAI) -> None:
    """The openai-batch tool sends nulls."""
    del client
    names = ("completion_window", "metadata", "output_expires_after", "output_url")
    more = dict.fromkeys((*names, "error_url", "on_invalid_line", "max_cost", "idempotency_key"))
    answer = answer_to(event_of_body(json.dumps(GOOD | more)))
    assert answer["statusCode"] == 200, answer["body"]
    assert cloud.batch(json.loads(answer["body"])["id"]).options.completion_window == "24h"


@pytest.mark.parametrize(
    "key",
    [
        {"extra_headers": {"Idempotency-Key": "k, 1"}},
        {"extra_body": {"idempotency_key": "k, 1"}},
    ],
    ids=["header", "body"],
)
def test_a_repeated_request_gets_the_batch_of_the_first(
    cloud: Cloud, client: OpenAI, key: dict[str, Any]
) -> None:
    """The key comes in a header or the body; a request with other content is refused."""
    request: dict[str, Any] = GOOD | key
    first, second = client.batches.create(**request), client.batches.create(**request)
    assert first.id == second.id
    assert cloud.run(active_ids(cloud.deployment.table)) == [first.id]
    with pytest.raises(openai.BadRequestError) as caught:
        client.batches.create(**request | {"metadata": {"a": "b"}})
    assert (caught.value.code, caught.value.param) == ("idempotency_key_reused", "idempotency_key")


def test_a_key_in_two_places_is_one_key(cloud: Cloud, client: OpenAI) -> None:
    """The same twice is fine, and two are one too many."""
    del client
    body = json.dumps(GOOD | {"idempotency_key": "a"})
    answer = answer_to(event_of_body(body, **{"idempotency-key": "a"}))
    assert answer["statusCode"] == 200
    status, error = refusal_of(body, **{"idempotency-key": "b"})
    assert (status, error["param"]) == (400, "idempotency_key")
    assert refusal_of(json.dumps(GOOD), **{"idempotency-key": ""})[0] == 400
    assert len(cloud.run(active_ids(cloud.deployment.table))) == 1


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"input_file_id": None}, "input_file_id"),
        ({"input_file_id": 7}, "input_file_id"),
        ({"input_file_id": "file-2"}, "input_file_id"),
        ({"input_file_id": "file-\x00"}, "input_file_id"),
        ({"endpoint": None}, "endpoint"),
        ({"endpoint": "/v1/images"}, "endpoint"),
        ({"endpoint": {}}, "endpoint"),
        ({"completion_window": "1h30m"}, "completion_window"),
        ({"completion_window": 24}, "completion_window"),
        ({"metadata": "a"}, "metadata"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"metadata": {str(n): "x" for n in range(17)}}, "metadata"),
        ({"metadata": {"": "x"}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 60}}, None),
        ({"output_expires_after": {"anchor": "created_at", "seconds": "3600"}}, None),
        ({"output_expires_after": {"anchor": "now", "seconds": 3600}}, None),
        ({"output_expires_after": 3600}, "output_expires_after"),
        ({"output_url": "http://example.com"}, "output_url"),
        ({"error_url": ["https://example.com"]}, "error_url"),
        ({"on_invalid_line": "ignore"}, "on_invalid_line"),
        ({"max_cost": 0}, "max_cost"),
        ({"escalate": "no-such-model", "escalate_below": 0.5}, "escalate"),
        ({"escalate": "x"}, "escalate_below"),
        ({"escalate": "x", "escalate_below": 2}, "escalate_below"),
        ({"escalate_below": 0.5}, "escalate"),
        ({"escalate": "x", "escalate_below": 0.5, "target_accuracy": 0.9}, "target_accuracy"),
        ({"escalate": "x", "escalate_below": 0.5, "escalate_by": "reading"}, "escalate_by"),
        ({"max_cost": "5"}, "max_cost"),
        ({"max_cost": True}, "max_cost"),
        ({"max_cost": 10**400}, "max_cost"),
        ({"priority": "high"}, "priority"),
        ({"priority": True}, "priority"),
        ({"priority": -101}, "priority"),
        ({"idempotency_key": "x" * 256}, "idempotency_key"),
        ({"idempotency_key": 5}, "idempotency_key"),
    ],
)
def test_a_wrong_parameter_is_named(
    cloud: Cloud, client: OpenAI, changes: dict[str, Any], param: str | None
) -> None:
    """It is named at once, and no batch is created."""
    del client
    status, error = refusal_of(json.dumps(GOOD | changes))
    assert status == 400
    assert error["param"].startswith(param or "output_expires_after")
    assert error["type"] == "invalid_request_error"
    assert cloud.run(active_ids(cloud.deployment.table)) == []


@pytest.mark.parametrize("key", ["x" * 1019, "\x00", "none", "", "..", "../work/x", "ü" * 510])
def test_a_drop_that_cannot_be_is_not_there(cloud: Cloud, client: OpenAI, key: str) -> None:
    """S3's own refusals of a name are not server errors."""
    del client
    name = f"s3://{cloud.bucket}/input/{key}"
    status, error = refusal_of(json.dumps(GOOD | {"input_file_id": name}))
    assert (status, error["param"]) == (400, "input_file_id")


@pytest.mark.parametrize("missing", ["input_file_id", "endpoint"])
def test_a_missing_parameter_is_named(cloud: Cloud, client: OpenAI, missing: str) -> None:
    """It is not reported as a server error."""
    del cloud, client
    fields = {name: value for name, value in GOOD.items() if name != missing}
    status, error = refusal_of(json.dumps(fields))
    assert (status, error["param"]) == (400, missing)
    assert error["message"] == f"`{missing}` is required."


BODIES: list[str | bytes] = [
    "",
    "null",
    "[]",
    f"[{json.dumps(GOOD)}]",
    '"x"',
    "5",
    "{",
    "{" * 50_000,
    "\ufeff" + json.dumps(GOOD),
    json.dumps(GOOD | {"x": float("nan")}),
    json.dumps(GOOD | {"x": float("-inf")}),
    '{"a":' * 5000 + "1" + "}" * 5000,
    '{"input_file_id": "\\ud800"}',
    '{"input_file_id": ' + "9" * 5000 + "}",
    b"\xff\xfe{}",
    b'{"input_file_id": "\xff"}',
    json.dumps(GOOD | {"metadata": {f"k{n}" * 50: "v" * 50 for n in range(10_000)}}),
    json.dumps(GOOD | {"metadata": {"k" * 2_000_000: 1}}),
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: ascii(body)[:20])
def test_a_body_that_is_none_is_refused(cloud: Cloud, client: OpenAI, body: str | bytes) -> None:
    """Any malformed body gets a small reply in OpenAI's format."""
    del client
    answer = answer_to(event_of_body(body))
    assert refusal_in(answer)[0] == 400
    assert len(answer["body"]) < 1000
    assert cloud.run(active_ids(cloud.deployment.table)) == []


def test_a_body_that_is_missing_is_called_so(client: OpenAI) -> None:
    """No parameter is named, as there is none."""
    del client
    status, error = refusal_of("")
    assert (status, error["code"], error["param"]) == (400, "missing_body", None)


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/xml", "application/x-www-form-urlencoded", "multipart/x"]
)
def test_a_body_of_another_kind_is_refused(cloud: Cloud, client: OpenAI, kind: str) -> None:
    """Another content type is refused even if the body is JSON."""
    del cloud, client
    assert refusal_of(json.dumps(GOOD), **{"content-type": kind})[0] == 400


def test_a_body_may_come_as_bytes(cloud: Cloud, client: OpenAI) -> None:
    """The gateway sends bodies of unknown content types as base64."""
    del cloud, client
    fields = GOOD | {"metadata": {"für": "søk"}}
    answer = answer_to(event_of_body(json.dumps(fields, ensure_ascii=False).encode()))
    assert json.loads(answer["body"])["metadata"] == {"für": "søk"}


def test_another_tenants_file_is_not_there(cloud: Cloud, client: OpenAI) -> None:
    """The words are those for one that never was; what is dropped is one tenant's alone."""
    del cloud
    messages = set()
    for name in ("file-2", "file-" + "0" * 32):
        with pytest.raises(openai.BadRequestError) as caught:
            client.batches.create(**GOOD | {"input_file_id": name})  # type: ignore[arg-type]
        messages.add(str(caught.value))
    assert len(messages) == 1


def test_a_replaced_output_is_read_as_it_was(cloud: Cloud, client: OpenAI) -> None:
    """Its ID names the rows of the older drop, whatever is stored under its name by now."""
    old, _new = (cloud.put(lines_of(number), "output/x.jsonl") for number in (2, 3))
    file = File("file-3", "default", old.key, 1, 1, "x", "batch_output", version_id=old.version_id)
    cloud.run(cloud.deployment.files.put_file(file))
    batch = client.batches.create(**GOOD | {"input_file_id": "file-3"})  # type: ignore[arg-type]
    assert cloud.ingest(cloud.batch(batch.id)).num_rows == 2


def test_a_drop_may_be_run_again(cloud: Cloud, client: OpenAI) -> None:
    """A request may name it as input, with other options."""
    cloud.put(lines_of(3), "input/a b.jsonl")
    name = f"s3://{cloud.bucket}/input/a b.jsonl"
    batch = client.batches.create(**GOOD | {"input_file_id": name})  # type: ignore[arg-type]
    assert batch.input_file_id == name
    assert cloud.ingest(cloud.batch(batch.id)).num_rows == 3

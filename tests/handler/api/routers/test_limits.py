"""Limits as clients of the API meet them: 429 in OpenAI's form, and when to come again."""

from __future__ import annotations

import time

import httpx
import openai
import pytest
from openai import OpenAI

from tests.handler.api.rig import URL, Gateway, answer_to, refusal_in, request_of
from tests.handler.intake.rig import Cloud, lines_of
from tidemill.batch.states import Status


def limit(cloud: Cloud, tenant: str = "default", **limits: int) -> None:
    """Set a tenant's limits."""
    cloud.run(cloud.deployment.tenants.change(tenant, **limits))


def test_requests_beyond_the_limit_get_a_retry_after(cloud: Cloud, client: OpenAI) -> None:
    """The SDK recognises the error, and does not retry before midnight by itself."""
    limit(cloud, requests_per_day=2)
    patient = client.with_options(max_retries=2)
    for _ in range(2):
        patient.models.list()
    began = time.time()
    with pytest.raises(openai.RateLimitError) as caught:
        patient.models.list()
    assert (caught.value.code, caught.value.type) == ("rate_limit_exceeded", "rate_limit_error")
    answer = caught.value.response
    left = int(answer.headers["Retry-After"])
    assert 0 < left <= 24 * 3600
    assert (began + left) % (24 * 3600) == pytest.approx(0, abs=5) or left < 10
    assert answer.headers.get("x-should-retry") == ("false" if left > 60 else None)


def test_what_needs_no_key_is_not_counted(cloud: Cloud, client: OpenAI) -> None:
    """A load balancer may ask for the health as often as it wants."""
    limit(cloud, requests_per_day=1)
    with httpx.Client(transport=Gateway(), base_url=URL) as http:
        for _ in range(3):
            assert http.get("/health").status_code == 200
    client.models.list()
    with pytest.raises(openai.RateLimitError):
        client.models.list()


def test_a_limit_affects_only_its_tenant(cloud: Cloud, client: OpenAI) -> None:
    """Callers that sign with IAM are not affected either, unless they are the same tenant."""
    limit(cloud, "search", requests_per_day=1)
    for _ in range(3):
        client.models.list()


def test_a_queue_that_is_full_takes_no_batch(cloud: Cloud, client: OpenAI) -> None:
    """A batch that ends makes room; a request that is repeated finds its batch in any case."""
    limit(cloud, queued_lines=5)
    file = client.files.create(file=lines_of(5), purpose="batch")

    def made(key: str) -> str:
        return client.batches.create(
            input_file_id=file.id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
            extra_headers={"Idempotency-Key": key},
        ).id

    first = made("one")
    assert cloud.ingest(cloud.batch(first)).status is Status.IN_PROGRESS
    with pytest.raises(openai.RateLimitError) as caught:
        made("two")
    assert caught.value.response.headers["Retry-After"] == "60"
    assert "x-should-retry" not in caught.value.response.headers
    assert "5 lines" in caught.value.message
    assert made("one") == first
    client.batches.cancel(first)
    assert cloud.batch(first).status is Status.CANCELLED
    made("two")


def test_a_dropped_file_keeps_to_the_limit_of_lines_alone(cloud: Cloud) -> None:
    """It fails when it has been read, and leaves no count behind; calls and bytes are the API's."""
    limit(cloud, queued_lines=4, requests_per_day=1, bytes_per_day=1)
    batch = cloud.ingest(cloud.create(lines_of(5)))
    assert batch.status is Status.FAILED
    assert [(error.code, error.line) for error in batch.errors] == [("queued_lines_exceeded", None)]
    assert cloud.ingest(cloud.create(lines_of(4), "input/y.jsonl")).status is Status.IN_PROGRESS
    assert cloud.run(cloud.deployment.usage.count_lines("default")) == 4


def test_a_refused_request_is_answered_before_its_route(cloud: Cloud) -> None:
    """Nothing is made and nothing is looked up for it."""
    limit(cloud, requests_per_day=1)
    event = request_of("/v1/batches/batch_none")
    assert refusal_in(answer_to(event))[0] == 404
    assert refusal_in(answer_to(event))[0] == 429


def test_uploaded_bytes_are_counted_before_they_are_kept(cloud: Cloud, client: OpenAI) -> None:
    """A file beyond the limit is not stored; a file refused for another reason is not counted."""
    limit(cloud, bytes_per_day=10)
    with pytest.raises(openai.BadRequestError):
        client.files.create(file=b"12345", purpose="nonsense")  # type: ignore[arg-type]
    kept = client.files.create(file=b"123456", purpose="batch")
    with pytest.raises(openai.RateLimitError, match="5 bytes would exceed the limit of 10"):
        client.files.create(file=b"12345", purpose="batch")
    client.files.create(file=b"1234", purpose="batch")
    assert len(list(client.files.list())) == 2
    assert client.files.retrieve(kept.id).bytes == 6

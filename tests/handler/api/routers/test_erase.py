"""`DELETE /v1/batches/{id}`: what has ended is gone at once, and its tombstone is shown."""

from __future__ import annotations

import json
import time
from base64 import b64decode
from gzip import decompress
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types import Batch as OpenAIBatch

from tests.handler.api.rig import answer_to, refusal_in, request_of
from tests.handler.intake.rig import Cloud, lines_of, plenty
from tidemill.batch.model import Batch
from tidemill.batch.states import Status
from tidemill.handler.aws.queues import LAMBDA_SECONDS
from tidemill.handler.control.advance import advance
from tidemill.handler.deployment import deployment as cached_deployment


@pytest.fixture
def erasing(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> Cloud:
    """Let the API of this process erase."""
    monkeypatch.setenv("TIDEMILL_ERASE_BATCHES", "1")
    cached_deployment.cache_clear()
    return cloud.having(erase_batches=True)


def reply_to(path: str, method: str = "GET") -> dict[str, Any]:
    """Return the reply to the tenant `default`."""
    return answer_to(request_of(f"/v1/batches/{path}", method))


def cancelled(cloud: Cloud, client: OpenAI) -> Batch:
    """Return a batch of an uploaded file that was cancelled before it ran."""
    file = client.files.create(file=("Ada.jsonl", lines_of(3)), purpose="batch")
    made = client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        metadata={"who": "Ada"},
    )
    client.batches.cancel(made.id)
    return cloud.batch(made.id)


def test_a_batch_is_gone_for_clients_at_once(erasing: Cloud, client: OpenAI) -> None:
    """Its input cannot be fetched any more, nor its rows; then no byte is left."""
    batch = cancelled(erasing, client)
    answer = reply_to(batch.id, "DELETE")
    assert answer["statusCode"] == 200
    shown = json.loads(answer["body"])
    OpenAIBatch.model_validate(shown)
    assert shown["status"] == "cancelled"
    assert shown["tidemill"]["erasing_at"] > 0
    assert shown["tidemill"]["erased_at"] is None
    assert "Ada" not in answer["body"]
    assert batch.input_file_id not in answer["body"]
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(batch.input_file_id)
    for path in ("results", "history"):
        status, error = refusal_in(reply_to(f"{batch.id}/{path}"))
        assert (status, error["code"]) == (410, "batch_erased")
    page = decompress(b64decode(answer_to(request_of("/dashboard/view/batches"))["body"])).decode()
    assert "erased" in page
    assert "Ada" not in page
    advance(erasing.aws, erasing.deployment, batch.id, plenty)
    assert json.loads(reply_to(batch.id)["body"])["tidemill"]["erased_at"] is None
    later = time.time() + 2 * LAMBDA_SECONDS
    advance(erasing.aws, erasing.deployment, batch.id, plenty, now=lambda: later)
    listed = erasing.aws.clients["s3"].list_object_versions(Bucket=erasing.bucket)
    assert "Versions" not in listed
    again = reply_to(batch.id, "DELETE")
    assert json.loads(again["body"])["tidemill"]["erased_at"] > 0
    assert [each.id for each in client.batches.list()] == [batch.id]


@pytest.mark.usefixtures("erasing")
def test_a_repeated_request_does_not_make_what_was_erased(client: OpenAI) -> None:
    """The reply says that the batch was erased, not that its key has created another one."""
    file = client.files.create(file=("x.jsonl", lines_of(3)), purpose="batch")

    def make() -> str:
        return client.batches.create(
            input_file_id=file.id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
            extra_headers={"Idempotency-Key": "once"},
        ).id

    batch_id = make()
    client.batches.cancel(batch_id)
    assert make() == batch_id
    reply_to(batch_id, "DELETE")
    with pytest.raises(openai.APIStatusError) as refused:
        make()
    assert (refused.value.status_code, refused.value.code) == (410, "batch_erased")


def test_what_cannot_be_erased_is_refused(
    erasing: Cloud, client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A running or foreign batch is refused, and any if the deployment does not allow erasure."""
    running = erasing.ingest(erasing.create(lines_of(3)))
    status, error = refusal_in(reply_to(running.id, "DELETE"))
    assert (status, error["code"]) == (400, "batch_not_ended")
    change = erasing.deployment.table.change_batch
    erasing.run(change(running.id, Status.IN_PROGRESS, tenant="search"))
    status, error = refusal_in(reply_to(running.id, "DELETE"))
    assert (status, error["code"]) == (404, "batch_not_found")
    batch = cancelled(erasing, client)
    monkeypatch.delenv("TIDEMILL_ERASE_BATCHES")
    cached_deployment.cache_clear()
    status, error = refusal_in(reply_to(batch.id, "DELETE"))
    assert (status, error["code"]) == (400, "erasing_not_allowed")

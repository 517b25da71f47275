"""`/v1/batches/{id}/retry`: a batch of the requests that did not succeed, and the merged rows."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
from openai import OpenAI
from pydantic_core import from_json, to_json

from tests.emulators import MODEL
from tests.handler.api import ended_batch
from tests.handler.api.ended_batch import finalized, rows_of, run_to_end
from tests.handler.api.rig import answer_to, body_as_sent, refusal_in, request_of
from tests.handler.finalize.rig import plenty
from tests.handler.intake.rig import Cloud, line_of
from tidemill.batch.escalation import Escalation
from tidemill.batch.file.lines import RawLine, parse_line
from tidemill.batch.file.rows import print_reply
from tidemill.batch.merged_rows import merged_key
from tidemill.batch.model import Batch
from tidemill.batch.object_keys import moved_outputs
from tidemill.batch.parts import FinishedRow, encode_part
from tidemill.batch.states import Status
from tidemill.handler.api.routers.results import part_cache
from tidemill.handler.aws.queues import LAMBDA_SECONDS
from tidemill.handler.control.advance import advance
from tidemill.handler.deployment import Deployment
from tidemill.handler.finalize import merge
from tidemill.handler.finalize.finalize import finalize
from tidemill.handler.finalize.result_files import record_file
from tidemill.handler.lifecycle.cancel import cancel
from tidemill.handler.lifecycle.erasure import request_erasure

STATUSES = {"b": 500, "c": 400, "e": 500}
RECIPE = b"params = {model = 'tidemill-demo'}\nprompt = 'Name {{ word }}'\nid = 'word'\n"
LINES = b"".join(line_of(name) + b"\n" for name in "abcde")


def ended(cloud: Cloud, data: bytes = LINES, statuses: Mapping[str, int] = STATUSES) -> Batch:
    """Return a batch that has ended with some failures."""
    return run_to_end(cloud, cloud.ingest(cloud.create(data)), statuses)


def posted(batch_id: str, **fields: Any) -> dict[str, Any]:
    """Return the answer to the request for a retry."""
    body = body_as_sent(to_json(fields), "application/json")
    return answer_to(request_of(f"/v1/batches/{batch_id}/retry", "POST") | body)


def retry(cloud: Cloud, batch_id: str, **fields: Any) -> tuple[dict[str, Any], Batch]:
    """Return the answer, and the new batch after intake."""
    answer = posted(batch_id, **fields)
    assert answer["statusCode"] == 200, answer["body"]
    made: dict[str, Any] = json.loads(answer["body"])
    return made, cloud.ingest(cloud.batch(made["id"]))


def requests_of(cloud: Cloud, batch: Batch) -> list[dict[str, Any]]:
    """Return the requests of a batch after intake."""
    assert batch.status is Status.IN_PROGRESS, batch.errors
    data = cloud.run(cloud.deployment.bucket.get(batch.source.key))
    return [json.loads(line) for line in data.splitlines()]


def rows_in(cloud: Cloud, file_id: str | None) -> list[tuple[str, int]]:
    """Return custom ID and status of the rows of a file."""
    assert file_id is not None
    file = cloud.run(cloud.deployment.files.get_file(file_id))
    assert file is not None
    data = cloud.run(cloud.deployment.bucket.get(file.key, file.version_id))
    rows = map(from_json, data.splitlines())
    return [(row["custom_id"], row["response"]["status_code"]) for row in rows]


def in_bucket(cloud: Cloud, key: str) -> list[dict[str, Any]]:
    """Return the rows of an object."""
    return [from_json(row) for row in cloud.run(cloud.deployment.bucket.get(key)).splitlines()]


def listed(batch_id: str) -> list[tuple[int, str]]:
    """Return line and custom ID of the rows that the API lists."""
    rows = json.loads(answer_to(request_of(f"/v1/batches/{batch_id}/results"))["body"])["data"]
    return [(row["line"], row["custom_id"]) for row in rows]


def found(batch_id: str, view: str, query: str = "") -> list[str]:
    """Return the lines of the rows in a view of the dashboard."""
    event = request_of(f"/dashboard/view/batches/{batch_id}/{view}", query=query)
    event["headers"]["accept-encoding"] = ""
    return re.findall(r'id="row-(\d+)"', answer_to(event)["body"])


def test_failed_requests_run_again_and_their_rows_are_merged(cloud: Cloud, client: OpenAI) -> None:
    """Only they are edited; finished rows keep their places, and invalid requests their errors."""
    old = ended(cloud)
    made, batch = retry(
        cloud, old.id, body={"max_tokens": 7, "messages": None}, metadata={"team": "a"}
    )
    assert made["tidemill"]["retry_of"] == made["metadata"]["retry_of"] == old.id
    assert (made["metadata"]["team"], made["input_file_id"]) == ("a", old.input_file_id)
    assert client.batches.retrieve(old.id).tidemill["retried_by"] == made["id"]  # type: ignore[attr-defined]
    edited = {"model": MODEL, "max_tokens": 7}
    assert [(it["custom_id"], it["body"]) for it in requests_of(cloud, batch)] == [
        ("b", edited),
        ("e", edited),
    ]
    assert refusal_in(posted(old.id))[1]["message"].startswith(f"Batch {batch.id} is retrying")
    batch = run_to_end(cloud, batch, {"e": 503})
    assert (batch.status, batch.merge, batch.errors) == (Status.COMPLETED, "done", ())
    assert rows_in(cloud, batch.output_file_id) == [("b", 200)]
    now = client.batches.retrieve(old.id)
    assert now.request_counts is not None
    assert (now.request_counts.completed, now.request_counts.failed) == (3, 2)
    good = [("a", 200), ("b", 200), ("d", 200)]
    assert rows_in(cloud, now.output_file_id) == good
    assert rows_in(cloud, now.error_file_id) == [("c", 400), ("e", 503)]
    assert [it["custom_id"] for it in in_bucket(cloud, "output/x.jsonl")] == [*"abd"]
    assert listed(old.id) == [(1, "a"), (2, "b"), (3, "c"), (4, "d"), (5, "e")]
    assert found(old.id, "rows", "status=failed") == ["3", "5"]
    assert found(old.id, "first-rows") == ["3", "5"]
    assert found(old.id, "rows", "status=ok&text=b") == ["2"]
    # The files before the merge keep their IDs and their rows.
    assert rows_in(cloud, old.output_file_id) == [("a", 200), ("d", 200)]
    # A retry of the retry retries the first batch, with the edits of both.
    made, again = retry(cloud, batch.id, body={"max_tokens": 9}, include_invalid=True)
    assert made["tidemill"]["retry_of"] == old.id
    assert [(it["custom_id"], it["body"]) for it in requests_of(cloud, again)] == [
        ("c", edited | {"max_tokens": 9}),
        ("e", edited | {"max_tokens": 9}),
    ]
    assert run_to_end(cloud, again, {}).merge == "done"
    now = client.batches.retrieve(old.id)
    assert rows_in(cloud, now.output_file_id) == [(name, 200) for name in "abcde"]
    assert now.error_file_id is None
    assert not cloud.has_object("output/x.errors.jsonl")
    assert found(old.id, "rows", "status=ok") == [*"12345"]
    # A newer object at the key of the output, as of the same input dropped again.
    cloud.put(b"other\n", "output/x.jsonl")
    assert found(old.id, "rows", "line=2") == ["2"]
    cloud.run(cloud.deployment.bucket.delete(merged_key(cloud.batch(old.id), 0)))
    part_cache.cache_clear()
    status, error = refusal_in(answer_to(request_of(f"/v1/batches/{old.id}/results")))
    assert (status, str(now.output_file_id) in error["message"]) == (410, True)


def test_invalid_requests_are_retried_only_on_request(cloud: Cloud) -> None:
    """Without them nothing is left, which is refused with the counts."""
    old = ended(cloud, statuses={"b": 400, "c": 413})
    status, error = refusal_in(posted(old.id))
    assert (status, error["code"]) == (400, "nothing_to_retry")
    assert error["message"] == (
        "2 of 2 failed for reasons that a retry does not change. To retry them, set "
        "`include_invalid`."
    )
    _, batch = retry(cloud, old.id, include_invalid=True)
    assert [it["custom_id"] for it in requests_of(cloud, batch)] == ["b", "c"]


def test_failures_that_the_api_cannot_count_are_counted_by_intake(
    cloud: Cloud, monkeypatch: Any
) -> None:
    """A large error file is not read by the API; the batch fails with the counts."""
    monkeypatch.setattr("tidemill.handler.intake.retry_batch._MAX_COUNTED_BYTES", 10)
    old = ended(cloud, statuses={"c": 422})
    made = json.loads(posted(old.id)["body"])
    batch = cloud.ingest(cloud.batch(made["id"]))
    assert batch.status is Status.FAILED
    assert [error.code for error in batch.errors] == ["nothing_to_retry"]
    assert batch.errors[0].message.startswith("1 of 1 failed for reasons")


def test_requests_that_were_not_run_are_retried_too(cloud: Cloud) -> None:
    """A cancelled batch has rows for some of its lines, or for none."""
    batch = cloud.ingest(cloud.create(LINES))
    rows = rows_of(cloud, batch, {"c": 500})
    part = encode_part([rows[0], rows[2]])
    cloud.run(cloud.deployment.bucket.put_part(cloud.claim(batch.id, lease_seconds=-1), 0, part))
    cloud.run(cancel(cloud.deployment, batch.id, int(time.time())))
    while not (old := cloud.batch(batch.id)).is_terminal:
        finalize(cloud.aws, cloud.deployment, old, plenty)
    _, made = retry(cloud, old.id)
    assert [it["custom_id"] for it in requests_of(cloud, made)] == [*"bcde"]
    run_to_end(cloud, made, {})
    merged = rows_in(cloud, cloud.batch(old.id).output_file_id)
    assert merged == [(name, 200) for name in "abcde"]
    unread = cloud.create(LINES, "input/unread.jsonl")
    cloud.run(cancel(cloud.deployment, unread.id, int(time.time())))
    _, made = retry(cloud, unread.id)
    assert len(requests_of(cloud, made)) == 5


def test_a_table_is_written_again_with_the_retried_rows(cloud: Cloud) -> None:
    """The new prompt is that of the failed rows only; the table has all of them."""
    cloud.put(RECIPE, "input/t.recipe.toml")
    table = cloud.create(b"word\na\nb\nc\n", "input/t.csv")
    old = run_to_end(cloud, cloud.ingest(table), {"b": 500})
    made, batch = retry(cloud, old.id, prompt="Say {{ word }}", body={"temperature": 0})
    [request] = requests_of(cloud, batch)
    assert request["body"]["messages"][-1]["content"] == "Say b"
    assert request["body"]["temperature"] == 0
    batch = run_to_end(cloud, batch, {})
    assert (batch.errors, batch.merge, batch.table_file_id) == ((), "done", None)
    assert cloud.batch(old.id).table_file_id != old.table_file_id
    table_key = old.outputs.table_key
    assert table_key is not None
    header, *rows = cloud.run(cloud.deployment.bucket.get(table_key)).decode().splitlines()
    assert header.startswith("word,text")
    assert [(row[0], "Say b" in row) for row in rows] == [("a", False), ("b", True), ("c", False)]
    assert made["tidemill"]["retry_of"] == old.id


LARGE = "lab/large"
CASCADE = (
    b"ask = 'good: Is it good?'\nprompt = '{{ word }}'\nid = 'word'\n"
    b"params = {model = 'tidemill-demo'}\nescalate = 'lab/large'\nescalate_below = 0.8\n"
    b"escalate_by = 'chat'\n"
)


def decisions_of(cloud: Cloud, batch: Batch, statuses: Mapping[str, int]) -> list[FinishedRow]:
    """Return decided rows; 0 is that of the first model, because the second one has failed."""
    rows = []
    data = cloud.run(cloud.deployment.bucket.get(batch.source.key))
    for number, text in enumerate(data.splitlines(), start=1):
        line = parse_line(RawLine(number, text))
        status = statuses.get(line.custom_id, 200)
        body: dict[str, Any] = {"model": line.body["model"], "answers": [ANSWER]}
        if status == 0:
            body["escalation_error"] = {"model": LARGE, "code": "c", "message": "No."}
        elif status != 200:
            body = {"error": {"message": "no", "type": "t"}}
        row = print_reply(line, status or 200, body)
        has_error = status == 0
        rows.append(FinishedRow(number, row, "answers" in body, has_escalation_error=has_error))
    return rows


ANSWER = {"type": "predicate", "name": "good", "probability": 0.9}


def decided(cloud: Cloud, batch: Batch) -> list[tuple[str, str, bool]]:
    """Return ID, model and whether the second model has failed, of each answered row."""
    file = cloud.run(cloud.deployment.files.get_file(str(batch.output_file_id)))
    assert file is not None
    rows = map(from_json, cloud.run(cloud.deployment.bucket.get(file.key)).splitlines())
    bodies = [(row["custom_id"], row["response"]["body"]) for row in rows]
    return [(name, body["model"], "escalation_error" in body) for name, body in bodies]


def test_rows_that_a_second_model_has_failed_are_retried_by_it_alone(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first model's answer stays if it fails again; other failures need both models."""
    monkeypatch.setattr(ended_batch, "rows_of", decisions_of)
    cloud.put(CASCADE, "input/t.recipe.toml")
    table = cloud.create(b"word\na\nb\nc\n", "input/t.csv")
    old = run_to_end(cloud, cloud.ingest(table), {"b": 0, "c": 0})
    _, batch = retry(cloud, old.id)
    assert (batch.model, batch.escalation) == (LARGE, None)
    requests = [(it["custom_id"], it["body"]) for it in requests_of(cloud, batch)]
    assert [(name, body["model"], body["decide_by"]) for name, body in requests] == [
        ("b", LARGE, "chat"),
        ("c", LARGE, "chat"),
    ]
    assert run_to_end(cloud, batch, {"c": 500}).merge == "done"
    now = cloud.batch(old.id)
    assert now.final is not None
    assert (now.final.completed, now.final.failed, now.final.escalation_failed) == (3, 0, 1)
    assert decided(cloud, now) == [("a", MODEL, False), ("b", LARGE, False), ("c", MODEL, True)]
    made = cloud.run(cloud.deployment.bucket.get(str(now.outputs.table_key))).decode()
    found = [(LARGE in row, "No." in row) for row in made.splitlines()[1:]]
    assert found == [(False, False), (True, False), (False, True)]
    _, batch = retry(cloud, old.id, body={"model": MODEL})  # the first model decides again, too
    assert (batch.model, batch.escalation) == (MODEL, old.escalation)
    assert run_to_end(cloud, batch, {"c": 0}).merge == "done"
    _, batch = retry(cloud, old.id, escalate_below=0.9)
    assert (batch.model, batch.escalation) == (MODEL, Escalation(LARGE, LARGE, 0.9, by="chat"))
    assert [it["body"]["model"] for it in requests_of(cloud, batch)] == [MODEL]
    assert run_to_end(cloud, batch, {}).merge == "done"
    assert refusal_in(posted(old.id))[1]["code"] == "nothing_to_retry"
    mixed = cloud.create(b"word\na\nb\nc\n", "input/t.csv")
    mixed = run_to_end(cloud, cloud.ingest(mixed), {"a": 500, "b": 0})
    _, batch = retry(cloud, mixed.id)
    assert (batch.model, batch.escalation) == (MODEL, mixed.escalation)
    assert [it["custom_id"] for it in requests_of(cloud, batch)] == ["a", "b"]


def test_an_erasure_takes_both_tables(cloud: Cloud) -> None:
    """The first table and the merged one are files of the batch, also next to a newer upload's."""
    cloud.put(RECIPE, "input/t.recipe.toml")
    old, newer = (
        run_to_end(cloud, cloud.ingest(cloud.create(b"word\na\nb\n", "input/t.csv")), {"b": 500})
        for _ in range(2)
    )
    _, batch = retry(cloud, old.id)
    run_to_end(cloud, batch, {})
    now = cloud.batch(old.id)
    assert now.table_file_id != old.table_file_id
    files = [
        cloud.run(cloud.deployment.files.get_file(str(each)))
        for each in (old.table_file_id, now.table_file_id, newer.table_file_id)
    ]
    assert files[1] is not None
    assert files[1].key == moved_outputs(old.outputs, old.tenant, old.id).table_key
    settings = cloud.deployment.settings.model_copy(update={"erase_batches": True})
    erasing = Deployment(settings)
    cloud.run(request_erasure(erasing, now, int(time.time())))
    left = [cloud.run(cloud.deployment.files.get_file(file.id)) for file in files if file]
    assert [file is None for file in left] == [True, True, False]
    later = partial(float, time.time() + LAMBDA_SECONDS + 60)
    advance(cloud.aws, erasing, old.id, plenty, now=later)
    assert cloud.run(cloud.deployment.bucket.head(files[1].key)) is None
    assert cloud.run(cloud.deployment.bucket.head(str(old.outputs.table_key))) is not None


def test_a_merge_that_dies_is_repeated(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until its last write the results are as before; then they are the merged ones."""
    old = ended(cloud)
    before = [rows_in(cloud, file_id) for file_id in (old.output_file_id, old.error_file_id)]
    _, batch = retry(cloud, old.id)
    seen = []

    def record_and_die(*arguments: Any) -> None:
        record_file(*arguments)
        now = cloud.batch(old.id)
        seen.append([rows_in(cloud, each) for each in (now.output_file_id, now.error_file_id)])
        if len(seen) <= 2:
            raise NotImplementedError

    monkeypatch.setattr(merge, "record_file", record_and_die)
    for _ in range(2):
        with pytest.raises(NotImplementedError):
            run_to_end(cloud, batch, {"e": 500})
        batch = cloud.batch(batch.id)
        assert batch.status is Status.FINALIZING
    assert finalized(cloud, batch).merge == "done"
    assert seen == [before] * 4
    now = cloud.batch(old.id)
    assert rows_in(cloud, now.output_file_id) == [("a", 200), ("b", 200), ("d", 200)]
    assert rows_in(cloud, now.error_file_id) == [("c", 400), ("e", 500)]


def test_results_of_a_newer_upload_stay(cloud: Cloud) -> None:
    """The merged rows get another key if another batch's results have the old one."""
    old = ended(cloud)
    newer = ended(cloud, statuses={"a": 500})
    _, batch = retry(cloud, old.id)
    run_to_end(cloud, batch, {})
    now = cloud.batch(old.id)
    assert [name for name, _ in rows_in(cloud, now.output_file_id)] == [*"abde"]
    assert [it["custom_id"] for it in in_bucket(cloud, "output/x.jsonl")] == [*"bcde"]
    assert rows_in(cloud, newer.error_file_id) == [("a", 500)]


def test_a_merge_without_the_old_rows_fails(cloud: Cloud) -> None:
    """The retry keeps its own rows, and its errors say why."""
    old = ended(cloud)
    _, batch = retry(cloud, old.id)
    file = cloud.run(cloud.deployment.files.get_file(str(old.output_file_id)))
    assert file is not None
    cloud.run(cloud.deployment.files.delete_file(file, int(time.time())))
    batch = run_to_end(cloud, batch, {})
    assert (batch.status, batch.merge) == (Status.COMPLETED, "failed")
    assert [error.code for error in batch.errors] == ["merge_failed"]
    assert f"could not be merged into those of {old.id}" in batch.errors[0].message
    assert rows_in(cloud, batch.output_file_id) == [("b", 200), ("e", 200)]


def test_retries_that_cannot_be_made_are_refused(cloud: Cloud) -> None:
    """Each refusal says why."""
    running = cloud.ingest(cloud.create(LINES, "input/running.jsonl"))
    broken = cloud.ingest(cloud.create(b"{", "input/broken.jsonl"))
    old = ended(cloud)
    good = run_to_end(cloud, cloud.ingest(cloud.create(LINES, "input/good.jsonl")), {})
    for batch, fields, code in (
        (running, {}, "not_retryable"),
        (broken, {}, "not_retryable"),
        (good, {}, "nothing_to_retry"),
        (old, {"prompt": "x"}, "invalid_option"),
        (old, {"body": {"x": "y" * 2**17}}, "invalid_option"),
        (old, {"completion_window": "1m"}, "invalid_option"),
        (old, {"body": []}, "invalid_parameter"),
        (old, {"metadata": {"": "x"}}, "invalid_option"),
    ):
        status, error = refusal_in(posted(batch.id, **fields))
        assert (status, error["code"]) == (400, code), error
    assert refusal_in(posted("batch_unknown"))[0] == 404
    first = json.loads(posted(old.id, idempotency_key="k")["body"])
    assert json.loads(posted(old.id, idempotency_key="k")["body"])["id"] == first["id"]
    other = posted(old.id, idempotency_key="k", include_invalid=True)
    assert refusal_in(other)[1]["code"] == "idempotency_key_reused"
    cloud.run(cloud.deployment.table.change_batch(old.id, old.status, tenant="other"))
    assert refusal_in(posted(old.id))[0] == 404

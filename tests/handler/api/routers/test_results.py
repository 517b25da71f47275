"""`/v1/batches/{id}/results`: finished rows while a batch runs, and the reply after that."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from tests.emulators import Emulator
from tests.handler.api.rig import answer_to, refusal_in, request_of, serving
from tests.handler.intake.rig import Cloud, line_of, lines_of
from tidemill.batch.file.lines import RawLine, parse_line
from tidemill.batch.file.rows import print_not_run, print_reply
from tidemill.batch.model import Batch
from tidemill.batch.object_keys import work_prefix
from tidemill.batch.parts import FinishedRow, encode_part
from tidemill.batch.result_kinds import OUTPUT
from tidemill.batch.states import Status
from tidemill.handler.lambdas.api import fit

GOOD = parse_line(RawLine(1, line_of(1)))
ANSWERED = print_reply(GOOD, 200, {"object": "chat.completion", "text": '"ü" \\ 😀' * 3})
NEVER_RUN = print_not_run("0" * 32, None, code="batch_expired", message="…")


@pytest.fixture
def cloud(emulator: Emulator) -> Iterator[Cloud]:
    """Return a separate deployment on each emulator."""
    with serving(Cloud.on(emulator, shard_lines="10")) as cloud:
        yield cloud


def running(cloud: Cloud, *rows: tuple[int, bytes], tenant: str = "default") -> Batch:
    """Return a batch that runs, with some durable rows."""
    batch = cloud.ingest(cloud.create(lines_of(25), f"input/{tenant}.jsonl"))
    if tenant != batch.tenant:
        cloud.run(cloud.deployment.table.change_batch(batch.id, batch.status, tenant=tenant))
    part = encode_part(FinishedRow(line, row, is_success=True) for line, row in rows)
    cloud.run(cloud.deployment.bucket.put_part(cloud.claim(batch.id), 0, part))
    return batch


def event_of(batch: Batch, query: str = "") -> dict[str, Any]:
    """Return the event of a request of the tenant `default`."""
    return request_of(f"/v1/batches/{batch.id}/results", query=query)


def results_of(batch: Batch, query: str = "") -> dict[str, Any]:
    """Return an answer."""
    answer = answer_to(event_of(batch, query))
    assert answer["statusCode"] == 200, answer["body"]
    found: dict[str, Any] = json.loads(answer["body"])
    return found


def test_rows_are_given_with_their_lines(cloud: Cloud, client: OpenAI) -> None:
    """Rows of a running batch look like those in its files."""
    del client
    batch = running(cloud, (1, ANSWERED), (3, NEVER_RUN))
    assert results_of(batch) == {
        "object": "list",
        "data": [{"line": 1} | json.loads(ANSWERED), {"line": 3} | json.loads(NEVER_RUN)],
        "complete_through": 1,
        "has_more": False,
    }
    page = results_of(batch, "limit=1")
    assert ([row["line"] for row in page["data"]], page["has_more"]) == ([1], True)
    page = results_of(batch, "after_line=1&limit=1")
    assert ([row["line"] for row in page["data"]], page["has_more"]) == ([3], False)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=1001", "limit"),
        ("limit=x", "limit"),
        ("after_line=-1", "after_line"),
        ("after_line=1.5", "after_line"),
        (f"after_line={'9' * 400}", "after_line"),
    ],
)
def test_what_cannot_be_is_refused(cloud: Cloud, client: OpenAI, query: str, param: str) -> None:
    """The parameter is named."""
    del client
    status, error = refusal_in(answer_to(event_of(running(cloud), query)))
    assert (status, error["param"]) == (400, param)


def test_another_tenants_rows_are_not_there(cloud: Cloud, client: OpenAI) -> None:
    """Another tenant's batch is not there either."""
    del client
    theirs = running(cloud, (1, ANSWERED), tenant="others")
    assert refusal_in(answer_to(event_of(theirs)))[0] == 404


def test_a_batch_whose_work_is_gone_names_its_files(cloud: Cloud, client: OpenAI) -> None:
    """The error names the files, in which the rows can still be read."""
    del client
    batch = running(cloud, *((line, ANSWERED) for line in range(1, 11)))
    table, bucket = cloud.deployment.table, cloud.deployment.bucket
    shard = cloud.shards(batch.id)[0]
    index = cloud.run(bucket.index_parts(batch.id, 0, left_out=lambda *_: None))
    cloud.run(bucket.put_segments(shard, index.seal()))
    cloud.run(table.commit(shard, progress=index.progress(), output_sizes=[9], error_sizes=[]))
    file_id = OUTPUT.file_id_of(batch)
    for status in (Status.FINALIZING, Status.COMPLETED):
        cloud.run(table.move_batch(batch.id, status, 9, output_file_id=file_id))
    assert len(results_of(batch)["data"]) == 10
    for key in cloud.run(bucket.list_keys(work_prefix(batch.id))):
        cloud.run(bucket.delete(key))
    status, error = refusal_in(answer_to(event_of(batch)))
    assert (status, error["code"]) == (410, "work_deleted")
    assert f"output file {file_id}" in error["message"]


def test_the_largest_answer_is_one_that_lambda_takes(cloud: Cloud, client: OpenAI) -> None:
    """Its rows contain only quotes, each of which Lambda doubles."""
    del client
    row = print_reply(GOOD, 200, {"text": '"' * 6000})
    batch = running(cloud, *((line, row) for line in range(1, 1001)))
    answer = answer_to(event_of(batch, "limit=1000"))
    assert answer["isBase64Encoded"] is True
    body = base64.b64decode(answer["body"])
    page = json.loads(body)
    assert 3_900_000 < len(body) < 4_400_000
    assert page["has_more"] is True
    assert page["complete_through"] == len(page["data"])
    assert len(json.dumps(answer)) < 6 * 2**20


def test_a_short_answer_stays_text() -> None:
    """A body that is already base64 is unchanged."""
    short = {"body": "{}", "isBase64Encoded": False}
    assert fit(short) is short
    encoded = {"body": "x" * 2_000_000, "isBase64Encoded": True}
    assert fit(encoded) is encoded
    assert fit({"statusCode": 204}) == {"statusCode": 204}

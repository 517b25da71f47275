"""`/v1/batches`, by OpenAI's client and by events: pages, progress, cancelling, tenants."""

from __future__ import annotations

import json
import time
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types import Batch as OpenAIBatch

from tests.handler.api.rig import answer_to, refusal_in, request_of
from tests.handler.aws.given import NOW, make_batch
from tests.handler.intake.rig import MODEL, Cloud, lines_of
from tidemill.batch.batch_object import batch_object
from tidemill.batch.fleet import WorkerRate
from tidemill.batch.model import Batch, BatchError
from tidemill.batch.progress_counts import Progress
from tidemill.batch.states import Status
from tidemill.handler.api.routers.batches import MAX_ERRORS_IN_LISTS
from tidemill.handler.tenants.keys import KeyStore


def add(cloud: Cloud, tenant: str = "default", age: int = 0, **fields: Any) -> Batch:
    """Record a batch that was created that many seconds before now."""
    fields |= {"tenant": tenant, "created_at": NOW - age}
    return cloud.run(cloud.deployment.table.create_batch(make_batch(cloud.deployment, **fields)))


def refusal_of(path: str, method: str = "GET", query: str = "") -> tuple[int, dict[str, Any]]:
    """Return the status and the error with which the tenant `default` is answered."""
    return refusal_in(answer_to(request_of(path, method, query)))


def page_of(query: str = "") -> dict[str, Any]:
    """Return a page of the tenant `default`."""
    answer = answer_to(request_of("/v1/batches", query=query))
    assert answer["statusCode"] == 200, answer["body"]
    page: dict[str, Any] = json.loads(answer["body"])
    return page


def test_a_batch_is_what_the_sdk_knows(cloud: Cloud, client: OpenAI) -> None:
    """Every key is there, and the SDK's strict model takes it."""
    batch = add(cloud)
    answer = answer_to(request_of(f"/v1/batches/{batch.id}"))
    assert json.loads(answer["body"]) == batch_object(
        batch, Progress(), now=time.time()
    ).model_dump(mode="json")
    found = client.batches.retrieve(batch.id)
    assert OpenAIBatch.model_validate(found.to_dict(), strict=True).id == batch.id
    assert found.status == "validating"


def test_a_running_batch_shows_the_sum_of_its_shards(cloud: Cloud, client: OpenAI) -> None:
    """A running batch shows the sum of its shards, in lists too; an ended one, the final counts."""
    batch = cloud.ingest(cloud.create(lines_of(25)))
    shards = [cloud.claim(batch.id, shard.number) for shard in cloud.shards(batch.id)]
    assert len(shards) == 3
    for shard in shards:
        cloud.run(
            cloud.deployment.table.renew(
                shard, lease_until=NOW, progress=Progress(7, 1, 50, 20, 30), attempts=1
            )
        )
    for found in (client.batches.retrieve(batch.id), client.batches.list().data[0]):
        assert found.request_counts is not None
        assert found.usage is not None
        assert found.request_counts.total == 25
        assert found.request_counts.completed == 21
        assert found.request_counts.failed == 3
        assert found.usage.total_tokens == 240
    ended = add(cloud, final=Progress(3, 2), num_rows=5)
    counts = client.batches.retrieve(ended.id).request_counts
    assert counts is not None
    assert counts.to_dict() == {"total": 5, "completed": 3, "failed": 2}


def test_a_running_batch_shows_its_rate(cloud: Cloud, client: OpenAI) -> None:
    """The rate is an additional field of OpenAI's Batch, which the SDK passes through."""
    batch = cloud.ingest(cloud.create(lines_of(25)))
    progress = Progress(5, rows_per_second=0.5, tokens_per_second=8.0, gpu_seconds=1800.0)
    now = time.time()
    cloud.run(
        cloud.deployment.table.renew(
            cloud.claim(batch.id), lease_until=now + 600, progress=progress, attempts=1
        )
    )
    (found,) = client.batches.list().data
    beyond = found.to_dict()["tidemill"]
    assert isinstance(beyond, dict)
    assert (beyond["rows_per_second"], beyond["tokens_per_second"]) == (0.5, 8.0)
    assert beyond["eta_at"] >= now + 40  # 20 rows at half a row a second
    assert (beyond["gpu_seconds"], beyond["cost"], beyond["webhook"]) == (1800.0, None, None)


def test_a_batch_has_an_estimate_before_its_first_row(cloud: Cloud, client: OpenAI) -> None:
    """The estimate comes from measurements of the model's workers."""
    batch = cloud.ingest(cloud.create(lines_of(25)))
    estimate = client.batches.retrieve(batch.id).to_dict()["tidemill"]
    assert isinstance(estimate, dict)
    assert estimate["estimated_gpu_seconds"] is None
    rate = WorkerRate(1, expected_work_per_second=batch.expected.work / 900, num_gpus=2)
    cloud.run(cloud.deployment.fleets.put_rate(MODEL, rate))
    estimate = client.batches.retrieve(batch.id).to_dict()["tidemill"]
    assert isinstance(estimate, dict)
    assert estimate["estimated_gpu_seconds"] == pytest.approx(1800, rel=0.01)
    assert estimate["estimated_cost"] is None  # the price of a GPU is not configured


def test_an_answer_of_many_failed_batches_is_small(cloud: Cloud, client: OpenAI) -> None:
    """Lists show the first errors of each, one batch alone all that are kept."""
    errors = tuple(BatchError("invalid_json_line", "x" * 500, None, n) for n in range(100))
    failed = [
        add(cloud, age=age, status=Status.FAILED, errors=errors, num_errors=9000)
        for age in range(100)
    ]
    answer = answer_to(request_of("/v1/batches", query="limit=100"))
    assert len(answer["body"]) < 1_000_000
    page = json.loads(answer["body"])
    assert {len(batch["errors"]["data"]) for batch in page["data"]} == {MAX_ERRORS_IN_LISTS}
    assert {batch["tidemill"]["num_errors"] for batch in page["data"]} == {9000}
    alone = client.batches.retrieve(failed[0].id)
    assert alone.errors is not None
    assert alone.errors.data is not None
    assert len(alone.errors.data) == 100


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 100])
def test_pages_follow_each_other_to_the_end(cloud: Cloud, client: OpenAI, limit: int) -> None:
    """Newest first, each batch once, no page empty; batches of the same second are not confused."""
    ages = [30, 10, 10, 10, 0, 20, 20]
    made = [add(cloud, age=age) for age in ages]
    for age in ages:
        add(cloud, "others", age)
    by_age = sorted(made, key=lambda batch: (batch.created_at, batch.id), reverse=True)
    pages = list(client.batches.list(limit=limit).iter_pages())
    assert [batch.id for page in pages for batch in page.data] == [batch.id for batch in by_age]
    assert [len(page.data) for page in pages[:-1]] == [limit] * (len(pages) - 1)
    assert [page.has_more for page in pages] == [True] * (len(pages) - 1) + [False]
    assert pages[-1].data


def test_a_page_names_its_ends(cloud: Cloud) -> None:
    """The page has the IDs that clients without an SDK need for paging."""
    first, second, third = (add(cloud, age=age) for age in range(3))
    page = page_of("limit=2")
    ids = [batch["id"] for batch in page["data"]]
    assert ids == [page["first_id"], page["last_id"]] == [first.id, second.id]
    assert page["has_more"] is True
    rest = page_of(f"limit=2&after={second.id}")
    assert [batch["id"] for batch in rest["data"]] == [third.id]
    assert rest["has_more"] is False
    after_all = page_of(f"after={third.id}")
    assert after_all == {
        "object": "list",
        "data": [],
        "first_id": None,
        "last_id": None,
        "has_more": False,
    }


def test_a_page_has_twenty_batches_by_default(cloud: Cloud) -> None:
    """The default is OpenAI's."""
    for age in range(21):
        add(cloud, age=age)
    page = page_of()
    assert (len(page["data"]), page["has_more"]) == (20, True)
    assert len(page_of("limit=21")["data"]) == 21


@pytest.mark.parametrize("limit", ["0", "-1", "101", "1.5", "x", "", "1e1", "5,500", "9" * 5000])
def test_a_limit_that_cannot_be_is_refused(client: OpenAI, limit: str) -> None:
    """The parameter is named."""
    del client
    status, error = refusal_of("/v1/batches", query=f"limit={limit}")
    assert (status, error["param"], error["code"]) == (400, "limit", "invalid_parameter")
    assert "`limit`" in error["message"]


ODD_IDS = ["batch_none", "x" * 3000, "é", "a b", "%00", "\x00", "..", "*", "a'b", "٣", "a%2Fb"]


@pytest.mark.parametrize("batch_id", ODD_IDS)
def test_an_unknown_batch_is_not_found(client: OpenAI, batch_id: str) -> None:
    """For any ID in the path, the reply is a 404 in OpenAI's format."""
    del client
    assert refusal_of(f"/v1/batches/{batch_id}")[0] == 404
    assert refusal_of(f"/v1/batches/{batch_id}/cancel", "POST")[0] == 404


@pytest.mark.parametrize("after", [*ODD_IDS, "", "{ours},batch_none"])
def test_an_unknown_after_is_never_ignored(cloud: Cloud, client: OpenAI, after: str) -> None:
    """Neither the first page nor an empty one is returned: both would mislead the client."""
    del client
    after = after.replace("{ours}", add(cloud).id)
    status, error = refusal_of("/v1/batches", query=f"after={after}")
    assert (status, error["param"], error["code"]) == (404, "after", "batch_not_found")


def test_two_afters_are_one_too_many(cloud: Cloud, client: OpenAI) -> None:
    """Neither of them is ignored."""
    del client
    ours = add(cloud)
    status, error = refusal_of("/v1/batches", query=f"after={ours.id}&after={ours.id}")
    assert (status, error["param"], error["code"]) == (400, "after", "invalid_parameter")


def test_another_tenants_batch_is_not_there(cloud: Cloud, client: OpenAI) -> None:
    """It cannot be seen, listed, paged from or cancelled, and the answer is that of no batch."""
    theirs, ours = add(cloud, "others"), add(cloud)
    for path, method, query in (
        ("/v1/batches/{}", "GET", ""),
        ("/v1/batches/{}/cancel", "POST", ""),
        ("/v1/batches", "GET", "after={}"),
    ):
        known, unknown = (
            refusal_of(path.format(batch_id), method, query.format(batch_id))
            for batch_id in (theirs.id, "batch_" + "0" * 32)
        )
        known[1]["message"] = known[1]["message"].replace(theirs.id, "batch_" + "0" * 32)
        assert known == unknown
        assert known[0] == 404
    assert cloud.batch(theirs.id) == theirs
    assert [batch.id for batch in client.batches.list()] == [ours.id]


def test_each_key_sees_its_own_tenant(cloud: Cloud, client: OpenAI) -> None:
    """The other side of the same."""
    theirs = add(cloud, "others")
    keys = KeyStore(cloud.deployment.table.name)
    token = cloud.run(keys.create(tenant="others", name="x", now=1))
    others = client.with_options(api_key=token)
    assert [batch.id for batch in others.batches.list()] == [theirs.id]
    assert others.batches.cancel(theirs.id).status == "cancelled"
    with pytest.raises(openai.NotFoundError):
        client.batches.retrieve(theirs.id)


def test_nothing_in_a_request_makes_it_another_tenants(cloud: Cloud, client: OpenAI) -> None:
    """Neither headers nor parameters nor a body name the tenant."""
    del client
    theirs = add(cloud, "others")
    event = request_of(f"/v1/batches/{theirs.id}", query="tenant=others&tenant_id=others")
    event["headers"] |= {"tenant": "others", "x-tenant": "others", "openai-organization": "others"}
    event["pathParameters"] = {"tenant": "others"}
    event["stageVariables"] = {"tenant": "others"}
    event["body"] = '{"tenant": "others"}'
    assert refusal_in(answer_to(event))[0] == 404


def test_signed_requests_are_of_the_tenant_of_drops(cloud: Cloud, client: OpenAI) -> None:
    """IAM needs no keys; the caller sees the batches of drops."""
    del client
    add(cloud, "others")
    ours = cloud.create(lines_of(1))
    answer = answer_to(request_of("/v1/batches", name="aws_http_request_iam"))
    assert [batch["id"] for batch in json.loads(answer["body"])["data"]] == [ours.id]


def test_a_batch_that_runs_is_cancelled(cloud: Cloud, client: OpenAI) -> None:
    """It winds up, and asking once more changes nothing."""
    batch = cloud.ingest(cloud.create(lines_of(3)))
    cloud.claim(batch.id)
    cancelling = client.batches.cancel(batch.id)
    assert cancelling.status == "cancelling"
    assert cancelling.cancelling_at
    again = client.batches.cancel(batch.id)
    seconds = {"tidemill"}  # which go on
    assert again.model_dump(exclude=seconds) == cancelling.model_dump(exclude=seconds)
    assert cloud.batch(batch.id).status is Status.CANCELLING


def test_a_batch_that_never_ran_is_cancelled_at_once(cloud: Cloud, client: OpenAI) -> None:
    """A repeated request shows the same."""
    batch = cloud.create(lines_of(3))
    cancelled = client.batches.cancel(batch.id)
    assert cancelled.status == "cancelled"
    assert client.batches.cancel(batch.id) == cancelled


@pytest.mark.parametrize(
    "statuses",
    [
        [Status.FAILED],
        [Status.EXPIRED],
        [Status.IN_PROGRESS, Status.FINALIZING],
        [Status.IN_PROGRESS, Status.FINALIZING, Status.COMPLETED],
    ],
)
def test_what_has_ended_is_not_cancelled(
    cloud: Cloud, client: OpenAI, statuses: list[Status]
) -> None:
    """The error says what it is, and it stays that."""
    batch = cloud.create(lines_of(3))
    for status in statuses:
        assert cloud.run(cloud.deployment.table.move_batch(batch.id, status, NOW)).is_there
    with pytest.raises(openai.BadRequestError, match=statuses[-1]) as caught:
        client.batches.cancel(batch.id)
    assert caught.value.code == "not_cancellable"
    assert cloud.batch(batch.id).status is statuses[-1]

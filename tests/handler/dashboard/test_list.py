"""The list of batches and the use of a month: as the Lambda answers with them, and in a browser."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from itertools import count
from typing import Any
from urllib.parse import urlencode

import pytest
from playwright.sync_api import Page, expect

from tests.emulators import MODEL
from tests.handler.api.rig import answer_to, give_key, refusal_in, request_of
from tests.handler.aws.given import make_batch
from tests.handler.dashboard.steps import check_looks, sign_in
from tests.handler.intake.rig import Cloud, lines_of
from tidemill.batch.model import Batch, BatchError
from tidemill.batch.month import ModelUse, month_of, shifted
from tidemill.batch.progress_counts import Progress
from tidemill.batch.states import Status
from tidemill.batch.stored_file import File
from tidemill.handler.aws.calls import Operation
from tidemill.handler.lifecycle.announce import announce
from tidemill.handler.queries import batch_search

_ages = count()


def reply_to(view: str, **query: str) -> dict[str, Any]:
    """Return the answer to a request for a view."""
    event = request_of(f"/dashboard/view/{view}", query=urlencode(query))
    event["headers"].pop("accept-encoding")
    return answer_to(event)


def listed(**query: str) -> list[str]:
    """Return the names of the batches in the list."""
    return re.findall(r'id="open-[^>]*><bdi>([^<]*)</bdi>', reply_to("batches", **query)["body"])


def recorded(cloud: Cloud, name: str, **fields: Any) -> Batch:
    """Return a recorded batch of a drop; later ones are older."""
    created_at = int(time.time()) - next(_ages)
    batch = make_batch(cloud.deployment, f"input/{name}", created_at=created_at, **fields)
    return cloud.run(cloud.deployment.table.create_batch(batch))


def error_file(cloud: Cloud, message: str) -> str:
    """Return the ID of a file with one failed row."""
    row = {"custom_id": "a", "error": {"code": "x", "message": message}}
    drop = cloud.put(json.dumps(row).encode() + b"\n", "output/x.errors.jsonl")
    file = File("file-e", "default", drop.key, 9, 1, "x", "output", version_id=drop.version_id)
    cloud.run(cloud.deployment.files.put_file(file))
    return file.id


def test_the_list_has_tabs_and_a_search(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request reads a bounded number of batches and the next one continues."""
    cloud.create(lines_of(1), "input/running.jsonl")
    recorded(cloud, "good.csv", status=Status.COMPLETED, final=Progress(3))
    recorded(cloud, "mixed.jsonl", status=Status.COMPLETED, final=Progress(3, 1))
    recorded(cloud, "late.jsonl", status=Status.EXPIRED)
    recorded(cloud, "other.jsonl", status=Status.CANCELLED)
    file = File("file-1", "default", "k", 9, 1, "Reviews.csv.jsonl", "batch")
    cloud.run(cloud.deployment.files.put_file(file))
    named = recorded(cloud, "x", status=Status.FAILED, input_file_id=file.id)
    assert len(listed()) == 6
    assert listed(status="running") == ["running.jsonl"]
    assert listed(status="with-errors") == ["mixed.jsonl"]
    assert listed(status="completed") == ["good.csv"]
    assert listed(status="failed") == ["late.jsonl", "Reviews.csv"]
    assert listed(name="REVIEWS") == listed(name=named.id) == ["Reviews.csv"]
    assert listed(name="reviews", status="completed") == []
    assert "None of the 6 batches matches." in reply_to("batches", name="none")["body"]
    monkeypatch.setattr(batch_search, "_PAGE", 2)
    monkeypatch.setattr(batch_search, "MAX_SEARCHED", 4)
    body = reply_to("batches", name="reviews")["body"]
    assert "older ones were not searched" in body
    (older,) = re.findall(r'after=(\w+)" id="older"', body)
    assert listed(name="reviews", after=older) == ["Reviews.csv"]
    monkeypatch.setattr("tidemill.dashboard.pages.PAGE_BATCHES", 1)
    body = reply_to("batches", status="failed")["body"]
    (older,) = re.findall(r'after=(\w+)" id="older"', body)
    assert listed(status="failed", after=older) == ["Reviews.csv"]
    assert 'id="older"' not in reply_to("batches", status="failed", after=named.id)["body"]


def test_a_state_says_why(cloud: Cloud) -> None:
    """The list has the first sentence of the first error, with code in it but no HTML."""
    file_id = error_file(cloud, "`top_k` must be <b>1</b>. Change it.")
    mixed = recorded(
        cloud, "m.jsonl", status=Status.COMPLETED, final=Progress(3, 1), error_file_id=file_id
    )
    error = BatchError("x", "The model `a/b` is unknown. Known ones: c.", line=3)
    recorded(cloud, "f.jsonl", status=Status.FAILED, errors=(error,))
    body = reply_to("batches")["body"]
    assert '<span class="status with-errors">Completed with errors</span>' in body
    assert "<bdi><code>top_k</code> must be &lt;b&gt;1&lt;/b&gt;.</bdi>" in body
    assert "<bdi>Line 3: The model <code>a/b</code> is unknown.</bdi>" in body
    assert "Completed with errors" in reply_to(f"batches/{mixed.id}")["body"]


def ended(cloud: Cloud, now: float, tenant: str = "default") -> Batch:
    """Return a batch whose end was announced, by two runs at once."""
    done = Progress(1_200, 34, 56_000, 0, 7_000, gpu_seconds=4_500.0)
    fields = {"status": Status.COMPLETED, "completed_at": int(now), "final": done, "model": MODEL}
    batch = recorded(cloud, "x.jsonl", tenant=tenant, **fields)
    for _ in range(2):
        cloud.run(announce(cloud.deployment, batch))
    return batch


def test_a_month_is_the_sum_of_the_batches_that_ended_in_it(cloud: Cloud) -> None:
    """Each batch counts once, for its tenant, in the month of its end.

    Only an administrator's key shows other tenants.
    """
    now = time.time()
    month = month_of(now)
    before = shifted(month, -1)
    ended(cloud, now)
    ended(cloud, now, "others")
    body = reply_to("month")["body"]
    assert "This month" in body
    for text in ("1,234", "56k", "7,000", "1.25", "Cost, USD</dt><dd>1.00"):
        assert text in body
    assert f"/month?month={before}" in body
    assert 'id="month-after"' not in body
    earlier = reply_to("month", month=before)["body"]
    assert "No rows in" in earlier
    assert f"/month?month={month}" in earlier
    assert refusal_in(reply_to("month", month="2026-13"))[0] == 400
    assert "others" not in body
    authorization = request_of("/")["headers"]["authorization"]
    give_key(cloud, authorization, "empty", is_admin=True)
    body = reply_to("month")["body"]
    assert "No rows in" in body
    assert re.findall(r"<bdi>([^<]+)</bdi></th><td>([^<]+)", body) == [
        ("default", "1,234"),
        ("others", "1,234"),
    ]
    assert "By tenant" not in reply_to("month", month=before)["body"]


def test_a_month_contains_the_active_batches_and_needs_a_price(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their finished rows count so far; without a price the view says how to set one."""
    batch = cloud.ingest(cloud.create(lines_of(25)))
    table, now = cloud.deployment.table, time.time()
    shard = cloud.run(table.claim(batch.id, 0, owner="w", now=now, lease_seconds=60))
    done = Progress(5, gpu_seconds=36.0)
    cloud.run(table.renew(shard, lease_until=now + 60, progress=done, attempts=1))
    monkeypatch.setattr(type(cloud.deployment.settings), "gpu_hour_price", lambda *_: None)
    body = reply_to("month")["body"]
    assert "1 active one so far" in body
    assert "<dd>5</dd>" in body
    assert "0.01" in body
    assert f"No cost for <bdi>{MODEL}</bdi>: set <code>gpu_hour_price</code>" in body


def test_a_month_turns_in_place_and_a_search_has_an_address(
    page: Page, cloud: Cloud, new_key: Callable[[str], str]
) -> None:
    """The month turns in place, and the address contains the search."""
    now = time.time()
    month = month_of(now)
    batch = ended(cloud, now)
    failed = BatchError("x", "The model `a/b` is unknown.")
    recorded(cloud, "f.jsonl", status=Status.FAILED, errors=(failed,))
    use = ModelUse("second/model", 1, 7, 1, gpu_seconds=9.0)
    writes = cloud.deployment.ledger.counts_of_end(batch, Progress(), [use], month)
    cloud.aws.run(_written(cloud, writes))
    sign_in(page, new_key("default"))
    page.get_by_text("By model").click()
    expect(page.get_by_role("rowheader", name="second/model")).to_be_visible()
    check_looks(page)
    page.get_by_role("button", name="Previous month").click()
    expect(page.get_by_text("No rows in")).to_be_visible()
    page.get_by_role("button", name="Next month").click()
    expect(page.get_by_role("heading", name="This month")).to_be_focused()
    page.get_by_role("link", name="Failed", exact=True).click()
    expect(page.get_by_text("Searched 2 batches.")).to_be_visible()
    expect(page.get_by_role("link", name="f.jsonl")).to_be_visible()
    page.get_by_role("searchbox").fill("x.j")
    page.get_by_role("button", name="Search").click()
    expect(page.get_by_text("None of the 2 batches matches.")).to_be_visible()
    assert page.url.endswith("#/?status=failed&name=x.j")
    check_looks(page)


def _written(cloud: Cloud, writes: list[dict[str, Any]]) -> Operation[None]:
    """Do all the writes."""
    yield cloud.deployment.table.transact(*writes)

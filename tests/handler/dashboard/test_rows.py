"""Rows of a batch: the views without a browser, and the pages in one."""

from __future__ import annotations

import base64
import csv
import gzip
import io
import json
import re
from collections.abc import Callable, Sequence
from threading import Barrier
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect
from pyarrow import parquet

from tests.emulators import MODEL
from tests.handler.api.rig import answer_to, request_of
from tests.handler.dashboard.steps import check_looks, sign_in
from tests.handler.intake.rig import Cloud, line_of
from tidemill.batch.file.lines import RawLine, parse_line
from tidemill.batch.file.rows import print_reply
from tidemill.batch.model import Batch
from tidemill.batch.parts import FinishedRow, encode_part
from tidemill.handler.dashboard import rows

NewKey = Callable[[str], str]
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\u202e\x07"
BODIES: list[dict[str, Any]] = [
    {"choices": [{"message": {"content": f"answer {HOSTILE}"}, "finish_reason": "stop"}]},
    {"choices": [{"message": {"content": '{"topic": "billing"}'}, "finish_reason": "stop"}]},
    {"error": {"code": "bad", "message": f"No. {HOSTILE}"}},
    {"choices": [{"message": {"content": "x" * 3000}, "finish_reason": "length"}]},
]


def running(cloud: Cloud, bodies: Sequence[dict[str, Any]] = BODIES) -> Batch:
    """Return a batch with durable rows and one line that has none yet."""
    prompts = [f"prompt {number}: {HOSTILE}" for number in range(1, len(bodies) + 2)]
    lines = [
        line_of(f"row-{n}", body={"model": MODEL, "messages": [{"role": "user", "content": text}]})
        for n, text in enumerate(prompts, 1)
    ]
    batch = cloud.ingest(cloud.create(b"\n".join(lines) + b"\n"))
    rows = [
        FinishedRow(
            number,
            print_reply(parse_line(RawLine(number, lines[number - 1])), status, body),
            is_success=status == 200,
        )
        for number, body in enumerate(bodies, 1)
        for status in [400 if "error" in body else 200]
    ]
    shard = cloud.claim(batch.id)
    cloud.run(cloud.deployment.bucket.put_part(shard, 0, encode_part(rows)))
    return batch


def shown(batch_id: str, view: str, query: str = "") -> str:
    """Return the HTML of a view."""
    answer = answer_to(request_of(f"/dashboard/view/batches/{batch_id}/{view}", query=query))
    assert answer["statusCode"] == 200, answer["body"]
    body: str = answer["body"]
    if answer["isBase64Encoded"]:
        return gzip.decompress(base64.b64decode(body)).decode()
    return body


def test_a_search_is_answered_with_rows(cloud: Cloud) -> None:
    """Rows, requests and one row in full are escaped; a bad search has a message."""
    batch = running(cloud)
    lines = re.compile(r'id="row-(\d+)"')
    every = shown(batch.id, "rows", "status=all")
    assert lines.findall(every) == ["1", "2", "3", "4"]
    assert lines.findall(shown(batch.id, "rows", "status=truncated")) == ["4"]
    assert lines.findall(shown(batch.id, "rows", "text=billing")) == ["2"]
    assert "Searched all rows." in shown(batch.id, "rows", "text=billing")
    assert "No row matches." in shown(batch.id, "rows", "text=nothing")
    assert "must be a whole number" in shown(batch.id, "rows", "min_chars=x")
    assert "This line has no row yet." in shown(batch.id, "rows", "line=5")
    one = shown(batch.id, "rows", "line=4")
    assert "x" * 3000 in one
    assert "prompt 4" in one
    requests = shown(batch.id, "requests", "lines=1,2,x,99")
    assert re.findall(r'data-line="(\d+)"', requests) == ["1", "2", "99"]
    for page in (every, one, requests):
        assert "<script" not in page
        assert "<img" not in page
        assert "\u202e" not in page


def test_a_row_and_its_request_are_read_at_the_same_time(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither waits for the calls of the other."""
    batch = running(cloud)
    both = Barrier(2)
    for name in ("search_rows", "read_requests"):
        read = getattr(rows, name)

        def wait_and_read(*given: Any, read: Callable[..., Any] = read, **named: Any) -> Any:
            both.wait(timeout=120)
            return read(*given, **named)

        monkeypatch.setattr(rows, name, wait_and_read)
    one = shown(batch.id, "rows", "line=4")
    assert "x" * 3000 in one
    assert "prompt 4" in one


def test_rows_are_searched_and_opened(page: Page, cloud: Cloud, new_key: NewKey) -> None:
    """The first rows are on the batch's page; each has its request and a link."""
    batch = running(cloud)
    sign_in(page, new_key("default"), f"#/batches/{batch.id}")
    first = page.locator("#first-rows")
    expect(first.locator("#request-1")).to_contain_text("prompt 1")
    expect(page.locator("#pace")).to_be_hidden()
    page.get_by_role("link", name="Rows", exact=True).click()
    expect(page.get_by_role("heading", name="Rows", level=1)).to_be_focused()
    expect(page.locator("article")).to_have_count(4)
    expect(page.locator("#request-3")).to_contain_text("prompt 3")
    page.get_by_label("Text").fill("ANSWER")
    page.keyboard.press("Enter")
    expect(page.locator("article")).to_have_count(1)
    expect(page.get_by_label("Text")).to_have_value("ANSWER")
    check_looks(page)
    page.goto(f"/dashboard#/batches/{batch.id}/rows?line=4")
    expect(page.get_by_role("heading", name="Line 4", level=1)).to_be_visible()
    expect(page.locator(".answer")).to_contain_text("x" * 3000)
    page.get_by_text("Request as curl").click()
    check_looks(page)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator("#do-row-curl").click()
    expect(page.get_by_role("status")).to_have_text("Copied.")
    assert "prompt 4" in page.evaluate("navigator.clipboard.readText()")
    page.get_by_role("link", name="Line before").click()
    expect(page.locator(".answer .text")).to_contain_text("No.")
    assert page.locator("#content script, #content img").count() == 0


def test_rows_are_downloaded_as_a_table(page: Page, cloud: Cloud, new_key: NewKey) -> None:
    """The browser joins the rows that match to a file; a refusal is a message."""
    batch = running(cloud)
    sign_in(page, new_key("default"), f"#/batches/{batch.id}/rows?status=all")
    expect(page.locator("#export-partial")).to_contain_text("only the rows that have finished")
    # The first is repeated later, and the second is cut.
    faults: list[dict[str, Any]] = [
        {"status": 429, "headers": {"Retry-After": "0.1"}},
        {"body": "{"},
    ]

    def repeated(route: Route) -> None:
        if faults:
            route.fulfill(**faults.pop(0))
        else:
            route.continue_()

    page.route("**/export?*", repeated)
    for form in ("CSV", "Parquet"):
        with page.expect_download() as downloading:
            page.get_by_role("button", name=f"Download as {form}").click()
        download = downloading.value
        assert download.suggested_filename.endswith(f".answers.{form.lower()}")
        expect(page.get_by_role("status")).to_have_text(
            "4 rows are downloaded; the batch is still running."
        )
        if form == "CSV":
            text = download.path().read_text(encoding="utf-8-sig")
            rows: list[dict[str, Any]] = [*csv.DictReader(io.StringIO(text, newline=""))]
        else:
            rows = parquet.read_table(download.path()).to_pylist()
        assert [row["custom_id"] for row in rows] == ["row-1", "row-2", "row-3", "row-4"]
        assert rows[0]["answer"] == f"answer {HOSTILE}"
        assert rows[2]["error"] == f"No. {HOSTILE}"
    assert not faults
    empty = json.dumps({"rows": 0, "after": None, "columns": ""}) + "\n"
    page.route("**/export?*", lambda route: route.fulfill(body=empty))
    page.get_by_role("button", name="Download as Parquet").click()
    expect(page.get_by_role("alert")).to_contain_text("could not be downloaded: no row matches.")
    refusal = {"status": 400, "json": {"error": {"message": "Not now."}}}
    page.route("**/export?*", lambda route: route.fulfill(**refusal))
    page.get_by_role("button", name="Download as CSV").click()
    expect(page.get_by_role("alert")).to_contain_text("could not be downloaded: Not now.")
    expect(page.get_by_role("button", name="Download as CSV")).to_be_visible()
    check_looks(page)


def test_a_piece_of_a_download_is_bytes(cloud: Cloud) -> None:
    """Deleted rows and other parameters are refused in words."""
    batch = running(cloud)
    path = f"/dashboard/view/batches/{batch.id}/export"
    found = answer_to(request_of(path, query="format=parquet&status=all"))
    assert found["isBase64Encoded"]
    about, _, data = base64.b64decode(found["body"]).partition(b"\n")
    assert json.loads(about)["rows"] == 4
    assert data.startswith(b"PAR1")
    refused = answer_to(request_of(path, query="format=x"))
    assert refused["statusCode"] == 400
    assert "choose csv or parquet" in refused["body"]

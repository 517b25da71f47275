"""Texts that others have written: names, metadata, errors and ids are shown, never run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.handler.api.rig import answer_to, request_of
from tests.handler.dashboard.mill import control_running, worker_running
from tests.handler.dashboard.steps import sign_in
from tests.handler.intake.rig import MODEL, Cloud, line_of, lines_of
from tests.long_parameters import with_long
from tidemill.dashboard.failures import group_errors, read_row
from tidemill.dashboard.pages import Search
from tidemill.dashboard.render import render

NewKey = Callable[[str], str]
SECONDS = 120_000
HOSTILE = (
    '"><img src=x onerror=alert(1)><script>alert(2)</script>'
    "<svg onload=alert(3)><a href='javascript:alert(4)' hx-get=/v1/batches hx-trigger=load>'"
    "{{ 7 * 7 }}${7 * 7}"
)


def test_hostile_texts_are_shown_and_do_nothing(
    page: Page, cloud: Cloud, new_key: NewKey, tmp_path: Path
) -> None:
    """They are in the list, in a batch, in its errors, in a refusal and in an upload's name."""
    urls: list[str] = []
    page.on("request", lambda request: urls.append(request.url))
    key = f"input/{HOSTILE.replace('/', '')}.jsonl"
    lines = [line_of(HOSTILE, body={"model": MODEL, "messages": [], "raise": HOSTILE})]
    with control_running(cloud), worker_running(cloud, tmp_path):
        cloud.put(b"\n".join(lines) + b"\n", key, {"note": "<b id=pwned>bold</b>"})
        sign_in(page, new_key("default"))
        link = page.get_by_role("rowheader").get_by_role("link")
        expect(link).to_have_text(key.removeprefix("input/"), timeout=SECONDS)
        link.click()
        expect(page.locator("#live .status")).to_have_text("Completed with errors", timeout=SECONDS)
    errors = page.locator("#errors table")
    expect(errors.get_by_role("rowheader")).to_have_text(HOSTILE)
    expect(errors).to_contain_text(f"ValueError: {HOSTILE}")
    expect(page.get_by_text("<b id=pwned>bold</b>")).to_be_visible()
    assert (
        page.locator("#content script, #content img, #content :not(#plot) > svg, #pwned").count()
        == 0
    )
    page.goto("/dashboard#/new")
    page.get_by_label("A JSONL file").set_input_files(
        {"name": HOSTILE.replace("/", ""), "mimeType": "text/plain", "buffer": b"{}"}
    )
    expect(page.locator("#chosen")).to_contain_text("<script>alert(2)<script>")
    assert not [url for url in urls if url.endswith("/x")]


@pytest.mark.parametrize(
    "address",
    with_long(
        [
            "/batches/../../../v1/files",
            "/batches?after=x&x=<img src=x onerror=alert(5)>",
            "//evil.test/batches",
        ],
        [
            "/../../v1/batches",
            "/batches/x/../../../../v1/batches",
            "/batches/%2e%2e/%2e%2e/%2e%2e/v1/batches",
            "/batches/<img src=x onerror=alert(6)>",
            "view",
        ],
    ),
)
def test_a_made_up_address_leads_to_views_only(
    page: Page, cloud: Cloud, new_key: NewKey, address: str
) -> None:
    """No other reply of the API is ever inserted into the page."""
    urls: list[str] = []
    page.on("request", lambda request: urls.append(request.url))
    cloud.create(lines_of(1))
    sign_in(page, new_key("default"), f"#{address}")
    page.wait_for_load_state("networkidle")
    expect(page.locator("#tenant")).to_have_text("default")
    assert not [url for url in urls if "/dashboard" not in url]


def test_unknown_parameters_are_escaped(cloud: Cloud) -> None:
    """A name is the client's."""
    body = {"model": MODEL, "messages": [], "<i>temprature": 1}
    batch = cloud.ingest(cloud.create(line_of("a", body=body)))
    event = request_of(f"/dashboard/view/batches/{batch.id}")
    event["headers"].pop("accept-encoding")
    shown = answer_to(event)["body"]
    assert "<code>&lt;i&gt;temprature</code> in 1 line for" in shown
    assert "did you mean <code>temperature</code>?" in shown


def test_why_a_file_was_refused_is_escaped(page: Page, cloud: Cloud, new_key: NewKey) -> None:
    """Intake's words hold pieces of the line."""
    cloud.ingest(cloud.create(line_of("a", url=HOSTILE) + b"\n", "input/bad.jsonl"))
    sign_in(page, new_key("default"))
    page.get_by_role("link", name="bad.jsonl").click()
    problems = page.locator(".problems li")
    expect(problems).to_contain_text("in line 1")
    expect(problems).to_contain_text("<img src=x")


@pytest.mark.parametrize("template", ["batches.html", "errors.html"])
def test_every_template_escapes(template: str) -> None:
    """Every inserted value is rendered as text."""
    row = json.dumps({"custom_id": HOSTILE, "error": {"message": HOSTILE, "code": HOSTILE}})
    failure = read_row(row.encode())
    assert failure is not None
    page_text = render(
        template,
        kinds=group_errors([failure]),
        num_read=1,
        owns_drops=True,
        currency=HOSTILE,
        num_failed=2,
        has_ended=True,
        rows=[],
        search=Search(HOSTILE, HOSTILE, HOSTILE, 1, (HOSTILE, 1)),
        tabs={HOSTILE: HOSTILE},
        is_live=False,
    )
    assert "<img" not in page_text
    assert "<script" not in page_text


@pytest.mark.parametrize(
    "row",
    [
        b"",
        b"[]",
        b"7",
        b"{",
        b'{"custom_id": 7, "response": [], "error": "x"}',
        b'{"response": {"status_code": "x", "body": []}, "error": {"error": {"error": 1}}}',
        b'{"error": {"message": {"a": 1}, "code": []}}',
    ],
)
def test_a_row_may_hold_anything(row: bytes) -> None:
    """Another program may have written the object: unreadable rows are left out."""
    found = read_row(row)
    assert found is None or found.place in {"", "7"}


@pytest.mark.parametrize("path", ["batches/batch_1", "batches/..", "files/file-1/link"])
def test_what_is_not_there_is_refused_in_words(cloud: Cloud, path: str) -> None:
    """The page shows the message of the answer."""
    del cloud
    event = request_of(f"/dashboard/view/{path}")
    event["headers"].pop("accept-encoding")
    answer = answer_to(event)
    assert answer["statusCode"] == 404
    assert json.loads(answer["body"])["error"]["message"].endswith(" not found.")


def test_long_names_are_cut_in_errors() -> None:
    """An error may be as long as a request."""
    found = read_row(json.dumps({"custom_id": "x" * 10_000}).encode())
    assert found is not None
    assert len(found.place) == 601

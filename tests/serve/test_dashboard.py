"""The dashboard of a server in a browser: a file is uploaded, run and downloaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from bench.server.served import Place
from tests.clients.flow import CHAT, write_file
from tests.handler.dashboard.browser import NO_CHROMIUM, find_chromium, running_chromium
from tests.handler.dashboard.steps import obstacles, sign_in
from tests.server.local.test_process import served
from tidemill import demo


@pytest.fixture
def chromium() -> Iterator[Browser]:
    """Return a browser, or skip if there is none."""
    executable = find_chromium()
    if executable is None:
        pytest.skip(NO_CHROMIUM)
    with running_chromium(executable) as browser:
        yield browser


@contextmanager
def page_of(chromium: Browser, url: str) -> Iterator[Page]:
    """Open a tab of an insecure origin, as of another machine; console messages fail the test."""
    context = chromium.new_context(base_url=url)
    context.add_init_script("delete Crypto.prototype.randomUUID")
    page = context.new_page()
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda line: complaints.append(line.text))
    yield page
    context.close()
    assert complaints == []


def run_and_download(page: Page, file: Path, folder: Path) -> list[dict[str, object]]:
    """Upload a file in the open form, wait for the end, and return the downloaded rows."""
    page.get_by_label("A JSONL file").set_input_files(file)
    page.get_by_role("button", name="Upload and start").click()
    expect(page.get_by_role("heading", name=file.name)).to_be_visible()
    expect(page.locator("#live .status")).to_have_text("Completed")
    expect(page.locator("#pace")).to_be_hidden()  # fewer than three measured steps
    assert obstacles(page) == []
    with page.expect_download() as download:
        page.get_by_role("button", name="Download output").click()
    download.value.save_as(folder / "output.jsonl")
    return [json.loads(row) for row in (folder / "output.jsonl").read_text().splitlines()]


def test_a_file_is_run_with_and_without_a_key(
    chromium: Browser, place: Place, tmp_path: Path
) -> None:
    """With a key, the page has a sign-in form; without one, it opens at once."""
    bodies = [{**CHAT, "model": demo.NAME, "max_tokens": 4}] * 3
    write_file(tmp_path / "questions.jsonl", "/v1/chat/completions", bodies)
    with page_of(chromium, place.url) as page:
        sign_in(page, place.key, "#/new")
        rows = run_and_download(page, tmp_path / "questions.jsonl", tmp_path)
        assert [row["custom_id"] for row in rows] == ["request-0", "request-1", "request-2"]
    with served(tmp_path / "open") as server:
        url = str(server.client.base_url).removesuffix("/v1/")
        with page_of(chromium, url) as page:
            page.goto("/dashboard#/new")
            bodies = [{**CHAT, "model": "scripted"}]
            write_file(tmp_path / "open.jsonl", "/v1/chat/completions", bodies)
            assert len(run_and_download(page, tmp_path / "open.jsonl", tmp_path)) == 1
            page.get_by_role("link", name="Batches").first.click()
            expect(page.get_by_role("link", name="open.jsonl")).to_be_visible()
            assert obstacles(page) == []

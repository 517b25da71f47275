"""Rows of a local server's batch in a browser."""

from __future__ import annotations

import asyncio
import csv
import io
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import uvicorn
from playwright.sync_api import Browser, expect

from tests.handler.dashboard.browser import NO_CHROMIUM, find_chromium, running_chromium
from tests.handler.dashboard.steps import obstacles
from tests.server.local.rig import lines_of, serving
from tests.server.local.test_retry import retried
from tests.server.local.test_rows import BODIES, reply


@contextmanager
def listening(root: Path) -> Iterator[str]:
    """Yield the address of a retried batch on a server, in another thread."""
    started: SimpleQueue[tuple[uvicorn.Server, str]] = SimpleQueue()

    async def serve() -> None:
        async with serving(root) as local:
            bodies = [*BODIES, {**reply("bad"), "status": 500}]
            batch = await local.ended((await local.submit(lines_of(bodies)))["id"])
            await retried(local, batch["id"], body={"status": None, **reply("merged")})
            server = uvicorn.Server(uvicorn.Config(local.app, log_level="error", lifespan="off"))
            with socket.create_server(("127.0.0.1", 0)) as listener:
                port = listener.getsockname()[1]
                url = f"http://127.0.0.1:{port}/dashboard#/batches/{batch['id']}"
                started.put((server, url))
                await server.serve([listener])

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    server, url = started.get(timeout=120)
    try:
        yield url
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(name="chromium")
def fixture_chromium() -> Iterator[Browser]:
    """Return a browser, or skip where there is none; its event loop ends with the test."""
    executable = find_chromium()
    if executable is None:
        pytest.skip(NO_CHROMIUM)
    with running_chromium(executable) as browser:
        yield browser


def test_rows_are_read_in_a_browser(chromium: Browser, tmp_path: Path) -> None:
    """All pages of rows work on a wide and on a narrow screen, and with the keyboard alone."""
    complaints: list[str] = []
    with listening(tmp_path) as url, chromium.new_context() as context:
        context.set_default_timeout(120_000)
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: complaints.append(dialog.message))
        page.goto(url)
        first = page.locator("#first-rows")
        expect(first.locator("#request-3")).to_contain_text("s2")
        expect(page.get_by_text("tenant")).to_be_hidden()

        def check_looks() -> None:
            looks: list[tuple[int, Any]] = [(1280, "light"), (375, "dark")]
            for width, scheme in looks:
                page.set_viewport_size({"width": width, "height": 800})
                page.emulate_media(color_scheme=scheme)
                assert obstacles(page) == []
                assert page.evaluate("document.body.scrollWidth <= innerWidth")

        check_looks()
        page.locator("#tab-rows").focus()
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", name="Rows", level=1)).to_be_focused()
        expect(page.locator("article")).to_have_count(1)
        page.get_by_label("Status", exact=True).focus()
        page.keyboard.type("all")
        page.get_by_role("button", name="Show rows").press("Enter")
        expect(page.locator("article")).to_have_count(5)
        expect(page.locator("#request-5")).to_contain_text("s4")
        expect(page.locator("article").last).to_contain_text("merged")
        with page.expect_download() as downloading:
            page.get_by_role("button", name="Download as CSV").press("Enter")
        text = downloading.value.path().read_text(encoding="utf-8-sig")
        rows = [*csv.DictReader(io.StringIO(text, newline=""))]
        assert [row["answer"] for row in rows[3:]] == ["x" * 3000, "merged"]
        check_looks()
        page.get_by_label("Text").fill("ANSWER")
        page.keyboard.press("Enter")
        expect(page.locator("article")).to_have_count(1)
        expect(page.locator("article")).to_contain_text("<script>alert(1)</script>")
        page.get_by_role("link", name="Line 1", exact=True).press("Enter")
        expect(page.get_by_role("heading", name="Line 1", level=1)).to_be_focused()
        page.get_by_text("Request as curl").press("Enter")
        context.grant_permissions(["clipboard-read", "clipboard-write"])
        page.locator("#do-row-curl").press("Enter")
        expect(page.get_by_role("status")).to_have_text("Copied.")
        assert "chat/completions" in page.evaluate("navigator.clipboard.readText()")
        check_looks()
        assert page.locator("#content script, #content img").count() == 0
    assert complaints == []

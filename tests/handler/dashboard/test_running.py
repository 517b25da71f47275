"""A batch that runs, watched in a browser to its end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.handler.dashboard.mill import control_running, file_of, worker_running
from tests.handler.dashboard.steps import sign_in
from tests.handler.intake.rig import Cloud

NewKey = Callable[[str], str]
SECONDS = 120_000


@pytest.mark.usefixtures("quick_refreshes")
def test_errors_are_read_while_others_run(
    page: Page, cloud: Cloud, new_key: NewKey, tmp_path: Path
) -> None:
    """Errors are visible before the end; a cancelled batch keeps its finished rows."""
    scripts = [{"status": 400}, {}, {"raise": "broken"}, {"wait": 600}]
    with control_running(cloud), worker_running(cloud, tmp_path):
        cloud.put(file_of(scripts), "input/mixed.jsonl")
        sign_in(page, new_key("default"))
        page.get_by_role("link", name="mixed.jsonl").click(timeout=SECONDS)
        errors = page.locator("#errors table")
        expect(errors.get_by_role("rowheader")).to_have_text(["row-1", "row-3"], timeout=SECONDS)
        expect(page.locator("#live .status")).to_have_text("Running")
        page.get_by_role("button", name="Cancel…").click()
        page.get_by_role("button", name="Cancel the batch").click()
        expect(page.locator("#live .status")).to_have_text("Cancelled", timeout=SECONDS)
    expect(page.locator(".done")).to_contain_text("3 of 4 · 75%")
    expect(page.get_by_role("button", name="Download output")).to_be_visible()

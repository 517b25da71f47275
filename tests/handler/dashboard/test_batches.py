"""Signing in, the list of batches, one batch and its cancelling, in a browser."""

from __future__ import annotations

from collections.abc import Callable

from playwright.sync_api import Page, expect

from tests.handler.dashboard.steps import sign_in
from tests.handler.intake.rig import Cloud, lines_of

NewKey = Callable[[str], str]


def test_a_key_opens_the_list(page: Page, cloud: Cloud, new_key: NewKey) -> None:
    """Batches of the key's tenant are listed newest first, and the key stays in this tab."""
    cloud.create(lines_of(3), "input/older.jsonl")
    cloud.ingest(cloud.create(lines_of(25), "input/newer.jsonl"))
    sign_in(page, new_key("default"))
    expect(page.get_by_role("heading", name="Batches")).to_be_visible()
    expect(page.locator("#tenant")).to_have_text("default")
    assert set(page.get_by_role("rowheader").get_by_role("link").all_inner_texts()) == {
        "newer.jsonl",
        "older.jsonl",
    }
    page.reload()
    expect(page.get_by_role("link", name="newer.jsonl")).to_be_visible()


def test_a_batch_is_cancelled_after_a_question(page: Page, cloud: Cloud, new_key: NewKey) -> None:
    """A batch is unchanged after No, and is cancelled after Yes."""
    batch = cloud.ingest(cloud.create(lines_of(25)))
    sign_in(page, new_key("default"))
    page.get_by_role("link", name="x.jsonl").click()
    page.get_by_role("button", name="Cancel…").click()
    page.get_by_role("button", name="Keep it running").click()
    expect(page.get_by_role("button", name="Cancel…")).to_be_focused()
    assert cloud.batch(batch.id).status == "in_progress"
    page.get_by_role("button", name="Cancel…").click()
    page.get_by_role("button", name="Cancel the batch").click()
    expect(page.locator("#live .status")).to_have_text("Cancelled")
    expect(page.get_by_role("status")).to_have_text("x.jsonl: Cancelled")
    assert cloud.batch(batch.id).status == "cancelled"

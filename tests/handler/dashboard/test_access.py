"""Accessibility of the page: keyboard, phone, dark mode, screen reader."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.handler.dashboard.steps import check_looks, sign_in
from tests.handler.intake.rig import Cloud, lines_of

NewKey = Callable[[str], str]
# A slow mobile connection.
SLOW = {"offline": False, "latency": 400, "downloadThroughput": 50_000, "uploadThroughput": 50_000}
# Focuses the link to a batch as soon as it is there, once.
MOVE_ON = """
new MutationObserver((_, observer) => {
  const link = document.querySelector("a[id^=open-]");
  if (link) observer.disconnect();
  link?.focus();
}).observe(document, { childList: true, subtree: true });
"""


def test_every_view_suits_everyone(page: Page, cloud: Cloud, new_key: NewKey) -> None:
    """Names, roles, order and contrast; no view is wider than the screen, whatever a file's name.

    Rows, a retry, a month and the check of a file are in the tests of these.
    """
    name = "a-rather-long-name-without-any-space-" * 3
    cloud.ingest(cloud.create(lines_of(25), f"input/{name}.jsonl", {"note": "x" * 300}))
    cloud.ingest(cloud.create(b"{\n" * 3, "input/bad.jsonl"))
    page.goto("/dashboard")
    expect(page.get_by_label("API key")).to_be_focused()
    check_looks(page)
    sign_in(page, new_key("default"))
    link = page.get_by_role("link", name=f"{name}.jsonl")
    expect(link).to_be_visible()
    expect(page.get_by_role("row", name=name)).to_contain_text("0 of 25")
    check_looks(page)
    page.get_by_role("link", name="bad.jsonl").click()
    expect(page.get_by_role("heading", name="Why it failed")).to_be_visible()
    check_looks(page)
    page.get_by_role("link", name="New batch").click()
    expect(page.get_by_label("A JSONL file")).to_be_visible()
    check_looks(page)
    page.goto("/dashboard#/")
    link.click()
    cancel = page.get_by_role("button", name="Cancel…")
    expect(cancel).to_be_visible()
    check_looks(page)
    assert _left(cancel) == _left(page.get_by_role("progressbar"))
    cancel.click()
    check_looks(page)


def test_a_keyboard_is_enough(page: Page, cloud: Cloud, new_key: NewKey) -> None:
    """Sign in, open a batch, change one's mind, cancel it: the focus is always where one is.

    The network is slow: a view that is on its way is marked as busy.
    """
    batch = cloud.ingest(cloud.create(lines_of(25)))
    press = page.keyboard.press
    page.context.new_cdp_session(page).send("Network.emulateNetworkConditions", SLOW)
    page.goto("/dashboard")
    page.keyboard.type(new_key("default"))
    press("Enter")
    expect(page.get_by_role("heading", name="Batches")).to_be_focused()
    search = page.get_by_role("searchbox", name="Name or ID")
    while not search.evaluate("one => one === document.activeElement"):
        press("Tab")
    page.keyboard.type("X.j")
    press("Enter")
    expect(page.get_by_text("Searched 1 batch.")).to_be_visible()
    link = page.get_by_role("link", name="x.jsonl")
    while not link.evaluate("one => one === document.activeElement"):
        press("Tab")
    press("Enter")
    expect(page.locator("#content")).to_have_attribute("aria-busy", "true")
    expect(page.get_by_role("heading", name="x.jsonl")).to_be_focused()
    expect(page.locator("#content")).to_have_attribute("aria-busy", "false")
    cancel = page.get_by_role("button", name="Cancel…")
    while not cancel.evaluate("one => one === document.activeElement"):
        press("Tab")
    press("Enter")
    press("Escape")
    expect(page.get_by_role("button", name="Cancel…")).to_be_focused()
    press("Enter")
    expect(page.get_by_role("button", name="Keep it running")).to_be_focused()
    press("Tab")
    press("Enter")
    expect(page.locator("#live .status")).to_have_text("Cancelled")
    assert cloud.batch(batch.id).status == "cancelled"


@pytest.mark.usefixtures("quick_refreshes")
def test_a_refresh_leaves_the_focus(page: Page, cloud: Cloud, new_key: NewKey) -> None:
    """A focused link of the list is still focused when the list has been fetched again."""
    cloud.ingest(cloud.create(lines_of(25)))
    sign_in(page, new_key("default"))
    link = page.get_by_role("link", name="x.jsonl")
    link.focus()
    with page.expect_response("**/view/batches"):
        pass
    cloud.create(lines_of(2), "input/second.jsonl")
    expect(page.get_by_role("link", name="second.jsonl")).to_be_visible(timeout=120_000)
    expect(link).to_be_focused()


@pytest.mark.usefixtures("quick_refreshes")
def test_a_view_takes_the_focus_at_once_or_never(page: Page, cloud: Cloud, new_key: NewKey) -> None:
    """A user who moves on at the moment of its arrival keeps the focus."""
    cloud.ingest(cloud.create(lines_of(25)))
    page.add_init_script(MOVE_ON)
    sign_in(page, new_key("default"))
    link = page.get_by_role("link", name="x.jsonl")
    link.wait_for()
    with page.expect_response("**/view/batches"):  # by then the first is settled
        pass
    expect(link).to_be_focused()


def test_the_skip_link_leads_to_the_content(page: Page, new_key: NewKey) -> None:
    """It stays in the view that is shown."""
    sign_in(page, new_key("default"), "#/new")
    expect(page.get_by_label("A JSONL file")).to_be_visible()
    page.get_by_role("link", name="Skip to content").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("main")).to_be_focused()
    expect(page.get_by_label("A JSONL file")).to_be_visible()
    assert page.url.endswith("#/new")


def test_who_wants_no_motion_gets_none(chromium: Browser, url: str) -> None:
    """Nothing on the page moves by itself."""
    context = chromium.new_context(base_url=url, reduced_motion="reduce")
    page = context.new_page()
    page.goto("/dashboard")
    page.evaluate(
        "document.body.insertAdjacentHTML('beforeend', '<i class=\"status in_progress\">')"
    )
    animation = page.evaluate(
        "getComputedStyle(document.querySelector('.in_progress'), '::before').animationName"
    )
    context.close()
    assert animation == "none"


def _left(found: Locator) -> float:
    """Return how far from the window's left edge something is."""
    box = found.bounding_box()
    assert box is not None
    return box["x"]

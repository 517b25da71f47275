"""Keys that are refused, and two tenants at one browser."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from playwright.sync_api import Page, Route, expect

from tests.handler.dashboard.steps import obstacles, sign_in
from tests.handler.intake.rig import Cloud, lines_of
from tests.long_parameters import with_long
from tidemill.handler.tenants.keys import KeyStore, key_id_of

NewKey = Callable[[str], str]
GONE = "Your key is no longer accepted. Sign in to continue."


@pytest.mark.parametrize(
    "key", with_long([f"tm_{'0' * 16}_{'a' * 43}", "Schlüssel"], ["wrong", "two words"])
)
def test_a_key_that_is_not_accepted(page: Page, key: str) -> None:
    """The error is next to the field, which has the focus, and the key is not stored."""
    sign_in(page, key)
    expect(page.locator("#sign-in-error")).to_contain_text("key")
    expect(page.get_by_label("API key")).to_be_focused()
    expect(page.locator("#content")).to_be_hidden()
    assert page.evaluate("sessionStorage.getItem('tidemill-key')") is None
    assert obstacles(page) == []


@pytest.mark.usefixtures("quick_refreshes")
def test_a_key_revoked_meanwhile(page: Page, cloud: Cloud, new_key: NewKey) -> None:
    """The form comes back with a word, and another key goes on in the same view."""
    key = new_key("default")
    cloud.ingest(cloud.create(lines_of(25)))
    sign_in(page, key)
    page.get_by_role("link", name="x.jsonl").click()
    expect(page.get_by_role("button", name="Cancel…")).to_be_visible()
    store = KeyStore(cloud.deployment.table.name)
    cloud.run(store.revoke(key_id_of(key), int(time.time())))
    expect(page.locator("#sign-in-error")).to_have_text(GONE, timeout=120_000)
    expect(page.get_by_label("API key")).to_be_focused()
    expect(page.get_by_role("heading", name="x.jsonl")).to_be_hidden()
    page.get_by_label("API key").fill(new_key("default"))
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("heading", name="x.jsonl")).to_be_visible()
    expect(page.get_by_role("button", name="Cancel…")).to_be_visible()


def test_a_tenant_sees_nothing_of_another(page: Page, cloud: Cloud, new_key: NewKey) -> None:
    """It is not in the list, not at its address, and not left on the page from before."""
    batch = cloud.ingest(cloud.create(lines_of(25)))
    first = new_key("default")
    sign_in(page, first, f"#/batches/{batch.id}")
    expect(page.get_by_role("heading", name="x.jsonl")).to_be_visible()
    cloud.run(KeyStore(cloud.deployment.table.name).revoke(key_id_of(first), int(time.time())))
    expect(page.locator("#sign-in-error")).to_have_text(GONE, timeout=120_000)
    page.get_by_label("API key").fill(new_key("other"))
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_text("No batches yet.")).to_contain_text("belong to another tenant")
    expect(page.locator("#tenant")).to_have_text("other")
    assert page.get_by_text("x.jsonl").count() == 0
    page.goto(f"/dashboard#/batches/{batch.id}")
    alert = page.get_by_role("alert").filter(has_text=f"Batch {batch.id} not found")
    expect(alert).to_be_visible()


def test_a_batch_that_is_not_there_takes_the_place_of_the_one_before(
    page: Page, cloud: Cloud, new_key: NewKey
) -> None:
    """Its address shows nothing of another batch, and there is a way back."""
    batch = cloud.ingest(cloud.create(lines_of(25)))
    sign_in(page, new_key("default"), f"#/batches/{batch.id}")
    expect(page.get_by_role("heading", name="x.jsonl")).to_be_visible()
    page.evaluate("location.hash = '#/batches/batch_none'")
    expect(page.get_by_role("heading", level=1)).to_have_text("Page not available")
    expect(page.get_by_role("heading", level=1)).to_be_focused()
    expect(page.get_by_role("alert").filter(has_text="Batch batch_none not found")).to_be_visible()
    assert page.get_by_text("x.jsonl").count() == 0
    assert page.get_by_role("button", name="Cancel…").count() == 0
    assert obstacles(page) == []
    page.get_by_role("link", name="All batches").click()
    expect(page.get_by_role("link", name="x.jsonl")).to_be_visible()


def test_signing_out_leaves_nothing(page: Page, cloud: Cloud, new_key: NewKey) -> None:
    """The tab contains neither the key nor a text of the tenant."""
    cloud.create(lines_of(2))
    sign_in(page, new_key("default"))
    expect(page.get_by_role("link", name="x.jsonl")).to_be_visible()
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_label("API key")).to_be_focused()
    assert page.evaluate("sessionStorage.getItem('tidemill-key')") is None
    assert page.get_by_text("x.jsonl").count() == 0


@pytest.mark.usefixtures("quick_refreshes")
def test_a_failing_server_is_reported_and_retried(
    page: Page, cloud: Cloud, new_key: NewKey
) -> None:
    """The view stays, marked as outdated; the message goes away when the server is back."""
    cloud.ingest(cloud.create(lines_of(25)))
    sign_in(page, new_key("default"))
    expect(page.get_by_role("link", name="x.jsonl")).to_be_visible()
    page.route("**/dashboard/view/batches", lambda route: route.abort())
    alert = page.get_by_role("alert").filter(has_text="The server cannot be reached.")
    expect(alert).to_be_visible(timeout=120_000)
    expect(page.get_by_role("link", name="x.jsonl")).to_be_visible()
    page.unroute("**/dashboard/view/batches")
    expect(alert).to_be_hidden(timeout=120_000)


@pytest.mark.usefixtures("quick_refreshes")
def test_a_hidden_tab_makes_no_requests(page: Page, cloud: Cloud, new_key: NewKey) -> None:
    """The list is fetched again when the tab is visible again."""
    cloud.ingest(cloud.create(lines_of(25)))
    sign_in(page, new_key("default"))
    expect(page.get_by_role("link", name="x.jsonl")).to_be_visible()
    page.evaluate("Object.defineProperty(document, 'hidden', {value: true, configurable: true})")
    urls: list[str] = []

    def note(route: Route) -> None:
        urls.append(route.request.url)
        route.continue_()

    page.route("**/dashboard/view/**", note)
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    page.wait_for_timeout(1_500)  # three refreshes of a tab that is seen
    assert urls == []
    page.evaluate("Object.defineProperty(document, 'hidden', {value: false, configurable: true})")
    with page.expect_response("**/view/batches"):
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")


def test_pages_of_many_batches(page: Page, cloud: Cloud, new_key: NewKey) -> None:
    """Older and newer ones are a click apart, and the back button knows the way."""
    for number in range(25):
        cloud.create(lines_of(1), f"input/file-{number}.jsonl")
    sign_in(page, new_key("default"))
    expect(page.get_by_role("row")).to_have_count(21)
    page.get_by_role("link", name="Older").click()
    expect(page.get_by_role("row")).to_have_count(6)
    expect(page.get_by_role("link", name="Older")).to_have_count(0)
    page.reload()
    expect(page.get_by_role("row")).to_have_count(6)
    page.go_back()
    expect(page.get_by_role("row")).to_have_count(21)
    page.go_forward()
    page.get_by_role("link", name="Newest").click()
    expect(page.get_by_role("row")).to_have_count(21)

"""Retry of failed rows, in a browser."""

from __future__ import annotations

import json
from collections.abc import Callable

from playwright.sync_api import Page, expect

from tests.handler.api.ended_batch import run_to_end
from tests.handler.dashboard.steps import check_looks, sign_in
from tests.handler.intake.rig import Cloud, line_of

NewKey = Callable[[str], str]


def test_failed_rows_are_retried_with_other_parameters(
    page: Page, cloud: Cloud, new_key: NewKey
) -> None:
    """The dialog counts the requests, refuses text that is not JSON, and opens the new batch."""
    data = b"".join(line_of(name) + b"\n" for name in "abcd")
    old = run_to_end(cloud, cloud.ingest(cloud.create(data)), {"b": 500, "c": 400})
    sign_in(page, new_key("default"), f"#/batches/{old.id}")
    words = "1 of 2 requests that did not succeed can be retried; 1 failed for reasons"
    expect(page.locator("#retry")).to_contain_text(words)
    page.get_by_role("button", name="Retry failed rows…").press("Enter")
    expect(page.get_by_role("dialog")).to_be_visible()
    check_looks(page)
    page.get_by_label("Token limit of an answer").fill("2000")
    page.get_by_label("Other parameters").fill("<b>")
    page.get_by_role("button", name="Retry", exact=True).click()
    expect(page.get_by_role("alert").last).to_have_text(
        'Other parameters must be a JSON object, such as {"seed": 1}.'
    )
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Retry failed rows…")).to_be_focused()
    page.keyboard.press("Enter")
    page.get_by_label("Other parameters").fill('{"seed": 1}')
    page.get_by_role("button", name="Retry", exact=True).click()
    link = page.get_by_role("link", name=old.id)
    expect(link).to_be_visible()
    new_id = page.url.rpartition("/")[2]
    batch = cloud.ingest(cloud.batch(new_id))
    [line] = cloud.run(cloud.deployment.bucket.get(batch.source.key)).splitlines()
    body = json.loads(line)["body"]
    assert (body["max_tokens"], body["seed"], batch.num_rows) == (2000, 1, 1)
    link.click()
    expect(page.get_by_role("link", name=new_id)).to_be_visible()

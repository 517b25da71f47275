"""Takes the pictures of the documentation: `make screenshots`, some minutes.

They are of a cloud as `make demo` runs it, of the demo model at work; nothing in them is made up.
The test of the whole path takes those of a table.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from playwright.sync_api import Browser, Page

from infra.config import DEFAULT_PATH
from localstack.local import LocalCloud, LocalOptions, running_cloud
from localstack.processes import ROOT
from tests.handler.dashboard.browser import NO_CHROMIUM, find_chromium, running_chromium

IMAGES = ROOT / "docs" / "images"
DESKTOP, PHONE = {"width": 1180, "height": 720}, {"width": 375, "height": 720}
# As high as there is something to see.
LIST = DESKTOP | {"height": 700}
MAX_SECONDS = 900
NUM_LINES = 120_000
PLOT_SECONDS = 200
PROMPT = "Tell me about the tide."


def line_of(number: int, **body: Any) -> bytes:
    """Return a request to the demo model."""
    messages = [{"role": "user", "content": f"{PROMPT} {number}"}]
    line = {"custom_id": f"request-{number}", "method": "POST", "url": "/v1/chat/completions"}
    return json.dumps(
        line | {"body": {"model": "tidemill-demo", "messages": messages, **body}}
    ).encode()


def files() -> dict[str, bytes]:
    """Return what is dropped before the pictures are taken, by name."""
    bad = [line_of(1), b'{"custom_id": "request-2", "method": "POST"', line_of(3), b"[]"]
    mixed = [
        line_of(n, **({"n": 900} if n % 40 == 0 else {"max_tokens": 30})) for n in range(1, 400)
    ]
    long = [
        line_of(n, **({"top_k": -7} if n % 997 == 0 else {"max_tokens": 20 + n % 60, "seed": n}))
        for n in range(1, NUM_LINES)
    ]
    return {
        "demo": (ROOT / "examples" / "demo.jsonl").read_bytes(),
        "half-written": b"\n".join(bad),
        "nightly-evaluation": b"\n".join(mixed),
        "product-descriptions": b"\n".join(long),
    }


def opened(browser: Browser, cloud: LocalCloud, at: str, size: dict[str, int], scheme: Any) -> Page:
    """Return a tab that is signed in and shows a view."""
    page = browser.new_page(viewport=size, color_scheme=scheme, locale="en-GB", timezone_id="UTC")  # type: ignore[arg-type]
    page.goto(f"{cloud.page_url}#{at}")
    page.get_by_label("API key").fill(cloud.key)
    page.get_by_role("button", name="Sign in").click()
    page.locator("#content h1").wait_for()
    page.locator("#month dl, #first-rows article").first.wait_for()
    page.wait_for_timeout(1500)
    return page


def take(page: Page, name: str, *, is_whole: bool = False) -> None:
    """Keep what the tab shows, or the whole page."""
    page.evaluate("document.activeElement.blur()")
    page.screenshot(path=IMAGES / f"{name}.png", animations="disabled", full_page=is_whole)
    page.close()


def has_plot(batch: dict[str, Any]) -> bool:
    """Say whether a batch has run for long enough to have a plot."""
    return bool(batch["tidemill"]["seconds"] >= PLOT_SECONDS)


def main() -> int:
    """Run the cloud, let it work until there is a plot, take the pictures."""
    executable = find_chromium()
    if executable is None:
        sys.exit(NO_CHROMIUM)
    IMAGES.mkdir(exist_ok=True)
    with (
        running_cloud(LocalOptions(config=DEFAULT_PATH), print) as cloud,
        running_chromium(executable) as browser,
    ):
        for name, body in files().items():
            url = cloud.drops.drop(name, body)
            time.sleep(8)
        with cloud.api() as api:
            batch = api.follow(url, seconds=MAX_SECONDS, until=has_plot)["id"]
        one = f"/batches/{batch}"
        take(opened(browser, cloud, "/", LIST, "light"), "dashboard-batches")
        take(opened(browser, cloud, one, DESKTOP, "light"), "dashboard-batch", is_whole=True)
        take(opened(browser, cloud, one, PHONE, "dark"), "dashboard-dark")
        take(opened(browser, cloud, "/", PHONE, "light"), "dashboard-phone")
    return 0


if __name__ == "__main__":
    sys.exit(main())

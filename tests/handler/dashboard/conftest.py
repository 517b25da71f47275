"""The dashboard in a browser: Chromium, a server, keys of two tenants, and pages that watch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
from playwright.sync_api import Browser, Dialog, Page

from tests.emulators import Emulator
from tests.folder_scope import shared
from tests.handler.api.rig import serving
from tests.handler.api.server import listening
from tests.handler.dashboard.browser import NO_CHROMIUM, find_chromium, running_chromium
from tests.handler.intake.rig import Cloud
from tidemill.handler.tenants.keys import KeyStore

QUICK = """
const wait = window.setTimeout;
window.setTimeout = (work, milliseconds, ...more) =>
  wait(work, milliseconds < 1000 ? milliseconds : milliseconds / 10, ...more);
"""
PRICES = '{"tidemill-demo": 0.8}'


# Until it is closed, Playwright runs an event loop, which excludes asynchronous tests.
@pytest.fixture
def chromium() -> Browser:
    """Return the browser of all files here, or skip where there is none."""
    executable = find_chromium()
    if executable is None:
        pytest.skip(NO_CHROMIUM)
    return shared(__file__, partial(running_chromium, executable))


@pytest.fixture
def cloud(ministack: Emulator) -> Iterator[Cloud]:
    """Return a separate deployment, whose API is that of this process."""
    cloud = Cloud.on(ministack, gpu_hour_prices=PRICES)
    environment = {**cloud.environment, "TIDEMILL_GPU_HOUR_PRICES": PRICES}
    with serving(replace(cloud, environment=environment)) as cloud:
        yield cloud


@pytest.fixture
def new_key(cloud: Cloud) -> Callable[[str], str]:
    """Return a maker of keys."""
    keys = KeyStore(cloud.deployment.table.name)

    def make(tenant: str) -> str:
        return cloud.run(keys.create(tenant=tenant, name="test", now=1))

    return make


@pytest.fixture
def url(cloud: Cloud) -> Iterator[str]:  # noqa: ARG001 - whose API it is
    """Return the address of the API."""
    with listening() as url:
        yield url


@pytest.fixture
def page(chromium: Browser, url: str) -> Iterator[Page]:
    """Return a tab that has nothing open; what it complains of fails the test."""
    complaints: list[str] = []
    context = chromium.new_context(base_url=url, locale="en-GB", timezone_id="Europe/Berlin")
    context.set_default_timeout(120_000)
    page = context.new_page()
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: _answer(dialog, complaints))
    page.on(
        "console",
        lambda line: complaints.append(line.text) if "Content Security" in line.text else None,
    )
    yield page
    context.close()
    assert complaints == []


@pytest.fixture
def quick_refreshes(page: Page) -> None:
    """Let the page wait a tenth of its seconds, for tests that wait for what it shows then."""
    page.add_init_script(QUICK)


def _answer(dialog: Dialog, complaints: list[str]) -> None:
    """Accept a page's confirmation of leaving; any other dialog is a complaint."""
    if dialog.type == "beforeunload":
        dialog.accept()
    else:
        complaints.append(dialog.message)
        dialog.dismiss()

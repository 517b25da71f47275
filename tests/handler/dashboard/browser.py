"""Headless Chromium: where it is, and how tests speak to it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, expect, sync_playwright

_ROOT = Path(__file__).parents[3]
_NAMES = ("chromium", "chromium-browser", "google-chrome")
NO_CHROMIUM = "no Chromium: name yours in CHROMIUM; for Linux on x86_64 `make browser` gets one"
# What `make` unpacks from npm where there is none of these.
_UNPACKED = _ROOT / "tests" / "browser" / "chromium" / "run"


def find_chromium() -> Path | None:
    """Return the browser: `CHROMIUM` names it, or it is on the PATH, or `make test` has got it."""
    named = os.environ.get("CHROMIUM")
    if named:
        return Path(named)
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found:
        return Path(found)
    return _UNPACKED if _UNPACKED.exists() else None


@contextmanager
def running_chromium(executable: Path) -> Iterator[Browser]:
    """Run the browser until the block is left."""
    expect.set_options(timeout=120_000)  # reached only when something hangs
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=executable,
            # Tests run in containers, often as root, where its own walls cannot be built.
            args=["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"],
        )
        try:
            yield browser
        finally:
            browser.close()

"""User actions on the page, and elements that tests look for."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page

from tests.warm_start import COLD_VARIABLE

_AXE = Path(__file__).parents[2] / "browser/node_modules/axe-core/axe.min.js"
_LOOKS = ((1280, "light"), (375, "dark"), (1280, "dark"), (375, "light"))


def sign_in(page: Page, key: str, at: str = "") -> None:
    """Open the page and sign in."""
    page.goto(f"/dashboard{at}")
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Sign in").click()


def obstacles(page: Page) -> list[str]:
    """Return what axe finds that keeps people from using the page."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(_axe())
    found: dict[str, Any] = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{violation['id']}: {node['target']} {node['failureSummary']}"
        for violation in found["violations"]
        for node in violation["nodes"]
    ]


def check_looks(page: Page) -> None:
    """Check what the tab shows on a desktop and on a phone, in the light and in the dark.

    `make test` tries each once, `make test-all` also the other two pairs.
    """
    for width, scheme in _LOOKS if COLD_VARIABLE in os.environ else _LOOKS[:2]:
        page.set_viewport_size({"width": width, "height": 800})
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, width
        assert obstacles(page) == [], (width, scheme)


def take_picture(page: Page, name: str, height: int) -> None:
    """Take a picture of the page for the documentation, if `PICTURES` names a folder for it."""
    folder = os.environ.get("PICTURES")
    if folder:
        page.set_viewport_size({"width": 1000, "height": height})
        page.emulate_media(color_scheme="light")
        page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
        page.screenshot(path=Path(folder) / f"{name}.png", animations="disabled")


@cache
def _axe() -> str:
    if not _AXE.exists():
        pytest.skip("no axe-core: `make browser` gets it")
    return _AXE.read_text(encoding="utf-8")

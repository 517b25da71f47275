"""What people do on the page."""

from __future__ import annotations

from playwright.sync_api import Page


def sign_in(page: Page, key: str, at: str = "") -> None:
    """Open the page and sign in."""
    page.goto(f"/dashboard{at}")
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Sign in").click()

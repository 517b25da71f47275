"""Views of a deployment and of a local server."""

from __future__ import annotations

from tidemill.dashboard import pages
from tidemill.protocol.names import ANY_MODEL

LOCAL = pages.Site(is_local=True)


def test_the_form_names_models_and_the_place_of_uploads() -> None:
    """A server may accept any name."""
    names = "<code>a</code>, <code>b</code>"
    assert f"{names}." in pages.form(pages.Site(), ["a", "b"])
    assert f"{names}, or any other name." in pages.form(LOCAL, ["a", ANY_MODEL, "b"])
    assert "to the bucket" in pages.form(pages.Site(), [])
    assert "bucket" not in pages.form(LOCAL, [])


def test_only_a_page_with_keys_has_a_sign_in_form() -> None:
    """Signed requests are explained instead; a server without keys needs nothing."""
    for site, auth, has_form in [
        (pages.Site(), "keys", True),
        (pages.Site(), "iam", False),
        (LOCAL, "keys", True),
        (LOCAL, "none", False),
    ]:
        page = pages.page(site, auth)
        assert ('id="sign-in-form"' in page) == has_form
        assert ('id="sign-out"' in page) == has_form
        assert ("tidemill keys create" in page) == (has_form and not site.is_local)

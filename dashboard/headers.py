"""Headers of all responses of the dashboard, which isolate the page."""

from __future__ import annotations

from typing import Final

FOR_EVER: Final = "public, max-age=31536000, immutable"


def headers(*, cache: str = "no-store", upload_origin: str = "") -> dict[str, str]:
    """Return the headers of a response.

    `upload_origin` is the bucket's origin if browsers upload files directly to it.
    """
    rules = {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        "img-src": "'self'",
        "media-src": "data:",  # recordings within requests
        "connect-src": f"'self' {upload_origin}".rstrip(),
        "form-action": "'none'",
        "base-uri": "'none'",
        "frame-ancestors": "'none'",
    }
    return {
        "Cache-Control": cache,
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in rules.items()),
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "Vary": "Accept-Encoding",
        "X-Content-Type-Options": "nosniff",
    }

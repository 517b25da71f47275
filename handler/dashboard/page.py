"""The page and its files, and the headers that all answers of the dashboard have."""

from __future__ import annotations

from functools import cache
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import urlsplit

from aws_lambda_powertools.event_handler import Response

from ..api.envelope.caller import aws
from ..api.envelope.errors import NotFound
from ..aws.calls import Call
from ..deployment import deployment
from .assets import assets, type_of, version
from .render import render

_FOR_EVER: Final = "public, max-age=31536000, immutable"


def show() -> Response[str]:
    """Return the page."""
    return html("page.html", auth=deployment().settings.auth)


def asset(wanted: str, name: str) -> Response[str]:
    """Return a file of the page, to be kept for ever; one of another version is not there."""
    if wanted != version() or name not in assets():
        raise NotFound("There is no such file; load the page again.", code="unknown_asset")
    return serve_text(assets()[name], type_of(name), cache=_FOR_EVER)


def html(template: str, **values: Any) -> Response[str]:
    """Return a template with its values."""
    return serve_text(render(template, **values), "text/html; charset=utf-8")


def serve_text(body: str, content_type: str, *, cache: str = "no-store") -> Response[str]:
    """Return a text with the headers that keep the page to itself."""
    return Response(
        int(HTTPStatus.OK),
        content_type,
        body,
        headers={
            "Cache-Control": cache,
            "Content-Security-Policy": _policy(),
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "Vary": "Accept-Encoding",
            "X-Content-Type-Options": "nosniff",
        },
    )


@cache
def _origin_of(bucket: str) -> str:
    """Return where presigned urls of a bucket lead."""
    some_put = Call("s3", "put_object", {"Bucket": bucket, "Key": "files/"})
    url = urlsplit(aws().presign(some_put, 60))
    return f"{url.scheme}://{url.netloc}"


def _policy() -> str:
    """Return the content security policy's sources: this origin and no other."""
    rules = {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        # The style sheet of Pico brings its icons as data.
        "img-src": "'self' data:",
        # Files go straight to the bucket.
        "connect-src": f"'self' {_origin_of(deployment().bucket.name)}",
        "form-action": "'none'",
        "base-uri": "'none'",
        "frame-ancestors": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())

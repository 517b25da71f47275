"""The page and its files, and the headers of all dashboard responses."""

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
    """Return a file of the page, cacheable for ever; another version's is not found."""
    if wanted != version() or name not in assets():
        raise NotFound("File not found: reload the page.", code="unknown_asset")
    return serve_text(assets()[name], type_of(name), cache=_FOR_EVER)


def html(template: str, **values: Any) -> Response[str]:
    """Return a rendered template."""
    return serve_text(render(template, **values), "text/html; charset=utf-8")


def serve_text(body: str, content_type: str, *, cache: str = "no-store") -> Response[str]:
    """Return a text with the headers that isolate the page."""
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
    """Return the origin of a bucket's presigned URLs."""
    some_put = Call("s3", "put_object", {"Bucket": bucket, "Key": "files/"})
    url = urlsplit(aws().presign(some_put, 60))
    return f"{url.scheme}://{url.netloc}"


def _policy() -> str:
    """Return the content security policy's sources: this origin and no other."""
    rules = {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        # Pico's style sheet contains its icons as data URLs.
        "img-src": "'self' data:",
        # Browsers upload files directly to the bucket.
        "connect-src": f"'self' {_origin_of(deployment().bucket.name)}",
        "form-action": "'none'",
        "base-uri": "'none'",
        "frame-ancestors": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())

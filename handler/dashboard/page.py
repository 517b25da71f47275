"""Responses of the dashboard."""

from __future__ import annotations

from functools import cache
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from aws_lambda_powertools.event_handler import Response

from tidemill.dashboard import pages
from tidemill.dashboard.assets import assets, type_of, version
from tidemill.dashboard.headers import FOR_EVER, headers

from ..api.envelope.caller import aws
from ..api.envelope.errors import NotFound
from ..aws.calls import Call
from ..deployment import deployment


def show() -> Response[str]:
    """Return the page."""
    return html(pages.page(deployment().settings.auth))


def asset(wanted: str, name: str) -> Response[str]:
    """Return a file of the page, cacheable for ever; another version's is not found."""
    if wanted != version() or name not in assets():
        raise NotFound("File not found: reload the page.", code="unknown_asset")
    return serve_text(assets()[name], type_of(name), cache=FOR_EVER)


def site() -> pages.Site:
    """Return the deployment as the page shows it."""
    settings = deployment().settings
    return pages.Site(currency=settings.currency if settings.gpu_hour_prices else "")


def html(text: str) -> Response[str]:
    """Return HTML."""
    return serve_text(text, "text/html; charset=utf-8")


def serve_text(body: str | bytes, content_type: str, *, cache: str = "no-store") -> Response[Any]:
    """Return a text, or bytes, with the headers that isolate the page."""
    origin = _origin_of(deployment().bucket.name)
    return Response(
        int(HTTPStatus.OK), content_type, body, headers=headers(cache=cache, upload_origin=origin)
    )


@cache
def _origin_of(bucket: str) -> str:
    """Return the origin of a bucket's presigned URLs."""
    some_put = Call("s3", "put_object", {"Bucket": bucket, "Key": "files/"})
    url = urlsplit(aws().presign(some_put, 60))
    return f"{url.scheme}://{url.netloc}"

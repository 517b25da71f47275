"""Redirects, with a sentence for clients that do not follow them."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

from aws_lambda_powertools.event_handler import Response, content_types


def redirect(url: str, sentence: str, headers: Mapping[str, str] | None = None) -> Response[str]:
    """Return a response that redirects a client to a URL with the same method."""
    return Response(
        status_code=int(HTTPStatus.TEMPORARY_REDIRECT),
        content_type=f"{content_types.TEXT_PLAIN}; charset=utf-8",
        body=f"{sentence}\n",
        headers={"Location": url, **(headers or {})},
    )

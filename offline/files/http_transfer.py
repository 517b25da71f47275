"""HTTP downloads and uploads, retried with backoff on transient errors.

Query strings of URLs may contain secrets, so messages never contain them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import IO, TYPE_CHECKING
from urllib.parse import parse_qsl, unquote, urlsplit

from tidemill.net.backoff import retry

from ..console.errors import TransferFailed
from ..console.terminal import amount, log
from .paths import display_name

if TYPE_CHECKING:
    import httpx

RETRY_DELAYS_SECONDS = (1.0, 2.0, 4.0, 8.0)

_TIMEOUT_SECONDS = 60.0
_CONNECT_TIMEOUT_SECONDS = 15.0
_CHUNK_BYTES = 2**20
_MAX_ERROR_TEXT = 2_000
_MAX_REDIRECTS = 5
_MIN_SECRET_LENGTH = 6


class _TransientError(Exception):
    """A transient error: a timeout, a broken connection or a 5xx."""


def download(url: str, into: IO[bytes], *, delays: tuple[float, ...]) -> None:
    """Download a URL to `into`, from the start in each attempt.

    Timeouts, broken connections and 5xx are retried after each of `delays` (seconds); a 4xx fails
    immediately. Raises TransferFailed.
    """

    def attempt(client: httpx.Client) -> None:
        into.seek(0)
        into.truncate()
        with client.stream("GET", url, follow_redirects=True) as response:
            _check(response, url)
            for chunk in response.iter_bytes(_CHUNK_BYTES):
                into.write(chunk)

    _try(attempt, f"reading {display_name(url)}", url, delays)


def upload(url: str, rows: IO[bytes], *, delays: tuple[float, ...]) -> None:
    """PUT `rows` to the URL, with the retries of `download`; any 2xx is a success."""

    def attempt(client: httpx.Client) -> None:
        target = url
        for _ in range(_MAX_REDIRECTS):
            rows.seek(0)
            with client.stream("PUT", target, content=rows) as response:
                if response.status_code not in {307, 308} or response.next_request is None:
                    _check(response, url)
                    return
                target = str(response.next_request.url)
        raise TransferFailed(f"writing {display_name(url)} failed: too many redirects")

    _try(attempt, f"writing {display_name(url)}", url, delays)


def _try(
    attempt: Callable[[httpx.Client], None], doing: str, url: str, delays: tuple[float, ...]
) -> None:
    import httpx

    # At INFO, httpx logs whole URLs.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    timeout = httpx.Timeout(_TIMEOUT_SECONDS, connect=_CONNECT_TIMEOUT_SECONDS)
    with httpx.Client(timeout=timeout) as client:

        def attempt_once() -> None:
            try:
                attempt(client)
            except httpx.TimeoutException:
                raise _TransientError("the server timed out") from None
            except (httpx.HTTPError, httpx.InvalidURL) as exc:
                words = _without_secrets(f"{type(exc).__name__}: {exc}", url)
                if isinstance(exc, httpx.TransportError):
                    raise _TransientError(words) from None
                raise TransferFailed(f"{doing} failed: {words}") from None

        def log_retry(fault: _TransientError, delay: float) -> None:
            log(f"{doing}: {fault}; retrying in {delay:g} s")

        try:
            retry(attempt_once, delays, _TransientError, notify=log_retry)
        except _TransientError as fault:
            times = amount(len(delays) + 1, "time")
            raise TransferFailed(f"{doing} failed {times}; last error: {fault}") from None


def _check(response: httpx.Response, url: str) -> None:
    """Raise an error with the server's text for any status except a 2xx."""
    if response.is_success:
        return
    text = _error_text(response)
    words = f"HTTP {response.status_code} {response.reason_phrase}".rstrip()
    words = _without_secrets(f"{words}: {text}" if text else words, url)
    if response.is_server_error:
        raise _TransientError(words)
    verb = "writing" if response.request.method == "PUT" else "reading"
    raise TransferFailed(f"{verb} {display_name(url)} failed: {words}")


def _error_text(response: httpx.Response) -> str:
    import httpx

    body = bytearray()
    with contextlib.suppress(httpx.HTTPError):
        for chunk in response.iter_bytes(_MAX_ERROR_TEXT):
            body += chunk
            if len(body) >= _MAX_ERROR_TEXT:
                break
    return " ".join(body[:_MAX_ERROR_TEXT].decode("utf-8", "replace").split())


def _without_secrets(text: str, url: str) -> str:
    """Redact the URL's query and credentials, which servers may echo in errors."""
    parts = urlsplit(url)
    secrets = {parts.query, unquote(parts.query), parts.username or "", parts.password or ""}
    secrets.update(value for _, value in parse_qsl(parts.query))
    secrets.update(pair.partition("=")[2] for pair in parts.query.split("&"))
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= _MIN_SECRET_LENGTH:
            text = text.replace(secret, "…")
    return text

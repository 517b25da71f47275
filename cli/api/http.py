"""HTTP client of the API: retries with backoff, and error responses as exceptions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, TypeVar

import httpx

from tidemill.net.backoff import retry_after
from tidemill.offline.console.backoff import SHORT_SECONDS, Backoff
from tidemill.offline.console.errors import KeyRefused, ServerRefused

from .server import API_KEY, BASE_URL, Server

TIMEOUT = httpx.Timeout(60.0, connect=15.0)
_MAX_SHOWN_CHARS = 500
_TRANSIENT_STATUSES = frozenset({408, 425, 429})

T = TypeVar("T")

# At INFO, httpx logs whole URLs, and presigned URLs are secrets.
logging.getLogger("httpx").setLevel(logging.WARNING)


def is_transient(response: httpx.Response) -> bool:
    """Return whether the error may be transient: 408, 425, 429 or 5xx."""
    return response.is_server_error or response.status_code in _TRANSIENT_STATUSES


def fault_of(exc: httpx.TransportError) -> str:
    """Return the message of a transport error, without the URL."""
    if isinstance(exc, httpx.TimeoutException):
        return "timed out"
    return f"{exc}".strip() or type(exc).__name__


class Http:
    """Connection pool to one server, with its key."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._client = httpx.Client(
            base_url=f"{server.url}/v1/",
            headers={"Accept": "application/json"} | _key_header(server),
            timeout=TIMEOUT,
        )

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def ask(
        self,
        read: Callable[[dict[str, Any]], T],
        method: str,
        path: str,
        *,
        retry_seconds: float = SHORT_SECONDS,
        **content: Any,
    ) -> T:
        """Send a request and return `read` of the JSON response.

        Transient errors are retried for `retry_seconds`, honouring `Retry-After`. Raises
        Unreachable, KeyRefused, ServerRefused.
        """
        response = self.send(method, path, retry_seconds=retry_seconds, **content)
        if not response.is_success:
            raise self._stranger(response)
        try:
            return read(response.json())
        except (ValueError, TypeError, KeyError, AttributeError) as exc:
            raise self._stranger(response) from exc

    def send(
        self,
        method: str,
        path: str,
        *,
        retry_seconds: float = SHORT_SECONDS,
        **content: Any,
    ) -> httpx.Response:
        """Send a request without following redirects; raises an exception for an error status."""
        return self._try(
            lambda: self._client.request(method, path, **content), Backoff(retry_seconds)
        )

    def send_once(self, method: str, path: str, **content: Any) -> httpx.Response:
        """Send a request without retries; raises httpx's errors."""
        return self._client.request(method, path, **content)

    @contextmanager
    def open(self, method: str, path: str, **content: Any) -> Iterator[httpx.Response]:
        """Yield a streamed response; retries and errors are those of `send`."""

        def attempt() -> httpx.Response:
            request = self._client.build_request(method, path, **content)
            response = self._client.send(request, stream=True)
            if response.is_error:
                response.read()
            return response

        response = self._try(attempt, Backoff(SHORT_SECONDS))
        try:
            yield response
        finally:
            response.close()

    def _try(self, attempt: Callable[[], httpx.Response], backoff: Backoff) -> httpx.Response:
        while True:
            try:
                response = attempt()
            except httpx.TransportError as exc:
                backoff.wait(
                    f"{self._server.url} cannot be reached: {fault_of(exc)}. Check the network "
                    f"and {BASE_URL} or --base-url"
                )
                continue
            except (httpx.HTTPError, httpx.InvalidURL) as exc:
                raise ServerRefused(f"the request to {self._server.url} failed: {exc}") from exc
            if not response.is_error:
                return response
            refusal = self._refusal(response)
            if not is_transient(response):
                raise refusal
            backoff.wait(str(refusal), retry_after(response.headers))

    def _refusal(self, response: httpx.Response) -> ServerRefused | KeyRefused:
        message, code = _words_of(response)
        if response.status_code == 401 or (response.status_code == 403 and code is None):
            return KeyRefused(self._words_of_key(response))
        if message is None:
            return self._stranger(response)
        if response.status_code == 429:
            words = f"the server's rate limit was exceeded: {message}"
        elif response.is_server_error:
            words = f"the server failed ({_status_of(response)}): {message}"
        else:
            words = message
        return ServerRefused(words, status=response.status_code, error_code=code)

    def _words_of_key(self, response: httpx.Response) -> str:
        status = _status_of(response)
        if not self._server.key:
            return (
                f"{self._server.url} requires an API key ({status}): set {API_KEY} "
                "(`tidemill keys create --name NAME` creates one for a deployment)"
            )
        return (
            f"{self._server.url} rejected the API key in {API_KEY} ({status}): it is incorrect, "
            "revoked or from another deployment; `tidemill keys create --name NAME` creates one"
        )

    def _stranger(self, response: httpx.Response) -> ServerRefused:
        request = response.request
        return ServerRefused(
            f"{request.method} {request.url.copy_with(query=None)} returned "
            f"{_status_of(response)}, which is not a response of Tidemill's API: check {BASE_URL} "
            "or --base-url",
            status=response.status_code,
        )


def _key_header(server: Server) -> dict[str, str]:
    return {"Authorization": f"Bearer {server.key}"} if server.key else {}


def _status_of(response: httpx.Response) -> str:
    try:
        phrase = HTTPStatus(response.status_code).phrase
    except ValueError:
        phrase = ""
    return f"HTTP {response.status_code} {phrase}".rstrip()


def _words_of(response: httpx.Response) -> tuple[str | None, str | None]:
    """Return the message and code of an OpenAI or API Gateway error, otherwise None for both."""
    try:
        body = response.json()
        error = body.get("error", body)
        message, code = error["message"], error.get("code")
    except (ValueError, AttributeError, KeyError, TypeError):
        return None, None
    if not isinstance(message, str):
        return None, None
    return message[:_MAX_SHOWN_CHARS], code if isinstance(code, str) else None

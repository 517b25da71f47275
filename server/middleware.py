"""ASGI middleware: API keys, origin checks, request metrics and client disconnects."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tidemill.protocol.contract import EngineError

from .context import ServerContext
from .disconnect import ClientDisconnected
from .errors import Refused, error_response, stopping
from .info_routes import ASSETS, KEYLESS, OPEN_PATHS
from .origins import OriginCheck
from .request_bodies import header

_BEARER = "bearer "
_OTHER = "other"


class ServerMiddleware:
    """Authenticates, refuses cross-site requests, records metrics and handles disconnects."""

    def __init__(self, app: ASGIApp, context: ServerContext, paths: frozenset[str]) -> None:
        self._app = app
        self._metrics = context.metrics
        self._admission = context.admission
        self._api_keys = ApiKeys(context.settings.api_keys)
        self._origins = OriginCheck(context.settings)
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, until it is answered or its client disconnects."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, status, started = scope["path"], 0, time.monotonic()

        async def send_and_record(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        app = self._app
        is_open = path in OPEN_PATHS or path.startswith(ASSETS)
        if refused := None if is_open else self._refused(scope):
            app = error_response(refused, path)
        try:
            await app(scope, receive, send_and_record)
        except ClientDisconnected:
            status = status or 499
        except asyncio.CancelledError:
            if not self._admission.is_closed:
                raise
            if not status:  # the drain timeout cancelled it before its body arrived
                await error_response(stopping(1), path)(scope, receive, send_and_record)
        except EngineError:  # the client has its 503 already
            self._admission.mark_engine_lost()
        finally:
            route = path if path in self._paths else _OTHER
            self._metrics.requests.labels(route, str(status or 500)).inc()
            self._metrics.seconds.labels(route).observe(time.monotonic() - started)

    def _refused(self, scope: Scope) -> Refused | None:
        """Return the refusal for a missing key or a foreign origin, or None."""
        needs_key = KEYLESS.fullmatch(scope["path"]) is None
        # Anthropic's clients send the key in another header.
        own = header(scope, b"x-api-key")
        given = header(scope, b"authorization") or (own and f"{_BEARER}{own}")
        if needs_key and not self._api_keys.accepts(given):
            return _no_key()
        return self._origins.check(scope)


class ApiKeys:
    """API keys, kept as digests; without any key the server is open to all."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def accepts(self, authorization: str | None) -> bool:
        """Say whether a header holds a valid key; takes constant time."""
        if not self._digests:
            return True
        value = authorization or ""
        is_bearer = value[: len(_BEARER)].lower() == _BEARER
        digest = _digest(value[len(_BEARER) :].strip())
        matches = [hmac.compare_digest(digest, each) for each in self._digests]
        return is_bearer and any(matches)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _no_key() -> Refused:
    return Refused(
        "Missing or incorrect API key: send `Authorization: Bearer KEY`.",
        status_code=401,
        code="invalid_api_key",
        type="authentication_error",
        headers={"WWW-Authenticate": "Bearer"},
    )

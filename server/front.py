"""What stands before every route: who is let in, and what is noted of every answer."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.errors import EngineError
from server.about import OPEN_PATHS
from server.bodies import header
from server.clients import ClientGone
from server.errors import Refused, refusal, stopping
from server.means import Means
from server.origins import Origins

_BEARER = "bearer "
_OTHER = "other"


class Front:
    """Asks for a key, refuses cross-site requests, counts, and lets go of whoever has gone away."""

    def __init__(self, app: ASGIApp, means: Means, paths: frozenset[str]) -> None:
        self._app = app
        self._figures = means.figures
        self._gate = means.gate
        self._keys = Keys(means.settings.api_keys)
        self._origins = Origins(means.settings)
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, unless its client goes away meanwhile."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, status, begun = scope["path"], 0, time.monotonic()

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        app = self._app
        if refused := None if path in OPEN_PATHS else self._refused(scope):
            app = refusal(refused)
        try:
            await app(scope, receive, noting)
        except ClientGone:
            status = status or 499
        except asyncio.CancelledError:
            if not self._gate.is_closed:
                raise
            if not status:  # its body has not come in the time that there was
                await refusal(stopping(1))(scope, receive, noting)
        except EngineError:  # has been answered
            self._gate.give_up()
        finally:
            route = path if path in self._paths else _OTHER
            self._figures.requests.labels(route, str(status or 500)).inc()
            self._figures.seconds.labels(route).observe(time.monotonic() - begun)

    def _refused(self, scope: Scope) -> Refused | None:
        """Return the refusal of a request by who sends it, or None."""
        if not self._keys.let_in(header(scope, b"authorization")):
            return _no_key()
        return self._origins.refused(scope)


class Keys:
    """Which keys open the server; without any it is open to all."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def let_in(self, authorization: str | None) -> bool:
        """Say whether a header holds one of the keys, in the same time whichever it is."""
        if not self._digests:
            return True
        given = authorization or ""
        is_bearer = given[: len(_BEARER)].lower() == _BEARER
        digest = _digest(given[len(_BEARER) :].strip())
        matches = [hmac.compare_digest(digest, each) for each in self._digests]
        return is_bearer and any(matches)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _no_key() -> Refused:
    return Refused(
        "No key, or one that this server does not know: send `Authorization: Bearer KEY`.",
        status_code=401,
        code="invalid_api_key",
        type="authentication_error",
        headers={"WWW-Authenticate": "Bearer"},
    )

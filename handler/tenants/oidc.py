"""Users' tokens, signed by an OpenID Connect issuer; accepted in addition to API keys.

The issuer's keys are fetched on demand and cached. Nothing here is imported or fetched without a
token: importing PyJWT and cryptography takes longer than a request with a key.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

from tidemill.batch.errors import HandlerError, InvalidOption
from tidemill.batch.object_keys import check_tenant

from ..observability import logger
from ..settings import Oidc

if TYPE_CHECKING:
    from jwt import PyJWK

# Both are asymmetric: verifying a token does not require its signing key.
ALGORITHMS: Final = ("RS256", "ES256")
_DISCOVERY: Final = "/.well-known/openid-configuration"
_FETCH_SECONDS: Final = 3.0
_MAX_BYTES: Final = 256 * 1024
# Clocks of issuers and Lambdas differ.
_LEEWAY_SECONDS: Final = 60
# Keys are fetched again after an hour, and for one that is not among them once a minute.
_FRESH_SECONDS: Final = 3600
_AGAIN_SECONDS: Final = 60
# If the issuer cannot be reached, its keys stay valid for a day, with a retry every few seconds.
_STALE_SECONDS: Final = 24 * 3600
RETRY_SECONDS: Final = 5

Fetch = Callable[[str], Any]


class TokenRefused(HandlerError):
    """An invalid token; the message has the reason and no part of the token."""

    code = "invalid_token"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class IssuerUnavailable(HandlerError):
    """The issuer's keys are neither cached nor reachable at present."""

    code = "issuer_unavailable"


@dataclass(frozen=True, slots=True)
class Person:
    """Owner of a token: the tenant that it names, and the issuer's ID of the user."""

    tenant: str
    subject: str


class TokenVerifier:
    """Verifies tokens of one issuer; thread-safe."""

    def __init__(self, settings: Oidc, fetch: Fetch | None = None) -> None:
        self._settings = settings
        self._keys = IssuerKeys(settings.issuer, fetch or fetch_json)

    def verify(self, token: str, now: float) -> Person:
        """Return the owner of a token; raises TokenRefused, or IssuerUnavailable without keys."""
        import jwt

        settings = self._settings
        if not token.isascii():  # it could not be encoded with a lone surrogate in it
            raise TokenRefused("The token is refused: it is malformed.")
        try:
            header = jwt.get_unverified_header(token)
            if header.get("alg") not in ALGORITHMS or not isinstance(header.get("kid"), str):
                raise TokenRefused(f"The token is not signed by a named key with {_named()}.")
            claims = jwt.decode(
                token,
                self._keys.find(header["kid"], now),
                algorithms=ALGORITHMS,
                issuer=settings.issuer,
                audience=settings.audience,
                leeway=_LEEWAY_SECONDS,
                options={
                    "require": ["exp", "iss", "aud", "sub"],
                    "enforce_minimum_key_length": True,
                },
            )
        except jwt.PyJWTError as exc:
            raise TokenRefused(f"The token is refused: {_reason(exc)}.") from exc
        tenant = claims.get(settings.tenant_claim)
        try:
            # Not `str()` of it: null would become a name.
            return Person(check_tenant(tenant if isinstance(tenant, str) else ""), claims["sub"])
        except InvalidOption as exc:
            raise TokenRefused(
                f"The token's claim `{settings.tenant_claim}` does not name a tenant."
            ) from exc


class IssuerKeys:
    """The published keys of an issuer, by their IDs."""

    def __init__(self, issuer: str, fetch: Fetch) -> None:
        self._issuer, self._fetch = issuer, fetch
        self._keys: dict[str, PyJWK] = {}
        self._fetched_at = self._ask_again_at = float("-inf")
        self._is_reachable = True
        self._asking = Lock()

    def find(self, key_id: str, now: float) -> PyJWK:
        """Return a key; raises TokenRefused for one that the issuer does not have."""
        with self._asking:
            key = self._keys.get(key_id)
            is_fresh = now - self._fetched_at < _FRESH_SECONDS
            if (key is None or not is_fresh) and now >= self._ask_again_at:
                self._refresh(now)
                key = self._keys.get(key_id)
            if key is not None and now - self._fetched_at < _STALE_SECONDS:
                return key
            if not self._is_reachable:
                raise IssuerUnavailable("the issuer's keys cannot be fetched")
            raise TokenRefused("The token is signed by a key that its issuer does not publish.")

    def _refresh(self, now: float) -> None:
        try:
            about = self._fetch(self._issuer.rstrip("/") + _DISCOVERY)
            if about["issuer"] != self._issuer:
                raise ValueError(f"its issuer is {about['issuer']!r}")  # noqa: TRY301 - one end
            self._keys = dict(_signing_keys(self._fetch(about["jwks_uri"])))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
            logger.error("issuer unavailable", issuer=self._issuer, error=str(exc)[:200])
            self._is_reachable, self._ask_again_at = False, now + RETRY_SECONDS
        else:
            self._is_reachable = True
            self._fetched_at, self._ask_again_at = now, now + _AGAIN_SECONDS


def _signing_keys(published: Any) -> list[tuple[str, PyJWK]]:
    """Return the signing keys by their IDs; others are left out."""
    from jwt import PyJWK, PyJWTError

    found = []
    for each in published["keys"]:
        if each.get("use", "sig") != "sig" or each.get("kty") not in {"RSA", "EC"}:
            continue
        try:
            key = PyJWK(each)
        except (PyJWTError, ValueError):  # such as an unknown curve
            continue
        if key.algorithm_name in ALGORITHMS and "kid" in each:
            found.append((each["kid"], key))
    return found


def fetch_json(url: str) -> Any:
    """Return the response to an https URL; raises OSError or ValueError."""
    from http.client import HTTPException
    from urllib.request import HTTPRedirectHandler, build_opener

    class Staying(HTTPRedirectHandler):
        """Follows no redirect: keys come from the issuer's URL only."""

        def redirect_request(self, *_: Any) -> None:
            """Refuse a redirect, which is then an error."""

    if not url.startswith("https://"):
        raise ValueError("its keys are not at an https URL")
    try:
        with build_opener(Staying).open(url, timeout=_FETCH_SECONDS) as answer:
            content = answer.read(_MAX_BYTES + 1)
    except HTTPException as exc:  # such as a reply that is not HTTP, or that breaks off
        raise OSError(f"{type(exc).__name__}: {exc}") from exc
    if len(content) > _MAX_BYTES:
        raise ValueError(f"the response has more than {_MAX_BYTES:,} bytes")
    return json.loads(content)


def is_token(text: str) -> bool:
    """Return whether a text has the format of a token: three parts between dots, unlike a key."""
    return text.count(".") == 2


def _named() -> str:
    return " or ".join(ALGORITHMS)


def _reason(exc: Exception) -> str:
    """Return the message for an error of PyJWT, by its class: its own may quote the token."""
    return _REASONS.get(type(exc).__name__, "it is malformed, or its signature is wrong")


_REASONS: Final = {
    "ExpiredSignatureError": "it has expired",
    "ImmatureSignatureError": "it is not valid yet",
    "InvalidAudienceError": "it is for another audience",
    "InvalidIssuerError": "it is from another issuer",
    "MissingRequiredClaimError": "it lacks one of exp, iss, aud and sub",
}

"""Authentication: the tenant of a valid API key, or of a request signed with IAM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from http import HTTPStatus
from typing import Any, Final

from aws_lambda_powertools.utilities.data_classes import APIGatewayProxyEventV2

from tidemill.batch.object_keys import DROP_TENANT

from ...aws.calls import Operation
from ...aws.sync import Aws
from ...deployment import Deployment
from ...observability import logger
from ...tenants.keys import is_key
from ...tenants.oidc import (
    RETRY_SECONDS,
    IssuerUnavailable,
    TokenRefused,
    TokenVerifier,
    is_token,
)
from .errors import Refused

_MAKE_ONE: Final = "Create a key with `tidemill keys create`."
_WRONG_KEY: Final = (
    f"Invalid or revoked API key. Keys of this deployment begin with `tm_`. {_MAKE_ONE}"
)
_WRONG_TOKEN: Final = "The token was refused a moment ago: send a new one."


@dataclass(frozen=True, slots=True)
class Caller:
    """Caller of a request; a signed request has no key, and a user with a token has a `subject`.

    Administrators see the use of all tenants.
    """

    tenant: str
    key_id: str | None = None
    subject: str | None = None
    is_admin: bool = False


class Unauthorized(Refused):
    """A request without a valid key; nothing of it was read or done."""

    status = HTTPStatus.UNAUTHORIZED


class IssuerDown(Refused):
    """A token that cannot be verified now, because its issuer's keys cannot be fetched."""

    code = "issuer_unavailable"
    status = HTTPStatus.SERVICE_UNAVAILABLE
    retry_after_seconds = RETRY_SECONDS


def identify(event: APIGatewayProxyEventV2, here: Deployment, now: float) -> Operation[Caller]:
    """Return the caller; raises Unauthorized without a valid key, AwsError if the store fails.

    Raises LimitReached for an address from which many wrong keys came. Every key is read, so a
    revoked one is refused from the next request on. Requests signed with IAM belong to the tenant
    that owns objects dropped into the bucket.
    """
    authorizer = event.request_context.authorizer
    if authorizer and authorizer.iam and authorizer.iam.user_arn:
        return Caller(DROP_TENANT)
    scheme, _, rest = (event.headers.get("authorization") or "").partition(" ")
    token = rest.strip()
    if scheme.lower() != "bearer" or not token:
        raise Unauthorized(
            f"Missing API key: send `Authorization: Bearer tm_…`. {_MAKE_ONE}",
            code="missing_api_key",
        )
    address = event.request_context.http.source_ip
    verifier = here.tokens if is_token(token) else None
    caller, words = None, _WRONG_TOKEN if verifier else _WRONG_KEY
    is_well_formed = verifier is not None or is_key(token)
    if not here.refusals.is_known(token, address, now, is_well_formed=is_well_formed):
        if verifier:
            caller, words = _verify(verifier, token, now)
        elif key := (yield from here.keys.check(token)):
            caller = Caller(key.tenant, key.id, is_admin=key.is_admin)
        here.refusals.note(token, address, now, is_right=caller is not None)
    if caller is None:
        logger.info("key refused", address=address)
        raise Unauthorized(words, code="invalid_api_key")
    return caller


def _verify(tokens: TokenVerifier, token: str, now: float) -> tuple[Caller | None, str]:
    """Return the user with a token, or why it is refused; raises IssuerDown."""
    try:
        person = tokens.verify(token, now)
    except TokenRefused as exc:
        return None, exc.message
    except IssuerUnavailable as exc:
        raise IssuerDown("The keys of the token's issuer cannot be fetched; try again.") from exc
    return Caller(person.tenant, subject=person.subject), ""


def tenant_of(context: Mapping[str, Any]) -> str:
    """Return the tenant of the current request, from the context that authentication sets.

    Raises KeyError if the request was not authenticated.
    """
    caller: Caller = context["caller"]
    return caller.tenant


aws = cache(Aws)

# Context key of a HEAD request, which is answered like a GET.
IS_HEAD = "is_head"

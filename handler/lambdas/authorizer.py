"""The HTTP API's authorizer: whose key a request carries."""

from __future__ import annotations

from functools import cache
from typing import Any

from aws_lambda_powertools.utilities.typing import LambdaContext

from handler.aws.sync import Aws
from handler.deployment import deployment
from handler.log import logger
from handler.tenants.keys import KeyStore

_aws = cache(Aws)


# An event is never logged, whatever the environment says: it holds the caller's key.
@logger.inject_lambda_context(log_event=False, correlation_id_path="requestContext.requestId")
def handler(event: dict[str, Any], context: LambdaContext) -> dict[str, Any]:  # noqa: ARG001 - Lambda's form
    """Say whether a request may pass, and for which tenant; a table that fails is an error.

    The event's form is 2.0 and the answer the simple one.
    """
    scheme, _, token = _authorization(event).partition(" ")
    if scheme.lower() != "bearer":
        return {"isAuthorized": False}
    key = _aws().run(KeyStore(deployment().settings.table).check(token.strip()))
    if key is None:
        logger.info("key refused")
        return {"isAuthorized": False}
    return {"isAuthorized": True, "context": {"tenant": key.tenant, "key_id": key.id}}


def _authorization(event: dict[str, Any]) -> str:
    headers = {name.lower(): value for name, value in (event.get("headers") or {}).items()}
    return str(headers.get("authorization") or "")

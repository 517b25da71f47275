"""The Lambda behind the HTTP API."""

from __future__ import annotations

from typing import Any

from aws_lambda_powertools.utilities.typing import LambdaContext

from handler.api.app import app
from handler.log import logger


@logger.inject_lambda_context
def handler(event: dict[str, Any], context: LambdaContext) -> dict[str, Any]:
    """Answer one request (payload format 2.0)."""
    return app.resolve(event, context)

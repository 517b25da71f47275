"""The Lambda behind the HTTP API."""

from __future__ import annotations

from typing import Any

from aws_lambda_powertools.utilities.typing import LambdaContext

from handler.api.app import app
from handler.log import logger


# An event is never logged, whatever the environment says: it holds the caller's key.
@logger.inject_lambda_context(log_event=False, correlation_id_path="requestContext.requestId")
def handler(event: dict[str, Any], context: LambdaContext) -> dict[str, Any]:
    """Answer one request (payload format 2.0), under the id that the logs have of it."""
    answer = app.resolve(event, context)
    answer["headers"]["x-request-id"] = event["requestContext"]["requestId"]
    return answer

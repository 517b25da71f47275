"""All routes of the API, and what becomes of errors; needs no Lambda to be called."""

from __future__ import annotations

from aws_lambda_powertools.event_handler import APIGatewayHttpResolver
from aws_lambda_powertools.event_handler.exceptions import NotFoundError
from aws_lambda_powertools.event_handler.openapi.exceptions import RequestValidationError

from handler.api import batches, errors, models

app = APIGatewayHttpResolver(enable_validation=True)
app.include_router(batches.router)
app.include_router(models.router)


@app.get("/health")
def health() -> dict[str, str]:
    """Say that the API answers; needs no key and asks nothing of AWS."""
    return {"status": "ok"}


app.not_found(errors.refuse_unknown)
app.exception_handler(errors.Refused)(errors.refuse)
app.exception_handler(RequestValidationError)(errors.refuse_invalid)
app.exception_handler(NotFoundError)(errors.refuse_unknown)
app.exception_handler(Exception)(errors.fail)

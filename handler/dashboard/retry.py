"""View of a batch's retry: how many requests it would run, and its dialog."""

from __future__ import annotations

from aws_lambda_powertools.event_handler import Response

from tidemill.dashboard.render import render
from tidemill.dashboard.retry_form import retry_values

from ..api.envelope.caller import aws
from ..api.routers.batches import kept_batch, router
from ..deployment import deployment
from ..errors import NotThere
from ..intake.retry_batch import count_failures
from .page import html


def retry(batch_id: str) -> Response[str]:
    """Return the dialog; empty if nothing can be retried."""
    batch = kept_batch(router.context, batch_id)
    try:
        counts = aws().run(count_failures(deployment(), batch)) if batch.is_terminal else None
        values = retry_values(batch, counts)
    except NotThere:  # the rows were deleted
        values = {"num_failed": 0}
    return html(render("retry.html", **values))

"""The part of the list that shows the use of the deployment in a month."""

from __future__ import annotations

import time

from aws_lambda_powertools.event_handler import Response

from tidemill.batch.month import is_month, month_of, month_words, shifted, total_of
from tidemill.dashboard.render import render

from ..api.envelope.caller import Caller, aws
from ..api.envelope.errors import Refused
from ..api.routers.batches import router
from ..deployment import deployment
from ..queries.month import month_use
from .page import html


def month_view(month: str) -> Response[str]:
    """Return the use of a month by model, and for an administrator by tenant."""
    now, settings = time.time(), deployment().settings
    present = month_of(now)
    month = month or present
    if not is_month(month):
        raise Refused(f"{month[:20]!r} is not a month: use a form like `{present}`.", param="month")
    caller: Caller = router.context["caller"]
    found = month_use(aws(), deployment(), caller.tenant, month, now)
    by_tenant = (
        aws().run(deployment().ledger.list_month_by_tenant(month)) if caller.is_admin else {}
    )
    uses = [use for use in found.uses if use.completed or use.failed or use.gpu_seconds]
    text = render(
        "month.html",
        title="This month" if month == present else month_words(month),
        words=month_words(month),
        before=shifted(month, -1),
        after=shifted(month, 1) if month < present else None,
        models={use.model: use for use in uses},
        total=total_of(found.uses),
        num_active=found.num_active,
        tenant=caller.tenant,
        by_tenant=by_tenant,
        currency=settings.currency,
        unpriced=[use.model for use in uses if settings.gpu_hour_price(use.model) is None],
    )
    return html(text)

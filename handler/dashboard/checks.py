"""Check of a file before its upload, with an estimate by the measured rate of its model."""

from __future__ import annotations

from aws_lambda_powertools.event_handler import Response
from pydantic import ValidationError

from tidemill.batch.allowed_media import AllowedMedia
from tidemill.batch.fleet import WorkerRate
from tidemill.dashboard import pages
from tidemill.dashboard.check_request import CheckRequest
from tidemill.dashboard.checked_file import estimate
from tidemill.protocol.validation import predicate

from ..api.envelope.bodies import read_json
from ..api.envelope.caller import aws
from ..api.envelope.errors import Refused
from ..deployment import deployment
from .page import html, site


def check(body: bytes, tenant: str) -> Response[str]:
    """Return what intake would say about a file, as far as its first bytes show."""
    try:
        request = CheckRequest.model_validate(read_json("", body))
    except ValidationError as exc:
        first = exc.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise Refused(f"`{name}` {predicate(first)}.", param=name) from exc
    here = deployment()
    found = request.check(here.models, media=AllowedMedia(here.bucket.name, tenant))
    model = found.model or ""
    rate = aws().run(here.fleets.get_rate(model)) if model else WorkerRate()
    price = here.settings.gpu_hour_price(model)
    expected = estimate(found, rate, price)
    return html(pages.check(site(), found, expected, has_price=price is not None))

"""Check of a file before its upload, with an estimate by the measured rate of its model."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from aws_lambda_powertools.event_handler import Response
from pydantic import Base64Bytes, BaseModel, Field, ValidationError

from tidemill.batch.fleet import WorkerRate
from tidemill.dashboard.file_check import CheckOptions, FileStart, check_file, estimate

from ..api.envelope.bodies import read_json
from ..api.envelope.caller import aws
from ..api.envelope.errors import Refused
from ..deployment import deployment
from .page import html


class CheckRequest(BaseModel):
    """A file that a browser wants to upload: its beginning, and the choices in the form."""

    name: Annotated[str, Field(max_length=1024)]
    bytes: Annotated[int, Field(ge=0)]
    head: Base64Bytes
    tail: Base64Bytes = b""
    recipe: dict[str, Any] | None = None
    on_invalid_line: Literal["fail", "skip"] = "fail"
    strict_parameters: bool = False


def check(body: bytes) -> Response[str]:
    """Return what intake would say about a file, as far as its first bytes show."""
    try:
        request = CheckRequest.model_validate(read_json("", body))
    except ValidationError as exc:
        first = exc.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise Refused(f"`{name}`: {first['msg']}.", param=name) from exc
    here = deployment()
    options = CheckOptions(
        here.models, request.recipe, request.on_invalid_line, request.strict_parameters
    )
    start = FileStart(request.name, request.bytes, request.head, request.tail)
    found = check_file(start, options)
    model = found.model or ""
    rate = aws().run(here.fleets.get_rate(model)) if model else WorkerRate()
    price = here.settings.gpu_hour_price(model)
    return html(
        "check.html",
        check=found,
        estimate=estimate(found, rate, price),
        has_price=price is not None,
        currency=here.settings.currency,
    )

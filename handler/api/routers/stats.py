"""`/v1/stats` and `/metrics`: the state of the caller's tenant, for external dashboards."""

from __future__ import annotations

import time
from http import HTTPStatus

from aws_lambda_powertools.event_handler import Response
from aws_lambda_powertools.event_handler.router import APIGatewayHttpRouter

from ...deployment import deployment
from ...queries.stats import StatsObject, tenant_stats
from ..envelope.caller import aws, tenant_of

router = APIGatewayHttpRouter()  # type: ignore[no-untyped-call]


@router.get("/v1/stats")
def show_stats() -> StatsObject:
    """Return the state of active batches, and totals over ended ones."""
    return tenant_stats(aws(), deployment(), tenant_of(router.context), time.time())


@router.get("/metrics")
def show_metrics() -> Response[str]:
    """Return the same in Prometheus's text format."""
    from .exposition import CONTENT_TYPE, expose

    return Response(int(HTTPStatus.OK), content_type=CONTENT_TYPE, body=expose(show_stats()))

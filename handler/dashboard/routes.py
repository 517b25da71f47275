"""The dashboard's routes. Their implementations are imported on first use, not by API requests.

The page and its assets contain no tenant's data and need no key; every view needs one.
"""

from __future__ import annotations

from typing import Annotated, Any

from aws_lambda_powertools.event_handler import Response
from aws_lambda_powertools.event_handler.openapi.params import Query
from aws_lambda_powertools.event_handler.router import APIGatewayHttpRouter

from ..api.envelope.bodies import body_of
from ..api.envelope.caller import tenant_of
from ..api.envelope.redirect import redirect

router = APIGatewayHttpRouter()  # type: ignore[no-untyped-call]


@router.get("/", include_in_schema=False)
def go_to_page() -> Response[Any]:
    """Redirect a browser that opens the API's address to the dashboard."""
    return redirect("/dashboard", "The dashboard is at /dashboard, the API under /v1.")


@router.get("/dashboard", compress=True, include_in_schema=False)
def show_page() -> Response[Any]:
    """Return the page, which is the same for every caller."""
    from .page import show

    return show()


@router.get("/dashboard/assets/<version>/<name>", compress=True, include_in_schema=False)
def show_asset(version: str, name: str) -> Response[Any]:
    """Return a file that the page loads."""
    from .page import asset

    return asset(version, name)


@router.get("/dashboard/view/session", include_in_schema=False)
def show_session() -> Response[Any]:
    """Return the owner of this key; the sign-in form calls it."""
    from .views import session

    return session()


@router.get("/dashboard/view/batches", compress=True, include_in_schema=False)
def show_batches(
    after: Annotated[str | None, Query()] = None,
    status: Annotated[str, Query()] = "",
    name: Annotated[str, Query()] = "",
) -> Response[Any]:
    """Return a page of the tenant's batches with this status and name, newest first."""
    from .views import batches

    return batches(after, status, name)


@router.get("/dashboard/view/month", compress=True, include_in_schema=False)
def show_month(month: Annotated[str, Query()] = "") -> Response[Any]:
    """Return the tenant's use of the deployment in a month such as `2026-11`, or in this one."""
    from .month_view import month_view

    return month_view(month)


@router.get("/dashboard/view/batches/<batch_id>", compress=True, include_in_schema=False)
def show_batch(batch_id: str) -> Response[Any]:
    """Return one batch."""
    from .views import batch

    return batch(batch_id)


@router.get("/dashboard/view/batches/<batch_id>/errors", compress=True, include_in_schema=False)
def show_errors(batch_id: str) -> Response[Any]:
    """Return the first failed rows of a batch."""
    from .views import errors

    return errors(batch_id)


@router.get("/dashboard/view/batches/<batch_id>/rows", compress=True, include_in_schema=False)
def show_rows(batch_id: str) -> Response[Any]:
    """Return the rows of a batch that match the search in the query string."""
    from .rows import rows

    return rows(batch_id, router.current_event.query_string_parameters)


@router.get("/dashboard/view/batches/<batch_id>/first-rows", compress=True, include_in_schema=False)
def show_first_rows(batch_id: str) -> Response[Any]:
    """Return a few rows of a batch, failed ones first."""
    from .rows import first_rows

    return first_rows(batch_id)


@router.get("/dashboard/view/batches/<batch_id>/requests", compress=True, include_in_schema=False)
def show_requests(batch_id: str, lines: Annotated[str, Query()] = "") -> Response[Any]:
    """Return the requests of a few lines of a batch."""
    from .rows import requests

    return requests(batch_id, lines)


@router.get("/dashboard/view/batches/<batch_id>/export", include_in_schema=False)
def show_export(batch_id: str):  # type: ignore[no-untyped-def]  # noqa: ANN201 - see below
    """Return a piece of a CSV or Parquet file of the rows that match a search.

    Powertools would read the bytes of an annotated response as text.
    """
    from .rows import export

    return export(batch_id, router.current_event.query_string_parameters)


@router.get("/dashboard/view/batches/<batch_id>/retry", compress=True, include_in_schema=False)
def show_retry(batch_id: str) -> Response[Any]:
    """Return the counts and the dialog of a retry; empty if nothing can be retried."""
    from .retry import retry

    return retry(batch_id)


@router.get("/dashboard/view/new", compress=True, include_in_schema=False)
def show_form() -> Response[Any]:
    """Return the form of a new batch."""
    from .views import form

    return form()


@router.post("/dashboard/view/check", compress=True, include_in_schema=False)
def show_check() -> Response[Any]:
    """Return the check of a file before its upload; its body is in no API document."""
    from .checks import check

    return check(body_of(router.current_event), tenant_of(router.context))


@router.get("/dashboard/view/files/<file_id>/link", include_in_schema=False)
def show_link(file_id: str) -> Response[Any]:
    """Return a presigned URL of a file; the browser opens it without the key."""
    from .views import link

    return link(file_id)

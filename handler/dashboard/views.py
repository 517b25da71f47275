"""Views of the page: HTML fragments about the caller's own batches."""

from __future__ import annotations

import time
from collections.abc import Sequence

from aws_lambda_powertools.event_handler import Response
from pydantic_core import to_json

from tidemill.batch.batch_object import BatchObject
from tidemill.batch.object_keys import DROP_TENANT, INPUT_PREFIX
from tidemill.dashboard.batch_row import BatchRow
from tidemill.dashboard.failures import Failure, group_errors
from tidemill.protocol.routes import ENDPOINTS

from ..api.envelope.caller import aws, tenant_of
from ..api.routers.batches import kept_batch, list_batches, retrieve_batch, router
from ..api.routers.files import file_content
from ..deployment import deployment
from ..queries.batch_view import progress_of
from .first_errors import first_errors
from .page import html, serve_text

_PAGE_BATCHES = 20
_WINDOWS = (
    ("1h", "an hour"),
    ("6h", "six hours"),
    ("24h", "a day"),
    ("3d", "three days"),
    ("7d", "a week"),
    ("14d", "two weeks"),
)


def session() -> Response[str]:
    """Return the tenant of the request's key."""
    body = to_json({"tenant": tenant_of(router.context)}).decode()
    return serve_text(body, "application/json")


def batches(after: str | None) -> Response[str]:
    """Return a page of batches older than `after`, or the newest."""
    page = list_batches(limit=_PAGE_BATCHES, after=after)
    rows = describe(page.data)
    older = page.last_id if page.has_more else None
    is_live = not all(row.has_ended for row in rows)
    tenant = tenant_of(router.context)
    drop_prefix = INPUT_PREFIX if tenant == DROP_TENANT else f"{INPUT_PREFIX}{tenant}/"
    owns_drops = deployment().settings.tenant_of_drop(drop_prefix) == tenant
    return html(
        "batches.html",
        rows=rows,
        after=after,
        older=older,
        is_live=is_live,
        drop_prefix=drop_prefix if owns_drops else None,
        currency=_currency(),
    )


def batch(batch_id: str) -> Response[str]:
    """Return one batch."""
    (row,) = describe([retrieve_batch(batch_id)])
    errors = row.wire.errors.data if row.wire.errors else []
    problems = group_errors(
        Failure(str(error.line or ""), error.code, error.message) for error in errors
    )
    return html(
        "batch.html",
        row=row,
        batch=row.wire,
        problems=problems,
        is_live=not row.has_ended,
        currency=_currency(),
    )


def errors(batch_id: str) -> Response[str]:
    """Return the first failed rows of a batch."""
    found = kept_batch(router.context, batch_id)
    progress = aws().run(progress_of(deployment(), found, time.time()))
    failures = aws().run(first_errors(deployment(), found)) or []
    return html(
        "errors.html",
        kinds=group_errors(failures),
        num_read=len(failures),
        num_failed=progress.failed,
        has_ended=found.is_terminal,
    )


def form() -> Response[str]:
    """Return the form of a new batch."""
    return html(
        "new.html",
        endpoints=ENDPOINTS,
        windows=_WINDOWS,
        models=list(deployment().work),
    )


def link(file_id: str) -> Response[str]:
    """Return a fresh URL of a file: a redirect would send the key along."""
    body = to_json({"url": file_content(file_id).headers["Location"]}).decode()
    return serve_text(body, "application/json")


def _currency() -> str:
    """Return the currency of costs; empty if the deployment has no price."""
    settings = deployment().settings
    return settings.currency if settings.gpu_hour_prices else ""


def describe(wires: Sequence[BatchObject]) -> list[BatchRow]:
    """Return batches with their files' names, or their IDs if the file is gone."""
    tenant, now = tenant_of(router.context), time.time()
    files = deployment().files
    uploaded = [wire.input_file_id for wire in wires if wire.input_file_id and not _is_drop(wire)]
    found = aws().run_all(files.get_file(file_id) for file_id in uploaded)
    names = {file.id: file.filename for file in found if file and file.tenant == tenant}
    return [BatchRow(wire, names.get(wire.input_file_id) or _key_of(wire), now) for wire in wires]


def _is_drop(wire: BatchObject) -> bool:
    return wire.input_file_id.startswith("s3://")


def _key_of(wire: BatchObject) -> str:
    """Return a drop's key without the common prefix, or any other file's ID."""
    if not _is_drop(wire):
        return wire.input_file_id or "erased"
    return wire.input_file_id.split("/", 3)[-1].removeprefix(INPUT_PREFIX)

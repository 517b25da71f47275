"""Views of the page: HTML fragments about the caller's own batches."""

from __future__ import annotations

import time
from collections.abc import Sequence

from aws_lambda_powertools.event_handler import Response
from pydantic_core import to_json

from tidemill.batch.batch_object import BatchObject
from tidemill.batch.object_keys import DROP_TENANT, INPUT_PREFIX
from tidemill.batch.states import Status
from tidemill.dashboard.batch_row import BatchRow
from tidemill.dashboard.failures import Failure, group_errors
from tidemill.dashboard.names import batch_name, is_dropped
from tidemill.dashboard.tabs import TABS
from tidemill.protocol.routes import ENDPOINTS

from ..api.envelope.caller import aws, tenant_of
from ..api.routers.batches import describe_batches, kept_batch, own_batch, retrieve_batch, router
from ..api.routers.files import file_content
from ..deployment import deployment
from ..queries.batch_search import search_batches
from ..queries.batch_view import progress_of
from .first_errors import first_errors, first_message
from .page import html, serve_text

_PAGE_BATCHES = 20
_MAX_NAME_CHARS = 200
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


def batches(after: str | None, tab: str = "", name: str = "") -> Response[str]:
    """Return batches older than `after`, or the newest, of a tab and with a name."""
    tenant, name = tenant_of(router.context), name.strip()[:_MAX_NAME_CHARS]
    tab = tab if tab in TABS else ""
    last = own_batch(router.context, after, param="after") if after is not None else None
    searching = search_batches(
        deployment(), tenant, limit=_PAGE_BATCHES, after=last, tab=tab, name=name
    )
    found = aws().run(searching)
    rows = _rows(describe_batches(found.batches))
    is_live = not all(row.has_ended for row in rows)
    drop_prefix = INPUT_PREFIX if tenant == DROP_TENANT else f"{INPUT_PREFIX}{tenant}/"
    owns_drops = deployment().settings.tenant_of_drop(drop_prefix) == tenant
    return html(
        "batches.html",
        rows=rows,
        after=after,
        found=found,
        tabs=TABS,
        tab=tab,
        name=name,
        is_live=is_live,
        drop_prefix=drop_prefix if owns_drops else None,
        currency=_currency(),
    )


def batch(batch_id: str) -> Response[str]:
    """Return one batch."""
    (row,) = _rows([retrieve_batch(batch_id)])
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


def _rows(wires: Sequence[BatchObject]) -> list[BatchRow]:
    """Return batches with the names of their files and the first error of a completed one."""
    tenant, now = tenant_of(router.context), time.time()
    inputs = {wire.input_file_id for wire in wires if not is_dropped(wire.input_file_id)}
    failed = {wire.error_file_id or "" for wire in wires if wire.status is Status.COMPLETED}
    found = aws().run(deployment().files.get_files(sorted((inputs | failed) - {""})))
    files = {file.id: file for file in found if file.tenant == tenant}
    names = {file.id: file.filename for file in files.values()}
    error_files = [files[file_id] for file_id in failed if file_id in files]
    messages = aws().run_all(first_message(deployment(), file) for file in error_files)
    reasons = {file.id: words for file, words in zip(error_files, messages, strict=True)}
    return [
        BatchRow(
            wire,
            batch_name(wire.input_file_id, names.get(wire.input_file_id)),
            now,
            reasons.get(wire.error_file_id or "", ""),
        )
        for wire in wires
    ]

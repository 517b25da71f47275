"""Views of the page about the caller's own batches, read from the deployment's stores."""

from __future__ import annotations

import time
from collections.abc import Sequence

from aws_lambda_powertools.event_handler import Response
from pydantic_core import to_json

from tidemill.batch.batch_object import BatchObject
from tidemill.batch.object_keys import DROP_TENANT, INPUT_PREFIX
from tidemill.batch.states import Status
from tidemill.dashboard import pages
from tidemill.dashboard.batch_row import BatchRow
from tidemill.dashboard.names import is_dropped
from tidemill.dashboard.tabs import TABS

from ..api.envelope.caller import aws, tenant_of
from ..api.routers.batches import describe_batches, kept_batch, own_batch, retrieve_batch, router
from ..api.routers.files import file_content
from ..deployment import deployment
from ..queries.batch_search import search_batches
from ..queries.batch_view import progress_of
from .first_errors import first_errors, first_message
from .page import html, serve_text, site

_MAX_NAME_CHARS = 200


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
        deployment(), tenant, limit=pages.PAGE_BATCHES, after=last, tab=tab, name=name
    )
    found = aws().run(searching)
    end = None if found.last is None else (found.last.id, found.last.created_at)
    drop_prefix = INPUT_PREFIX if tenant == DROP_TENANT else f"{INPUT_PREFIX}{tenant}/"
    owns_drops = deployment().settings.tenant_of_drop(drop_prefix) == tenant
    text = pages.batches(
        site(),
        rows_of(describe_batches(found.batches), with_reasons=True),
        pages.Search(tab, name, after, found.num_searched, end),
        drop_prefix=drop_prefix if owns_drops else "",
    )
    return html(text)


def batch(batch_id: str) -> Response[str]:
    """Return one batch."""
    (row,) = rows_of([retrieve_batch(batch_id)])
    return html(pages.batch(site(), row))


def errors(batch_id: str) -> Response[str]:
    """Return the first failed rows of a batch."""
    found = kept_batch(router.context, batch_id)
    progress = aws().run(progress_of(deployment(), found, time.time()))
    failures = aws().run(first_errors(deployment(), found)) or []
    return html(pages.errors(failures, num_failed=progress.failed, has_ended=found.is_terminal))


def form() -> Response[str]:
    """Return the form of a new batch."""
    return html(pages.form(list(deployment().work)))


def link(file_id: str) -> Response[str]:
    """Return a fresh URL of a file: a redirect would send the key along."""
    body = to_json({"url": file_content(file_id).headers["Location"]}).decode()
    return serve_text(body, "application/json")


def rows_of(wires: Sequence[BatchObject], *, with_reasons: bool = False) -> list[BatchRow]:
    """Return batches with the names of their files, and for a list the first error of each."""
    tenant = tenant_of(router.context)
    inputs = {wire.input_file_id for wire in wires if not is_dropped(wire.input_file_id)}
    ended = [wire for wire in wires if with_reasons and wire.status is Status.COMPLETED]
    failed = {wire.error_file_id or "" for wire in ended}
    found = aws().run(deployment().files.get_files(sorted((inputs | failed) - {""})))
    files = {file.id: file for file in found if file.tenant == tenant}
    names = {file.id: file.filename for file in files.values()}
    error_files = [files[file_id] for file_id in failed if file_id in files]
    messages = aws().run_all(first_message(deployment(), file) for file in error_files)
    reasons = {file.id: words for file, words in zip(error_files, messages, strict=True)}
    return [
        pages.row_of(wire, names, first_error=reasons.get(wire.error_file_id or "", ""))
        for wire in wires
    ]

"""Views of the page about the caller's own batches, read from the deployment's stores."""

from __future__ import annotations

import time
from collections.abc import Sequence

from aws_lambda_powertools.event_handler import Response
from pydantic_core import to_json

from tidemill.batch.batch_object import BatchObject
from tidemill.batch.object_keys import DROP_TENANT, INPUT_PREFIX
from tidemill.dashboard import pages

from ..api.envelope.caller import aws, tenant_of
from ..api.routers.batches import kept_batch, list_batches, retrieve_batch, router
from ..api.routers.files import file_content
from ..deployment import deployment
from ..queries.batch_view import progress_of
from .first_errors import first_errors
from .page import html, serve_text, site


def session() -> Response[str]:
    """Return the tenant of the request's key."""
    body = to_json({"tenant": tenant_of(router.context)}).decode()
    return serve_text(body, "application/json")


def batches(after: str | None) -> Response[str]:
    """Return a page of batches older than `after`, or the newest."""
    listed = list_batches(limit=pages.PAGE_BATCHES, after=after)
    tenant = tenant_of(router.context)
    drop_prefix = INPUT_PREFIX if tenant == DROP_TENANT else f"{INPUT_PREFIX}{tenant}/"
    owns_drops = deployment().settings.tenant_of_drop(drop_prefix) == tenant
    return html(
        pages.batches(
            site(),
            listed,
            names_of(listed.data),
            after=after,
            drop_prefix=drop_prefix if owns_drops else None,
        )
    )


def batch(batch_id: str) -> Response[str]:
    """Return one batch."""
    wire = retrieve_batch(batch_id)
    return html(pages.batch(site(), wire, names_of([wire])))


def errors(batch_id: str) -> Response[str]:
    """Return the first failed rows of a batch."""
    found = kept_batch(router.context, batch_id)
    progress = aws().run(progress_of(deployment(), found, time.time()))
    failures = aws().run(first_errors(deployment(), found)) or []
    return html(pages.errors(failures, num_failed=progress.failed, has_ended=found.is_terminal))


def form() -> Response[str]:
    """Return the form of a new batch."""
    return html(pages.form(site(), list(deployment().work)))


def link(file_id: str) -> Response[str]:
    """Return a fresh URL of a file: a redirect would send the key along."""
    body = to_json({"url": file_content(file_id).headers["Location"]}).decode()
    return serve_text(body, "application/json")


def names_of(wires: Sequence[BatchObject]) -> dict[str, str]:
    """Return the names of the caller's uploaded files by ID."""
    tenant, files = tenant_of(router.context), deployment().files
    found = aws().run_all(files.get_file(file_id) for file_id in pages.uploaded_inputs(wires))
    return {file.id: file.filename for file in found if file and file.tenant == tenant}

"""Views of the page: HTML fragments about the caller's own batches."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from aws_lambda_powertools.event_handler import Response
from pydantic_core import to_json

from tidemill.batch.batch_object import BatchObject
from tidemill.batch.file.throughput import Rates
from tidemill.batch.object_keys import DROP_TENANT, INPUT_PREFIX
from tidemill.batch.states import TERMINAL, Status
from tidemill.protocol.routes import ENDPOINTS

from ..api.envelope.caller import aws, tenant_of
from ..api.routers.batches import kept_batch, list_batches, retrieve_batch, router
from ..api.routers.files import file_content
from ..deployment import deployment
from ..queries.batch_view import progress_of
from .error_kinds import Failure, group_errors
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
# These produce numbers, not tokens.
_WITHOUT_TOKENS = {
    *("/v1/embeddings", "/v1/score", "/v1/rerank", "/v1/generative_scoring"),
    *("/v1/decisions", "/v1/systemone"),
}
_CANCELLABLE = {Status.VALIDATING, Status.IN_PROGRESS}


@dataclass(frozen=True, slots=True)
class BatchRow:
    """A batch for display: the API's object, a name for it, and derived values."""

    wire: BatchObject
    name: str
    now: float

    @property
    def has_ended(self) -> bool:
        """True once nothing changes any more."""
        return self.wire.status in TERMINAL

    @property
    def is_cancellable(self) -> bool:
        """True while it can be cancelled."""
        return self.wire.status in _CANCELLABLE

    @property
    def num_done(self) -> int:
        """Number of finished rows, successful or failed."""
        return self.wire.request_counts.completed + self.wire.request_counts.failed

    @property
    def percent(self) -> int:
        """Percentage of finished rows; 100 only when all are."""
        total = self.wire.request_counts.total
        return self.num_done * 100 // total if total else 0

    @property
    def writes_tokens(self) -> bool:
        """True for a model that generates tokens."""
        wire = self.wire
        return bool(wire.usage.output_tokens) or wire.endpoint not in _WITHOUT_TOKENS

    @property
    def flow(self) -> str:
        """Rate of tokens written, tokens read or audio, the first that applies."""
        beyond = self.wire.tidemill
        return Rates(*(getattr(beyond, name) for name in Rates._fields)).main_rate

    @property
    def worked_until(self) -> int | None:
        """Time of the last possible row; None while more may come."""
        wire = self.wire
        ends = (wire.finalizing_at, wire.completed_at, wire.cancelled_at, wire.expired_at)
        return next((at for at in ends if at), None)

    @property
    def left_seconds(self) -> float | None:
        """Seconds left at the present rate."""
        eta_at = self.wire.tidemill.eta_at
        return None if eta_at is None else max(0.0, eta_at - self.now)


def session() -> Response[str]:
    """Return the tenant of the request's key."""
    body = to_json({"tenant": tenant_of(router.context)}).decode()
    return serve_text(body, "application/json")


def batches(after: str | None) -> Response[str]:
    """Return a page of batches older than `after`, or the newest."""
    page = list_batches(limit=_PAGE_BATCHES, after=after)
    rows = _rows(page.data)
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

"""What the page is filled with: pieces of HTML about the caller's own batches."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from aws_lambda_powertools.event_handler import Response
from pydantic_core import to_json

from engine.batchfile.pace import Rates
from engine.protocol.routes import ENDPOINTS
from handler.api.envelope.caller import tenant_of
from handler.api.envelope.means import aws
from handler.api.routers.batches import list_batches, own_batch, retrieve_batch, router
from handler.api.routers.files import file_content
from handler.batch.keys import DROP_TENANT, INPUT_PREFIX
from handler.batch.states import TERMINAL, Status
from handler.batch.wire import BatchObject
from handler.dashboard.error_kinds import Failure, kinds_of
from handler.dashboard.first_errors import first_errors
from handler.dashboard.page import html, serve_text
from handler.deployment import deployment
from handler.reading.describe import progress_of

_PAGE_BATCHES = 20
_WINDOWS = (
    ("1h", "an hour"),
    ("6h", "six hours"),
    ("24h", "a day"),
    ("3d", "three days"),
    ("7d", "a week"),
    ("14d", "two weeks"),
)
# They give numbers, not tokens.
_WITHOUT_TOKENS = {"/v1/embeddings", "/v1/score", "/v1/rerank"}
_CANCELLABLE = {Status.VALIDATING, Status.IN_PROGRESS}


@dataclass(frozen=True, slots=True)
class Row:
    """A batch as people see it: the API's object, a name for it, and what follows from both."""

    wire: BatchObject
    name: str
    now: float

    @property
    def has_ended(self) -> bool:
        """Whether nothing changes any more."""
        return self.wire.status in TERMINAL

    @property
    def is_cancellable(self) -> bool:
        """Whether it makes sense to ask for an end."""
        return self.wire.status in _CANCELLABLE

    @property
    def num_done(self) -> int:
        """Rows that are finished, good or bad."""
        return self.wire.request_counts.completed + self.wire.request_counts.failed

    @property
    def percent(self) -> int:
        """How much of it is done; 100 only when all of it is."""
        total = self.wire.request_counts.total
        return self.num_done * 100 // total if total else 0

    @property
    def writes_tokens(self) -> bool:
        """Whether tokens of its own are to be expected of it, as from any model that generates."""
        wire = self.wire
        return bool(wire.usage.output_tokens) or wire.endpoint not in _WITHOUT_TOKENS

    @property
    def flow(self) -> str:
        """How fast it reads, writes or listens, whichever tells most."""
        beyond = self.wire.tidemill
        return Rates(*(getattr(beyond, name) for name in Rates._fields)).flow

    @property
    def worked_until(self) -> int | None:
        """When its last row can have come; None while more may come."""
        wire = self.wire
        ends = (wire.finalizing_at, wire.completed_at, wire.cancelled_at, wire.expired_at)
        return next((at for at in ends if at), None)

    @property
    def left_seconds(self) -> float | None:
        """How long it will take at its present rate."""
        eta_at = self.wire.tidemill.eta_at
        return None if eta_at is None else max(0.0, eta_at - self.now)


def session() -> Response[str]:
    """Return whose key the request carries."""
    said = to_json({"tenant": tenant_of(router.context)}).decode()
    return serve_text(said, "application/json")


def batches(after: str | None) -> Response[str]:
    """Return a page of batches older than `after`, or the newest."""
    page = list_batches(limit=_PAGE_BATCHES, after=after)
    rows = _rows(page.data)
    older = page.last_id if page.has_more else None
    is_live = not all(row.has_ended for row in rows)
    owns_drops = tenant_of(router.context) == DROP_TENANT
    return html(
        "batches.html",
        rows=rows,
        after=after,
        older=older,
        is_live=is_live,
        owns_drops=owns_drops,
        currency=_currency(),
    )


def batch(batch_id: str) -> Response[str]:
    """Return one batch."""
    (row,) = _rows([retrieve_batch(batch_id)])
    errors = row.wire.errors.data if row.wire.errors else []
    problems = kinds_of(
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
    """Return the first rows of a batch that went wrong."""
    found = own_batch(router.context, batch_id)
    progress = aws().run(progress_of(deployment(), found, time.time()))
    failures = aws().run(first_errors(deployment(), found)) or []
    return html(
        "errors.html",
        kinds=kinds_of(failures),
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
    """Return a url for a file, made at this moment: a redirect would take the key along."""
    said = to_json({"url": file_content(file_id).headers["Location"]}).decode()
    return serve_text(said, "application/json")


def _currency() -> str:
    """Return what costs are in, nothing where the deployment has no price."""
    settings = deployment().settings
    return settings.currency if settings.gpu_hour_prices else ""


def _rows(wires: Sequence[BatchObject]) -> list[Row]:
    """Return batches under the names of their files; one whose file is gone goes by its id."""
    tenant, now = tenant_of(router.context), time.time()
    files = deployment().files
    uploaded = [wire.input_file_id for wire in wires if not _is_drop(wire)]
    found = aws().run_all(files.get_file(file_id) for file_id in uploaded)
    names = {file.id: file.filename for file in found if file and file.tenant == tenant}
    return [Row(wire, names.get(wire.input_file_id) or _key_of(wire), now) for wire in wires]


def _is_drop(wire: BatchObject) -> bool:
    return wire.input_file_id.startswith("s3://")


def _key_of(wire: BatchObject) -> str:
    """Return a drop's key without what all have in common, and the id of any other file."""
    if not _is_drop(wire):
        return wire.input_file_id
    return wire.input_file_id.split("/", 3)[-1].removeprefix(INPUT_PREFIX)

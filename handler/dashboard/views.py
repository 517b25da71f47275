"""What the page is filled with: pieces of HTML about the caller's own batches."""

from __future__ import annotations

import time
from dataclasses import dataclass

from aws_lambda_powertools.event_handler import Response
from pydantic_core import to_json

from handler.api.batches import list_batches, retrieve_batch, router
from handler.api.caller import tenant_of
from handler.batch.states import TERMINAL, Status
from handler.batch.wire import BatchObject
from handler.dashboard.page import answer, html

_PAGE_BATCHES = 20
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
    def left_seconds(self) -> float | None:
        """How long it will take at its present rate."""
        eta_at = self.wire.tidemill.eta_at
        return None if eta_at is None else max(0.0, eta_at - self.now)


def session() -> Response[str]:
    """Return whose key the request carries."""
    said = to_json({"tenant": tenant_of(router.current_event)}).decode()
    return answer(said, "application/json")


def batches(after: str | None) -> Response[str]:
    """Return a page of batches older than `after`, or the newest."""
    page = list_batches(limit=_PAGE_BATCHES, after=after)
    rows = [_row(wire) for wire in page.data]
    older = page.last_id if page.has_more else None
    is_live = not all(row.has_ended for row in rows)
    return html("batches.html", rows=rows, after=after, older=older, is_live=is_live)


def batch(batch_id: str) -> Response[str]:
    """Return one batch."""
    row = _row(retrieve_batch(batch_id))
    return html("batch.html", row=row, batch=row.wire, is_live=not row.has_ended)


def _row(wire: BatchObject) -> Row:
    return Row(wire, wire.input_file_id.rpartition("/")[2], time.time())

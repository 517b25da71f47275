"""Views of the page: API objects in, HTML out. Their callers read the stores."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tidemill.batch.batch_object import BatchObject
from tidemill.batch.object_keys import INPUT_PREFIX
from tidemill.batch.pagination import Page
from tidemill.protocol.names import ANY_MODEL
from tidemill.protocol.routes import ENDPOINTS

from .batch_row import BatchRow
from .failures import Failure, group_errors
from .render import render

PAGE_BATCHES: Final = 20
_WINDOWS: Final = (
    ("1h", "an hour"),
    ("6h", "six hours"),
    ("24h", "a day"),
    ("3d", "three days"),
    ("7d", "a week"),
    ("14d", "two weeks"),
)


@dataclass(frozen=True, slots=True)
class Site:
    """The API that the page shows: a deployment, or a server on one machine.

    `currency` is empty without a price. A local server has no bucket, workers or costs.
    """

    currency: str = ""
    is_local: bool = False


def page(site: Site, auth: str) -> str:
    """Return the page; `auth` is `keys`, `iam` for signed requests, or `none`."""
    return render("page.html", auth=auth, is_local=site.is_local)


def batches(
    site: Site,
    listed: Page[BatchObject],
    names: Mapping[str, str],
    *,
    after: str | None,
    drop_prefix: str | None = None,
) -> str:
    """Return a page of batches older than `after`, or the newest.

    `names` are those of uploaded files, by ID. `drop_prefix` is the caller's folder of the bucket.
    """
    rows = [row_of(wire, names) for wire in listed.data]
    return render(
        "batches.html",
        rows=rows,
        after=after,
        older=listed.last_id if listed.has_more else None,
        is_live=not all(row.has_ended for row in rows),
        drop_prefix=drop_prefix,
        currency=site.currency,
        is_local=site.is_local,
    )


def batch(site: Site, wire: BatchObject, names: Mapping[str, str]) -> str:
    """Return one batch."""
    row = row_of(wire, names)
    errors = wire.errors.data if wire.errors else []
    problems = group_errors(
        Failure(str(error.line or ""), error.code, error.message) for error in errors
    )
    return render(
        "batch.html",
        row=row,
        batch=wire,
        problems=problems,
        is_live=not row.has_ended,
        currency=site.currency,
        is_local=site.is_local,
    )


def errors(failures: Sequence[Failure], *, num_failed: int, has_ended: bool) -> str:
    """Return the first failed rows of a batch."""
    return render(
        "errors.html",
        kinds=group_errors(failures),
        num_read=len(failures),
        num_failed=num_failed,
        has_ended=has_ended,
    )


def form(site: Site, models: Sequence[str]) -> str:
    """Return the form of a new batch; `models` may contain ANY_MODEL."""
    return render(
        "new.html",
        endpoints=ENDPOINTS,
        windows=_WINDOWS,
        models=[name for name in models if name != ANY_MODEL],
        takes_any_model=ANY_MODEL in models,
        is_local=site.is_local,
    )


def uploaded_inputs(wires: Sequence[BatchObject]) -> list[str]:
    """Return the IDs of the input files, except drops, whose names are their keys."""
    return [wire.input_file_id for wire in wires if wire.input_file_id and not _is_drop(wire)]


def row_of(wire: BatchObject, names: Mapping[str, str]) -> BatchRow:
    """Return a batch with its file's name, or the ID if the file is gone."""
    return BatchRow(wire, names.get(wire.input_file_id) or _key_of(wire), time.time())


def _is_drop(wire: BatchObject) -> bool:
    return wire.input_file_id.startswith("s3://")


def _key_of(wire: BatchObject) -> str:
    """Return a drop's key without the common prefix, or any other file's ID."""
    if not _is_drop(wire):
        return wire.input_file_id or "erased"
    return wire.input_file_id.split("/", 3)[-1].removeprefix(INPUT_PREFIX)

"""Views of the page: API objects in, HTML out. Their callers read the stores."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tidemill.batch.batch_object import BatchObject
from tidemill.protocol.names import ANY_MODEL
from tidemill.protocol.routes import ENDPOINTS

from .batch_row import BatchRow
from .failures import Failure, group_errors
from .names import batch_name
from .render import render
from .tabs import TABS

if TYPE_CHECKING:
    from .checked_file import Estimate, FileCheck  # which imports the parsers of files

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

    `currency` is empty without a price, and None for a server whose rows cost nothing.
    """

    currency: str | None = ""


@dataclass(frozen=True, slots=True)
class Search:
    """A search of the list by tab and name, for batches older than the one with ID `after`.

    If older ones are left, `last` has ID and time of the last one that was read.
    """

    tab: str
    name: str
    after: str | None
    num_searched: int
    last: tuple[str, int] | None


def page(auth: str, views: str = "/dashboard/view", *, has_batches: bool = True) -> str:
    """Return the page; `auth` is `keys`, `iam` for signed requests, or `none`.

    Its views are at the URL `views`. Without batches, the only view is that of rows.
    """
    return render("page.html", auth=auth, views=views, has_batches=has_batches)


def batches(
    site: Site, rows: Sequence[BatchRow], search: Search, *, drop_prefix: str | None = None
) -> str:
    """Return a page of the list; `drop_prefix` is the caller's folder of the bucket.

    It is empty for a caller without a folder, and None without a bucket.
    """
    return render(
        "batches.html",
        rows=rows,
        search=search,
        tabs=TABS,
        is_live=not all(row.has_ended for row in rows),
        drop_prefix=drop_prefix,
        currency=site.currency,
    )


def batch(site: Site, row: BatchRow) -> str:
    """Return one batch."""
    errors = row.wire.errors.data if row.wire.errors else []
    problems = group_errors(
        Failure(str(error.line or ""), error.code, error.message) for error in errors
    )
    return render(
        "batch.html",
        row=row,
        batch=row.wire,
        problems=problems,
        is_live=not row.has_ended,
        currency=site.currency,
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


def check(site: Site, found: FileCheck, expected: Estimate | None, *, has_price: bool) -> str:
    """Return the check of a file before its upload."""
    return render(
        "check.html",
        check=found,
        estimate=expected,
        has_price=has_price,
        currency=site.currency,
    )


def form(models: Sequence[str], *, runs_tables: bool = True) -> str:
    """Return the form of a new batch; `models` may contain ANY_MODEL."""
    return render(
        "new.html",
        endpoints=ENDPOINTS,
        windows=_WINDOWS,
        models=[name for name in models if name != ANY_MODEL],
        takes_any_model=ANY_MODEL in models,
        runs_tables=runs_tables,
    )


def row_of(wire: BatchObject, names: Mapping[str, str], *, first_error: str = "") -> BatchRow:
    """Return a batch with the name of its file; `names` are those of uploaded files, by ID."""
    name = batch_name(wire.input_file_id, names.get(wire.input_file_id))
    return BatchRow(wire, name, time.time(), first_error)

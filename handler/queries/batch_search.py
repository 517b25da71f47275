"""Search of a tenant's batches by tab and name; one search reads a bounded number of batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from tidemill.batch.model import Batch
from tidemill.dashboard.names import batch_name, is_dropped
from tidemill.dashboard.tabs import tab_of

from ..aws.calls import Operation
from ..deployment import Deployment

MAX_SEARCHED: Final = 500
_PAGE: Final = 100


class SearchResult(NamedTuple):
    """Batches found, newest first, and the last one that was read if older ones follow."""

    batches: list[Batch]
    num_searched: int
    last: Batch | None


def search_batches(
    deployment: Deployment,
    tenant: str,
    *,
    limit: int,
    after: Batch | None = None,
    tab: str = "",
    name: str = "",
) -> Operation[SearchResult]:
    """Return batches of a tab whose name or ID contains `name`, older than `after`."""
    size = _PAGE if tab or name else limit
    found: list[Batch] = []
    num_searched, has_more = 0, True
    while has_more and len(found) < limit and num_searched < MAX_SEARCHED:
        page, has_more = yield from deployment.table.list_batches(tenant, limit=size, after=after)
        matching = [batch for batch in page if tab in ("", _tab_of(batch))]
        if name:
            matching = yield from _named(deployment, matching, name.casefold())
        room = limit - len(found)
        found += matching[:room]
        if len(matching) >= room:
            # The batches after the last one found are searched next time.
            end = page.index(found[-1]) + 1
            page, has_more = page[:end], has_more or end < len(page)
        num_searched += len(page)
        after = page[-1] if page else None
    return SearchResult(found, num_searched, after if has_more else None)


def _tab_of(batch: Batch) -> str:
    return tab_of(batch.status, batch.final.failed if batch.final else 0)


def _named(deployment: Deployment, batches: Sequence[Batch], words: str) -> Operation[list[Batch]]:
    shown = [batch if batch.erasing_at is None else batch.tombstone for batch in batches]
    uploaded = {each.input_file_id for each in shown if not is_dropped(each.input_file_id)} - {""}
    files = yield from deployment.files.get_files(sorted(uploaded))
    names = {file.id: file.filename for file in files}
    return [
        batch
        for batch, each in zip(batches, shown, strict=True)
        if words in batch_name(each.input_file_id, names.get(each.input_file_id)).casefold()
        or words in batch.id
    ]

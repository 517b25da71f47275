"""Table of rows: the rows of an ended batch as a CSV or Parquet file, as the dashboard makes it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final

from tidemill.batch.table.parquet_writer import write_footer
from tidemill.dashboard.exported_cells import ExportShape
from tidemill.dashboard.row_export import encode_rows
from tidemill.offline.console.backoff import LONG_SECONDS
from tidemill.offline.console.errors import CliError
from tidemill.offline.console.terminal import amount, log
from tidemill.offline.files.new_file import open_new_file

from ..api.client import Client
from ..api.objects import Batch
from .fetched_table import format_of_rows

_GROUP_ROWS: Final = 20_000
_GROUP_BYTES: Final = 2**24


def write_table_of_rows(client: Client, batch: Batch, name: str) -> None:
    """Write the rows of a batch to a new file; raises CliError for a batch without rows."""
    is_parquet = format_of_rows(name) == "parquet"
    num_rows = start = 0
    groups: list[bytes] = []
    shape: ExportShape | None = None
    with open_new_file(name) as file:
        for rows in _groups(client, batch.id):
            shape = shape or ExportShape.of_rows(data for _, data in rows)
            cells = [shape.cells(line, data) for line, data in rows]
            data, about = encode_rows(shape, cells, is_parquet=is_parquet, start=start)
            file.write(data)
            groups.append(about)
            start, num_rows = start + len(data), num_rows + len(rows)
        if shape is None:
            raise CliError(f"{batch.id} has no rows: see `tidemill status {batch.id}`")
        if is_parquet:
            about = b"".join(groups)
            before, after = write_footer(shape.columns(), num_rows, len(groups), len(about))
            file.write(before + about + after)
    log(f"{amount(num_rows, 'row')} in {name}")


def _groups(client: Client, batch_id: str) -> Iterator[list[tuple[int, bytes]]]:
    """Yield the rows by their lines, in groups of bounded size."""
    after, has_more, num_bytes = 0, True, 0
    group: list[tuple[int, bytes]] = []
    while has_more:
        page = client.rows(batch_id, after, retry_seconds=LONG_SECONDS)
        for row in page.rows:
            after = row["line"]
            group.append((after, json.dumps(row).encode()))
            num_bytes += len(group[-1][1])
            if len(group) == _GROUP_ROWS or num_bytes >= _GROUP_BYTES:
                yield group
                group, num_bytes = [], 0
        has_more = page.has_more and bool(page.rows)
    if group:
        yield group

"""Table of rows: the rows of an ended batch as a CSV or Parquet file, as the dashboard makes it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from tidemill.batch.table.parquet_writer import write_footer
from tidemill.dashboard.exported_cells import ExportShape, first_answers
from tidemill.dashboard.failures import error_of
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
_MAX_NAMED: Final = 10


def write_table_of_rows(client: Client, batch: Batch, name: str) -> None:
    """Write the rows of a batch to a new file.

    Raises CliError for a batch without rows, and for a file that lacks answers.
    """
    is_parquet = format_of_rows(name) == "parquet"
    num_rows = start = 0
    groups: list[bytes] = []
    too_large: list[int] = []
    answers, _ = first_answers(_data_of(row) for row in _rows(client, batch.id))
    shape = ExportShape.of_answers(answers)
    with open_new_file(name) as file:
        for rows in _groups(client, batch.id, too_large):
            cells = [shape.cells(line, data) for line, data in rows]
            data, about = encode_rows(
                shape, cells, is_parquet=is_parquet, start=start, escapes=False
            )
            file.write(data)
            groups.append(about)
            start, num_rows = start + len(data), num_rows + len(rows)
        if not num_rows:
            raise CliError(f"{batch.id} has no rows: see `tidemill status {batch.id}`")
        if is_parquet:
            about = b"".join(groups)
            before, after = write_footer(shape.columns(), num_rows, len(groups), len(about))
            file.write(before + about + after)
    log(f"{amount(num_rows, 'row')} in {name}")
    _check_rows(batch, name, num_rows, too_large)


def _check_rows(batch: Batch, name: str, num_rows: int, too_large: list[int]) -> None:
    """Raise CliError for a file that lacks rows or answers of a batch."""
    if too_large:
        lines = ", ".join(map(str, too_large[:_MAX_NAMED])) + ", …" * (len(too_large) > _MAX_NAMED)
        raise CliError(
            f"{name} lacks {amount(len(too_large), 'row')} above 4 MB (line {lines}): fetch all "
            f"rows with `tidemill results {batch.id} -o {batch.id}.output.jsonl`"
        )
    num_done = batch.completed + batch.failed
    if batch.status == "completed" and num_rows != num_done:
        raise CliError(
            f"{name} has {num_rows:,} of {amount(num_done, 'row')}: run the same command again "
            "with --force"
        )


def _groups(
    client: Client, batch_id: str, too_large: list[int]
) -> Iterator[list[tuple[int, bytes]]]:
    """Yield the rows by their lines, in groups of bounded size; list those that were left out."""
    num_bytes = 0
    group: list[tuple[int, bytes]] = []
    for row in _rows(client, batch_id):
        if row.get("custom_id") is None and error_of(row).get("code") == "row_too_large":
            too_large.append(row["line"])
        group.append((row["line"], _data_of(row)))
        num_bytes += len(group[-1][1])
        if len(group) == _GROUP_ROWS or num_bytes >= _GROUP_BYTES:
            yield group
            group, num_bytes = [], 0
    if group:
        yield group


def _rows(client: Client, batch_id: str) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a batch in line order."""
    after, has_more = 0, True
    while has_more:
        page = client.rows(batch_id, after, retry_seconds=LONG_SECONDS)
        yield from page.rows
        has_more = page.has_more and bool(page.rows)
        after = page.rows[-1]["line"] if page.rows else after


def _data_of(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row).encode()

"""Opened pages: the files of rows and requests that a web page shows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from ...console.errors import Refused
from ...extras import require_extras
from ...files.line_file import LineFile
from ...files.recorded_run import recorded_id
from ...files.request_lines import first_value, is_table
from ...files.row_file import RowFile, plain_copy
from ...files.source import Source, open_source
from .file_rows import FileRows
from .request_file import RequestFile

if TYPE_CHECKING:
    from .table_page import TablePage
    from .table_rows import TableRows

_PREFIX: Final = "output_"  # `batch.table.result_columns.PREFIX`, which needs pyarrow


class OpenPage(NamedTuple):
    """The name of a file and its rows."""

    name: str
    rows: FileRows | TablePage


@contextmanager
def open_page(
    name: str,
    requests: str | None,
    tmp_dir: Path | None,
    id_column: str | None = None,
) -> Iterator[OpenPage]:
    """Open rows and requests; raises BadInput for a first line that is not a row.

    A table has both in its columns.
    """
    with ExitStack() as stack:
        source = stack.enter_context(open_source(name, tmp_dir=tmp_dir))
        table = table_rows(source, name, requests, id_column)
        if table is not None:
            from .table_page import TablePage

            yield OpenPage(table.name, TablePage(table))
            return
        rows = RowFile(*stack.enter_context(plain_copy(source, tmp_dir)))
        next(rows.rows(), None)
        request_file = None
        if requests is not None:
            given = stack.enter_context(open_source(requests, tmp_dir=tmp_dir))
            opened = stack.enter_context(plain_copy(given, tmp_dir, as_requests=True))
            request_file = RequestFile(LineFile(*opened))
        yield OpenPage(rows.name, FileRows(rows.lines, request_file))


def table_rows(
    source: Source, name: str, requests: str | None, id_column: str | None = None
) -> TableRows | None:
    """Return the rows of a table, or of a JSON table of results; None for any other file.

    Raises Refused for a table together with a file of requests, or without the given ID column.
    """
    is_csv = name.lower().removesuffix(".gz").endswith((".csv", ".tsv"))
    if not (is_csv or is_table(source) or _has_json_results(source)):
        if id_column is not None:
            raise Refused(f"--id requires a table, but {name} is not one: remove it")
        return None
    if requests is not None:
        raise Refused("a table contains its requests as columns: remove -i")
    require_extras("a table", "tables")
    from .table_rows import TableRows

    table = TableRows(source, id_column or recorded_id(name))
    if id_column not in {None, *table.kept_names}:
        names = ", ".join(table.kept_names)
        raise Refused(f"{name} has no column `{id_column}` for --id: it has {names}")
    return table


def _has_json_results(source: Source) -> bool:
    """Return whether the first line is a row of a result table, not of an output."""
    fields = first_value(source)
    if not isinstance(fields, dict) or "response" in fields:
        return False
    return all(name in fields or _PREFIX + name in fields for name in ("usage", "error"))

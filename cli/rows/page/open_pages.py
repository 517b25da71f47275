"""Opened pages: the files of rows and requests behind a page, until it ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tidemill.batch.file.formats import HEAD_BYTES
from tidemill.batch.table.detection import ARROW_FILE, ARROW_STREAM, PARQUET

from ...console.errors import Refused
from ...extras import require_extras
from ...files.line_file import LineFile
from ...files.row_file import RowFile, open_plain, plain_copy
from ...files.source import Source, open_source
from .row_source import RequestFile, RowLines
from .search import RowPages

if TYPE_CHECKING:
    from .table_rows import TableRows


@contextmanager
def open_pages(
    name: str, requests: str | None, page_rows: int, tmp_dir: Path | None
) -> Iterator[RowPages]:
    """Open rows, and the requests beside them; raises BadInput for a first line that is no row.

    A table has both in its columns.
    """
    with ExitStack() as stack:
        source = stack.enter_context(open_source(name, tmp_dir=tmp_dir))
        table = table_rows(source, name, requests)
        if table is not None:
            yield RowPages(table, None, page_rows)
            return
        rows = RowFile(*stack.enter_context(plain_copy(source, tmp_dir)))
        next(rows.rows(), None)
        beside = None
        if requests is not None:
            opened = stack.enter_context(open_plain(requests, tmp_dir=tmp_dir))
            beside = RequestFile(LineFile(*opened))
        yield RowPages(RowLines(rows), beside, page_rows)


def table_rows(source: Source, name: str, requests: str | None) -> TableRows | None:
    """Return the rows of a table, which is one by its first bytes, or CSV by its name, else None.

    Raises Refused for a file of requests beside a table.
    """
    source.file.seek(0)
    head = source.file.read(HEAD_BYTES)
    is_csv = name.lower().removesuffix(".gz").endswith((".csv", ".tsv"))
    if not (is_csv or head.startswith((PARQUET, ARROW_FILE, ARROW_STREAM))):
        return None
    if requests is not None:
        raise Refused("a table has its requests in its own columns: leave out -i")
    require_extras("a table", "tables")
    from .table_rows import TableRows

    return TableRows(source)

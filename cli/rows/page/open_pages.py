"""Opened pages: the files of rows and requests behind a page, until it ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ...files.line_file import LineFile
from ...files.row_file import open_plain, open_rows
from .row_source import RequestFile, RowLines
from .search import RowPages


@contextmanager
def open_pages(
    name: str, requests: str | None, page_rows: int, tmp_dir: Path | None
) -> Iterator[RowPages]:
    """Open rows, and the requests beside them; raises BadInput for a first line that is no row."""
    with ExitStack() as stack:
        rows = stack.enter_context(open_rows(name, tmp_dir=tmp_dir))
        next(rows.rows(), None)
        beside = None
        if requests is not None:
            opened = stack.enter_context(open_plain(requests, tmp_dir=tmp_dir))
            beside = RequestFile(LineFile(*opened))
        yield RowPages(RowLines(rows), beside, page_rows)
